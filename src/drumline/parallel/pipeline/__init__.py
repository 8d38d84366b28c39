"""A model in stages: where it is cut, in which order each rank computes, and how tensors travel between ranks.

trace.py, cut.py       trace a model and find where stages may begin and which tensors cross there
profile.py, split.py   measure the units of a model and choose the split whose slowest stage is fastest
instructions.py        what a rank does in one step, as a list
schedule.py            builds these lists: gpipe, 1f1b, interleaved
simulate.py            runs the lists without tensors, with given times
execute.py             runs the lists on tensors; record.py: records when
transport.py           moves tensors between processes; mailbox.py: between threads and devices
norm.py                BatchNorm under micro-batches
"""
