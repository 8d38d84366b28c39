"""Hands a run to its guards (`guards/run/`)."""

from __future__ import annotations

import torch

from drumline.data.feed.batch import Batch
from drumline.guards.checks.nonfinite import Origin
from drumline.guards.run.fingerprints import FingerprintMonitor, Named
from drumline.guards.run.guards import Guarded, RunGuards
from drumline.training.replay import find_origin
from drumline.training.run import Run
from drumline.training.state import TrainState


def make_guards(run: Run) -> RunGuards:
    """The guards of a run."""
    grid, state = run.strategy.grid, run.state

    def repeat(index: int) -> tuple[Batch, Origin | None]:
        batch = run.single_batch(index)
        return batch, find_origin(run.step, batch, index)

    # Tensors that the other processes of a replica hold are on the meta device here.
    elsewhere = [torch.device("meta")] if grid.places > 1 else []
    on_cuda = run.world.device.type == "cuda"
    return RunGuards(
        Guarded(
            run.recipe,
            run.world,
            state.module,
            state.strategy.named_parameters,
            state.optimizer,
            run.step.finite,
            FingerprintMonitor(
                lambda: state_tensors(state), run.world, run.reporter.run_log, run.step.finite, grid.places
            ),
            repeat,
            run.step.objective.live,
            run.log,
            run.folder.path if run.folder is not None else None,
            first_step=run.position.step,
            precision=run.step.precision,
            reads=grid.reads,
            one_gpu_each=on_cuda and run.strategy.equal_memory and not run.task.spans_devices,
            devices=frozenset({*run.strategy.devices, *elsewhere}),
        )
    )


def state_tensors(state: TrainState) -> Named:
    """The tensors that a run's fingerprints are taken of: parameters, gradients, saved buffers, optimizer, average
    and loss scale."""
    module, groups = state.module, state.tensors()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    named: Named = {("parameter", name): parameter for name, parameter in parameters.items()}
    named |= {
        ("gradient", name): parameter.grad
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }
    named |= {
        ("buffer", name): tensor for name, tensor in module.state_dict().items() if name not in parameters
    }
    named |= {("optimizer", name): tensor for name, tensor in groups["optimizer"].items()}
    named |= {("average", name): tensor for name, tensor in groups.get("average", {}).items()}
    scale = getattr(state.scaler, "_scale", None) if state.scaler.is_enabled() else None
    if scale is not None:
        named["scaler", "scale"] = scale
    return named
