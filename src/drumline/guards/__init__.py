"""Guards against silent training mistakes, in `drumline train` and in a user's own loop.

`checks/` decides: each check is written once, with its threshold beside it. `table.py` lists the guards, and the
checks by the moment that they run. `training/guards.py` calls them from Drumline's own loop, with what `run/`
measures. `script/` calls them from a plain PyTorch loop through `drumline.guard(model, optimizer)`.
"""
