"""A model in stages: where it is cut, in which order each rank computes, and what carries tensors between them.

cut.py           traces a model and finds where stages may begin and what crosses there
instructions.py  what a rank does in one step, as a list
schedule.py      makes those lists: gpipe, 1f1b, interleaved
simulate.py      runs the lists on paper, with given times
execute.py       runs the lists on tensors
carriers.py      how tensors travel; mailbox.py: between threads and devices, wire.py: between processes
record.py        when a lane computed, waited and sent
norm.py          BatchNorm under micro-batches
"""
