"""Every private part of torch that Drumline uses, why, and whether this torch still has it.

`PRIVATE` is the whole list: a scan of the sources fails on a use that is not in it. The launcher uses none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import drumline

SOURCES = Path(drumline.__file__).parent


def _foreach() -> bool:
    tensors = [torch.ones(2), torch.ones(3)]
    torch._foreach_add_(tensors, torch._foreach_mul(tensors, 2.0))
    return [float(each) for each in torch._foreach_norm(tensors, torch.inf)] == [3.0, 3.0]


def _unscale() -> bool:
    gradients, found = [torch.tensor([2.0, 4.0])], torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.tensor([0.5]))
    clean = gradients[0].tolist() == [1.0, 2.0] and found.item() == 0
    gradients[0][0] = torch.inf
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.tensor([1.0]))
    return clean and found.item() == 1


def _fake_tensors() -> bool:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode() as mode:
        made = mode.from_tensor(torch.empty(2, 3)) @ torch.empty(3, 4)
    return isinstance(made, FakeTensor) and made.shape == (2, 4)


def _pytree() -> bool:
    from torch.utils._pytree import tree_leaves, tree_map_only

    return tree_leaves({"a": [1, (2,)]}) == [1, 2] and tree_map_only(int, str, [1, 2.0]) == ["1", 2.0]


def _version() -> bool:
    tensor = torch.zeros(1)
    before = tensor._version
    tensor.add_(1)
    return tensor._version == before + 1


def _hooks() -> bool:
    weight = nn.Parameter(torch.ones(1))
    weight.register_hook(lambda gradient: gradient)
    weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return len(weight._backward_hooks) == 1 and len(weight._post_accumulate_grad_hooks) == 1


def _containers() -> bool:
    model = nn.Sequential(nn.BatchNorm1d(2))
    return list(model._modules) == ["0"] and "running_mean" in model[0]._buffers


def _saved_reduction() -> bool:
    loss = nn.functional.nll_loss(torch.zeros(1, 2, requires_grad=True), torch.tensor([0]), reduction="sum")
    return loss.grad_fn._saved_reduction == 2


def _compiled() -> bool:
    """`torch.compile` costs seconds here, so only the names are checked."""
    from torch._dynamo import OptimizedModule

    model = nn.Linear(1, 1)
    return "_orig_mod" in Path(OptimizedModule.__init__.__code__.co_filename).read_text() and (
        model._compiled_call_impl is None
    )


def _scale() -> bool:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    return scaler._scale.item() == 8.0


def _iterator() -> bool:
    loader = DataLoader([1, 2], num_workers=0)
    return hasattr(loader, "_iterator") and loader._iterator is None


def _worker_iterator() -> bool:
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    written = set(_MultiProcessingDataLoaderIter.__init__.__code__.co_names)
    base = set(_MultiProcessingDataLoaderIter.__base__.__init__.__code__.co_names)
    return {"_workers", "_data_queue"} <= written and "_persistent_workers" in base


def _module_hooks() -> bool:
    model = nn.Linear(1, 1)
    model.register_forward_pre_hook(lambda module, given: None)
    model.register_forward_hook(lambda module, given, made: None)
    return len(model._forward_pre_hooks) == len(model._forward_hooks) == 1


@contextmanager
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _ddp() -> bool:
    seen: list[object] = []
    with _group():
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        ddp.module.register_forward_hook(lambda *_: seen.append(type(ddp)._get_active_ddp_module()))
        ddp(torch.ones(1, 1))
        return seen == [ddp] and ddp._join_config.enable is False


def _optimizer_hooks() -> bool:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: None)
    return len(optimizer._optimizer_step_pre_hooks) == 1


def _schedulers() -> bool:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer)
    chained = torch.optim.lr_scheduler.ChainedScheduler([constant])
    return list(chained._schedulers) == [constant]


def _default_store() -> bool:
    with _group():
        store = dist.distributed_c10d._get_default_store()
        store.set("key", "value")
        return store.get("key") == b"value"


def _storage() -> bool:
    tensor = torch.zeros(4)
    own, view, other = (each.untyped_storage()._cdata for each in (tensor, tensor[1:], torch.zeros(4)))
    return own == view != other


def _dispatch() -> bool:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append((op.__name__, op._schema.is_mutable))
            return op(*args, **(kwargs or {}))

    with Mode():
        torch.zeros(2).add_(1).max().item()
    return [name.partition(".")[0] for name, _ in seen[1:]] == [
        "add_",
        "max",
        "_local_scalar_dense",
    ] and seen[1][1]


def _aoti() -> bool:
    """Compiling costs seconds, so only the names are checked; `tests/inference/export/test_cpp.py` uses them."""
    import torch._inductor

    return callable(torch._inductor.aoti_compile_and_package) and callable(torch._inductor.aoti_load_package)


PRIVATE: dict[str, tuple[str, Callable[[], bool]]] = {
    "_foreach_*": (
        "one kernel for many tensors; torch.optim is built on them, and no public name exists",
        _foreach,
    ),
    "_amp_foreach_non_finite_check_and_unscale_": (
        "finite gradients in one kernel, as GradScaler checks",
        _unscale,
    ),
    "torch._subclasses.fake_tensor": (
        "shapes at a cut without computing; documented, not public",
        _fake_tensors,
    ),
    "torch.utils._pytree": ("tensors inside a model's inputs and outputs, as fx and DDP find them", _pytree),
    "_version": ("whether a tensor was changed in place since a hook saw it", _version),
    "_backward_hooks": ("hooks on a parameter that a layout would lose", _hooks),
    "_post_accumulate_grad_hooks": ("the same", _hooks),
    "_modules": ("replacing a submodule by another", _containers),
    "_buffers": ("replacing a buffer for one call", _containers),
    "_forward_hooks": ("hooks that fx would lose, and that FSDP sets for a forward", _module_hooks),
    "_forward_pre_hooks": ("the same", _module_hooks),
    "_get_active_ddp_module": ("whether a forward runs inside DDP's", _ddp),
    "_join_config": ("whether DDP's join context is active", _ddp),
    "_optimizer_step_pre_hooks": ("whether an optimizer has hooks of its own", _optimizer_hooks),
    "_workers": ("the processes of a loader, whose CPU time is read", _worker_iterator),
    "_data_queue": ("whether a batch was ready when the loop asked for it", _worker_iterator),
    "_persistent_workers": ("whether a loader starts its workers again for each pass", _worker_iterator),
    "_schedulers": ("the schedulers inside another", _schedulers),
    "_get_default_store": ("the store of a script's own process group", _default_store),
    "_cdata": ("a number that identifies a storage; data_ptr() is 0 for a fake tensor", _storage),
    "torch.utils._python_dispatch": ("following the input of a model from operator to operator", _dispatch),
    "_scaled_dot_product_flash_attention_for_cpu": (
        "the FLOPs of attention on a CPU, which torch does not count",
        lambda: hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"),
    ),
    "_schema": ("whether an operator writes into its arguments, and where its flags are", _dispatch),
    "_inductor": ("AOTInductor, which is public in spite of its name", _aoti),
    "_ConvNd": (
        "the common base of the convolutions",
        lambda: issubclass(nn.Conv2d, nn.modules.conv._ConvNd),
    ),
    "_saved_reduction": ("whether a script's loss is a sum, read from its graph", _saved_reduction),
    "_orig_mod": ("the module behind torch.compile", _compiled),
    "_compiled_call_impl": ("whether Module.compile() was called", _compiled),
    "_scale": ("the loss scale as a tensor: get_scale() waits for the GPU", _scale),
    "_iterator": ("whether a DataLoader keeps its workers between epochs", _iterator),
}

NOT_TORCH = {
    "_asdict",
    "_current_frames",
    "_exit",
    "_fields",
    "_getframe",
    "_replace",
    "_run_exitfuncs",
}
"""Private or underscored names of the standard library."""


def uses() -> Iterator[tuple[str, str]]:
    """Every underscored name of another package in the sources, and where it is."""
    trees = {path: ast.parse(path.read_text()) for path in SOURCES.rglob("*.py")}
    ours = {
        name
        for tree in trees.values()
        for node in ast.walk(tree)
        for name in (
            [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else
            [node.attr] if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) else
            [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else
            [each.arg for each in node.args.args] if isinstance(node, ast.Lambda) else []
        )
    }  # fmt: skip
    for path, tree in trees.items():
        for node in ast.walk(tree):
            where = f"{path.relative_to(SOURCES)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ImportFrom) and re.search(r"(^|\.)_(?!_)", node.module or ""):
                yield node.module, where
            elif isinstance(node, ast.Attribute):
                name = node.attr
                foreign = name not in ours or (name in PRIVATE and ast.unparse(node.value) != "self")
                if name.startswith("_") and not name.startswith("__") and foreign:
                    yield name, where
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
                name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
                if name.startswith("_") and not name.startswith("__"):
                    yield name, where


def test_every_private_use_of_torch_is_listed() -> None:
    found = {("_foreach_*" if name.startswith("_foreach_") else name, where) for name, where in uses()}
    missing = {f"{where}: {name}" for name, where in found if name not in PRIVATE and name not in NOT_TORCH}
    assert not missing, "use a public function, or add it to PRIVATE with a reason and a check"
    unused = set(PRIVATE) - {name for name, _ in found}
    assert not unused, "no longer used: remove from PRIVATE"


def test_the_launcher_uses_nothing_private_of_torch() -> None:
    assert not [
        (name, where) for name, where in uses() if where.startswith("launch/") and name not in NOT_TORCH
    ]


@pytest.mark.parametrize("name", PRIVATE)
def test_this_torch_still_has_the_private_part(name: str) -> None:
    reason, holds = PRIVATE[name]
    assert holds(), f"torch {torch.__version__} changed {name}, which Drumline uses for: {reason}"
