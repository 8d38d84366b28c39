"""One training step of a model as a table of its layers: what each computes, keeps and costs, and from which inputs.

Promises: a row for each operator on values that depend on the images, in an order that depends only on how values
flow and not on the order in which the code runs or what modules are called. The model's modes and buffers are
restored.
Rejects images that the model cannot process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import flop_counter

from drumline.comparison.align import flow_order
from drumline.comparison.layers import IMAGE, Layer, Walk
from drumline.comparison.operators import DROPOUTS, FRESH, MASK, VIEWS, Operator, plain_name, read_operator
from drumline.core.arithmetic import leave_no_trace
from drumline.core.errors import UserError
from drumline.models.find_taps import first_tensor

SAMPLES = 4096
"""How many values of each output are compared."""


@dataclass
class _Row:
    operator: Operator
    name: str
    output: tuple[int, ...]
    sources: tuple[int, ...]
    parameters: tuple[str, ...]
    statistics: tuple[str, ...]
    flops: int = 0
    kept_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    value: Tensor | None = None


def walk(model: nn.Module, images: Tensor, values: bool = False, cost: bool = False) -> Walk:
    """Runs one step of the model in training mode. With `values`, samples of the outputs and the gradients are kept
    and nothing is dropped out; with `cost`, FLOPs and kept bytes are counted. Otherwise, layers are timed."""
    torch.manual_seed(0)
    recorder = _Recorder(model, images, values, cost)
    with leave_no_trace(model, devices=[images.device]), torch.enable_grad():
        model.train()
        for parameter in model.parameters():
            parameter.grad = None
        recorder.step()
        gradients = (
            {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
            if values
            else {}
        )
    rows = recorder.rows
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    order, depth, used = flow_order([row.sources for row in rows], recorder.last)
    place = {old: new for new, old in enumerate(order)} | {IMAGE: IMAGE}
    layers = tuple(
        Layer(
            kind=row.operator.kind,
            name=row.name,
            settings=row.operator.settings,
            output=row.output,
            sources=tuple(place[source] for source in row.sources),
            parameters=row.parameters,
            shapes=tuple(shapes[name] for name in row.parameters),
            statistics=row.statistics,
            in_place=row.operator.in_place,
            depth=depth[number],
            used=number in used,
            flops=row.flops,
            kept_bytes=row.kept_bytes,
            seconds=row.forward_s + row.backward_s,
        )
        for number in order
        for row in [rows[number]]
    )
    kept = [rows[number].value for number in order] if values else []
    return Walk(layers, tuple(each for each in kept if each is not None), recorder.output, gradients)


def returned(found: object) -> Tensor | None:
    """The logits in what a model returns: the first tensor, also of a dictionary."""
    return first_tensor(tuple(found.values()) if isinstance(found, dict) else found)


class _Recorder(TorchFunctionMode):
    """Sees every call of torch that the model's own code makes, above autograd and autocast."""

    def __init__(self, model: nn.Module, images: Tensor, values: bool, cost: bool) -> None:
        super().__init__()
        self.rows: list[_Row] = []
        self.output: Tensor | None = None
        self.last = -1
        """The layer that made the output."""
        self._model, self._images, self._values = model, images, values
        self._timed = not values and not cost
        self._source: dict[int, int] = {_storage(images): IMAGE}
        """The layer that wrote a storage last. Every call registers its result, so a reused address is known."""
        self._named: dict[int, tuple[str, ...]] = {}
        """The parameters that a storage holds, or is computed from."""
        for name, parameter in model.named_parameters():
            self._named.setdefault(_storage(parameter), (name,))
        self._buffers = {_storage(buffer): name for name, buffer in model.named_buffers() if buffer.numel()}
        self._lasting = {*self._named, *self._buffers, _storage(images)}
        self._masks: dict[int, float] = {}
        self._open: list[str] = []
        self._kept: set[int] = set()
        self._pending = 0
        self._backward: list[tuple[_Row | None, Any]] = []
        self._flops = flop_counter.FlopCounterMode(display=False, custom_mapping=_FLASH) if cost else None

    def step(self) -> None:
        """Forward and backward."""
        with _hooked(self._model, self._enter, self._leave):
            try:
                with (
                    saved_tensors_hooks(self._pack, lambda tensor: tensor) if self._flops else nullcontext(),
                    self._flops or nullcontext(),
                    self,
                ):
                    found = self._model(self._images)
            except torch.OutOfMemoryError:
                raise
            except UserError:
                raise
            except Exception as error:  # a model's own code may raise anything
                shape = " x ".join(map(str, self._images.shape))
                reason = (str(error).strip().splitlines() or [""])[0]
                raise UserError(
                    f"{type(self._model).__name__} rejects images of {shape}: {type(error).__name__}: {reason}",
                    "use a different --size or --batch, or --classes for its factory",
                ) from error
        output = returned(found)
        if output is None or not output.requires_grad:
            raise UserError(
                f"{type(self._model).__name__} returned no tensor that depends on its parameters",
                "compare models that return logits",
            )
        self.output = output.detach().double().cpu()
        self.last = self._source.get(_storage(output), len(self.rows) - 1)
        generator = torch.Generator().manual_seed(1)
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(
            output.device, output.dtype
        )
        self._mark(None)
        output.backward(weights)
        self._mark(None)
        self._settle()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = list(_tensors((args, kwargs)))
        before = time.perf_counter()
        started = self._event() if self._timed and self._images.is_cuda else None
        flops, self._pending = self._flops.get_total_flops() if self._flops else 0, 0
        result = self._call(func, name, args, kwargs)
        seconds = time.perf_counter() - before
        out = result if isinstance(result, Tensor) else first_tensor(result)
        if out is None or name == "__get__":
            return result
        sources = tuple(
            dict.fromkeys(self._source[key] for key in map(_storage, given) if key in self._source)
        )
        named = tuple(
            dict.fromkeys(each for key in map(_storage, given) for each in self._named.get(key, ()))
        )
        masks = [self._masks[key] for key in map(_storage, given) if key in self._masks]
        bare = plain_name(name)
        if not out.is_floating_point():  # a mask, an index
            self._pass_on(result, sources, named)
        elif name == "bernoulli_":
            self._masks[_storage(out)] = float(
                next((each for each in args[1:] if isinstance(each, float)), 0.5)
            )
        elif bare in FRESH:
            self._forget(result)
        elif not sources and not named:
            self._forget(result)
            if masks:
                self._masks[_storage(out)] = masks[0]
        elif bare in VIEWS or not sources:
            self._pass_on(result, sources, named)
        else:
            operator = read_operator(name, args, kwargs, out)
            if operator is None:
                self._pass_on(result, sources, named)
                return result
            if masks and operator.kind == "multiplication":
                operator = Operator(MASK, {"rate": round(1 - masks[0], 6)})
            statistics = tuple(
                dict.fromkeys(self._buffers[key] for key in map(_storage, given) if key in self._buffers)
            )
            row = _Row(
                operator, self._open[-1] if self._open else "", tuple(out.shape), sources, named, statistics
            )
            row.forward_s = seconds
            self._add(row, result, out, flops, started)
        return result

    def _call(self, func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """The call itself. Where values are compared, random masks keep everything."""
        if self._values:
            if name.rstrip("_") in DROPOUTS:
                return args[0]
            if name == "bernoulli_":
                return args[0].fill_(next((each for each in args[1:] if isinstance(each, float)), 0.5))
            if name == "multi_head_attention_forward":
                return func(*args[:10], 0.0, *args[11:], **kwargs)
            if name == "scaled_dot_product_attention" and ("dropout_p" in kwargs or len(args) > 4):
                args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
                kwargs = kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {})
        return func(*args, **kwargs)

    def _add(self, row: _Row, result: Any, out: Tensor, flops: int, started: Any) -> None:
        if started is not None:
            ended = self._event()
            row.forward_s = 0.0
            self._backward += [(row, started), (None, ended)]
        if self._flops:
            row.flops = self._flops.get_total_flops() - flops
            row.kept_bytes, self._pending = self._pending, 0
        if self._values:
            row.value = _sample(out)
        number = len(self.rows)
        self.rows.append(row)
        for tensor in _tensors(result):
            self._source[_storage(tensor)] = number
            self._named.pop(_storage(tensor), None) if _storage(tensor) not in self._lasting else None
        if self._timed and out.grad_fn is not None:
            out.grad_fn.register_prehook(lambda _: self._mark(row))

    def _pass_on(self, result: Any, sources: tuple[int, ...], named: tuple[str, ...]) -> None:
        """Registers a result that only rearranges values. Of several sources, the latest layer counts."""
        for tensor in _tensors(result):
            key = _storage(tensor)
            self._masks.pop(key, None)
            if key in self._lasting:
                continue
            if sources:
                self._source[key] = max(sources)
            else:
                self._source.pop(key, None)
            if named:
                self._named[key] = named
            else:
                self._named.pop(key, None)

    def _forget(self, result: Any) -> None:
        for tensor in _tensors(result):
            key = _storage(tensor)
            if key not in self._lasting:
                self._source.pop(key, None)
                self._named.pop(key, None)
                self._masks.pop(key, None)

    def _enter(self, name: str) -> None:
        self._open.append(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module whose code torch does not show us (compiled, scripted) is one layer."""
        name = self._open.pop()
        out = first_tensor(output)
        if out is None or not out.is_floating_point() or _storage(out) in self._source or out.numel() == 0:
            return
        given = [self._source[key] for key in map(_storage, _tensors(args)) if key in self._source]
        if given:
            names = tuple(f"{name}.{each}" if name else each for each, _ in module.named_parameters())
            row = _Row(
                Operator(type(module).__name__),
                name,
                tuple(out.shape),
                tuple(dict.fromkeys(given)),
                names,
                (),
            )
            self._add(row, output, out, 0, None)

    def _pack(self, tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key not in self._lasting and key not in self._kept:
            self._kept.add(key)
            self._pending += tensor.untyped_storage().nbytes()
        return tensor.detach()  # an output that its own graph holds would never be freed

    def _mark(self, row: _Row | None) -> None:
        """The backward of `row` begins; of None, it ends."""
        if self._timed:
            self._backward.append((row, self._event() if self._images.is_cuda else time.perf_counter()))

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _settle(self) -> None:
        """Adds up the times between marks: each belongs to the layer whose mark begins it."""
        if self._images.is_cuda:
            torch.cuda.synchronize(self._images.device)
        for (row, begin), (_, end) in zip(self._backward, self._backward[1:], strict=False):
            if row is not None:
                row.backward_s += begin.elapsed_time(end) / 1000 if self._images.is_cuda else end - begin


@contextmanager
def _hooked(model: nn.Module, enter: Callable[[str], None], leave: Callable[..., None]) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: enter(name)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _flash_flops(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    found: int = flop_counter.sdpa_flop_count(query, key, value)
    return found


_FLASH = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash_flops}
"""Torch counts the FLOPs of attention on a GPU only."""


def _sample(tensor: Tensor) -> Tensor:
    """Values at even distances in the logical order, and the mean magnitude of all."""
    flat = tensor.detach().reshape(-1)
    step = max(1, -(-flat.numel() // SAMPLES))
    return torch.cat([flat[::step].double().cpu(), flat.abs().mean(dtype=torch.float64).cpu().reshape(1)])


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):  # a tensor without a storage, such as a sparse one
        return id(tensor)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
