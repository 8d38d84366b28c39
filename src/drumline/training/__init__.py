"""One training run: loop, step, objective, optimizers, schedule, evaluation, averages."""
