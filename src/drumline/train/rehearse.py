"""The first step, once without effect, before a run takes it: what it finds is said, and what it proves is stored.

Promises: afterwards the run is as it was. Compiled code, gradient buckets and library workspaces are made; parameters
without a gradient and random numbers that no seed reaches are told; the layout has its certificate; where that is
possible, the step is recorded as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from drumline.core.errors import UserError
from drumline.data.feed.batch import Batch
from drumline.parallel.layout import Recorded, resolve_layout
from drumline.parallel.pipeline.instructions import Span
from drumline.train import prepare
from drumline.train.prove import prove, prove_replicated, prove_sharded
from drumline.train.start import Running
from drumline.train.step import NotCapturable


def rehearse(run: Running, batch: Batch) -> None:
    """Runs the first step once without effect, and records it as a CUDA graph where that is possible."""
    if run.recipe.train.compile:
        run.log("compiling the model; the first steps take a while")
    try:
        with _sparse_gradients(run) as sparse:
            run.step.rehearse(batch)
    except RuntimeError as error:
        if sparse or "sparse" in str(error).lower():
            raise _no_sparse(sparse or _sparse_layers(run.state.module)) from error
        if "deterministic" not in str(error):
            raise
        raise UserError(
            f"run.deterministic = true: {str(error).strip().splitlines()[0]}",
            "use --run.no-deterministic, or another model",
        ) from error
    _check_gradients(run)
    _check_draws(run)
    _prove(run, batch)
    captured, why_not = prepare.captures(run.recipe, run.world)
    if captured:
        try:
            run.step.capture(batch)
        except NotCapturable as reason:
            captured, why_not = False, f"the model cannot be captured ({reason})"
            if run.recipe.train.capture == "on":
                raise UserError(f"train.capture = on: {why_not}", "use auto or off") from reason
    if run.picture is not None and not captured:
        if isinstance(run.step.exchange, Recorded):
            run.picture.expect_alike(_recorded(run, run.step.exchange, batch))
        run.picture.follow(run.position.step)
    if run.world.device.type == "cuda":
        run.log("the whole step runs as one CUDA graph" if captured else f"no CUDA graph: {why_not}")


def _prove(run: Running, batch: Batch) -> None:
    """The certificate of the layout. Strict mode proves itself: its bits are those of one process."""
    folder = run.folder.path if run.folder else None
    index, accumulate = run.position.step, run.recipe.train.accumulate
    if run.laid is not None:
        spans = prove(run.laid, run.step, batch, index, run.holding, folder, run.log)
        assert run.picture is not None
        run.picture.expect(run.laid.exchange.lists, spans)
    elif run.twin:
        prove_sharded(run.twin.pop(), run.step, batch, index, accumulate, run.holding, folder, run.log)
    elif run.world.size > 1 and not run.recipe.run.strict:
        prove_replicated(run.step, batch, index, accumulate, folder, run.log)


def _recorded(run: Running, exchange: Recorded, batch: Batch) -> list[Span]:
    """When this process does what, in a step as it will be taken: the certificate's is not compiled."""
    exchange.recording = True
    run.step.replay(batch, run.position.step)
    exchange.recording = False
    return exchange.spans()


@contextmanager
def _sparse_gradients(run: Running) -> Iterator[list[str]]:
    """Collects the parameters whose gradients come sparse. Not of a model that this step compiles: with the hooks."""
    found: list[str] = []

    def looked(name: str, gradient: torch.Tensor) -> None:
        if gradient.layout != torch.strided:
            found.append(name)

    handles = [
        parameter.register_hook(partial(looked, name))
        for name, parameter in run.state.module.named_parameters()
        if parameter.requires_grad and not parameter.is_meta and not run.recipe.train.compile
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _sparse_layers(module: nn.Module) -> list[str]:
    """What a layer says of itself, where gradients are of other tensors than its parameters (FSDP)."""
    return [
        f"{name}.weight"
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad
    ]


def _no_sparse(names: list[str]) -> UserError:
    what = f"the gradient of {', '.join(dict.fromkeys(names))}" if names else "a gradient"
    return UserError(
        f"{what} is sparse: gradients are checked, clipped, exchanged and applied as dense tensors",
        "make the layer with sparse=False, as in nn.Embedding(..., sparse=False)",
    )


def _check_gradients(run: Running) -> None:
    """Names parameters that the rehearsed step left without a gradient: DDP would wait for them for ever."""
    idle = run.step.without_gradient
    if run.laid is not None:
        idle = [name for names in run.world.all_gather_object(idle)[: run.grid.places] for name in names]
    if not idle:
        return
    names = ", ".join(idle[:5])
    what = f"{len(idle)} trainable parameter(s) got no gradient: {names}"
    if resolve_layout(run.recipe.parallel.layout, run.world) == "ddp" and not run.recipe.run.strict:
        raise UserError(
            f"{what}; several processes cannot exchange gradients that some never have",
            "use them in forward, remove them, or set requires_grad_(False) on them",
        )
    run.log(f"WARNING: {what}. They are never trained")


def _check_draws(run: Running) -> None:
    """Says when the model draws numbers that cannot be drawn again, in whichever process its stage is."""
    if not any(run.world.all_gather_object(run.step.draws_elsewhere)):
        return
    what = "the model draws from Python's `random` or from `numpy.random`, which no seed of the run reaches"
    if run.recipe.run.strict:
        raise UserError(
            f"run.strict: {what}", "draw with torch.rand in its forward, or leave out --run.strict"
        )
    run.log(f"WARNING: {what}: the run cannot be repeated. Draw with torch.rand in its forward")
