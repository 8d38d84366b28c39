"""Guards for a user's own loop: `watch = drumline.guard(model, optimizer)`.

Promises: adds no collective to the process group (ranks exchange messages through its store), so the order of the
script's own collectives stays as it is. Rejects sharded parameters (FSDP, tensor parallelism), because no rank has a
whole copy to compare.
"""
