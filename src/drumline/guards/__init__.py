"""Guards against silent training mistakes, in `drumline train` and in a user's own loop.

`checks/` decides: each check is written once, with its threshold beside it. `run/` feeds the checks from Drumline's
own loop. `script/` feeds them from a plain PyTorch loop through `drumline.guard(model, optimizer)`. docs/guards.md
lists every guard.
"""
