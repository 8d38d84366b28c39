"""The kind and the settings of the layer that a torch call stands for.

Promises: pure functions. Two spellings of one operation (a module, a function, a method, in place or not, a mean or
an adaptive pool) have the same kind and settings. An operator that is not listed keeps its own name as its kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor

Settings = dict[str, Any]


@dataclass(frozen=True)
class Operator:
    """A call of torch as a layer."""

    kind: str
    settings: Settings = field(default_factory=dict)
    in_place: bool = False


ACTIVATIONS = {
    "relu": "ReLU",
    "relu6": "ReLU6",
    "gelu": "GELU",
    "silu": "SiLU",
    "mish": "Mish",
    "hardswish": "Hardswish",
    "hardsigmoid": "Hardsigmoid",
    "hardtanh": "Hardtanh",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "leaky_relu": "LeakyReLU",
    "prelu": "PReLU",
    "elu": "ELU",
    "selu": "SELU",
    "celu": "CELU",
    "softplus": "Softplus",
    "logsigmoid": "LogSigmoid",
}
NORMS = {
    "batch_norm": "BatchNorm",
    "layer_norm": "LayerNorm",
    "group_norm": "GroupNorm",
    "instance_norm": "InstanceNorm",
    "rms_norm": "RMSNorm",
    "local_response_norm": "LocalResponseNorm",
}
_CONVOLUTION, _TRANSPOSED = "convolution", "transposed convolution"
_POOLS = {"max_pool": "max-pool", "avg_pool": "average pool", "lp_pool": "Lp-pool"}
GLOBAL_POOL, _GLOBAL_MAX = "global average pool", "global max-pool"
MASK = "stochastic depth"
ADDITION = "addition"
_ARITHMETIC = {
    "add": ADDITION,
    "sub": "subtraction",
    "mul": "multiplication",
    "div": "division",
    "truediv": "division",
    "multiply": "multiplication",
    "true_divide": "division",
    "subtract": "subtraction",
}
_OTHERS = {
    "linear": "linear",
    "matmul": "matrix product",
    "bmm": "matrix product",
    "mm": "matrix product",
    "cat": "concatenation",
    "concat": "concatenation",
    "concatenate": "concatenation",
    "softmax": "softmax",
    "log_softmax": "log-softmax",
    "scaled_dot_product_attention": "attention",
    "multi_head_attention_forward": "multi-head attention",
    "interpolate": "resize",
    "pad": "padding",
}
_FAMILIES = {
    **dict.fromkeys(ACTIVATIONS.values(), "activation"),
    **dict.fromkeys(NORMS.values(), "norm"),
    **dict.fromkeys(
        (*_POOLS.values(), GLOBAL_POOL, _GLOBAL_MAX, "adaptive average pool", "adaptive max-pool"), "pool"
    ),
    **dict.fromkeys((_CONVOLUTION, _TRANSPOSED), "convolution"),
}

VIEWS = frozenset(
    (
        "view", "reshape", "flatten", "unflatten", "permute", "transpose", "t", "swapaxes", "swapdims", "movedim",
        "moveaxis", "contiguous", "expand", "expand_as", "squeeze", "unsqueeze", "chunk", "split", "tensor_split",
        "unbind", "getitem", "narrow", "select", "index_select", "to", "float", "double", "half", "bfloat16", "type",
        "type_as", "clone", "view_as", "reshape_as", "ravel", "unfold", "get", "alias", "broadcast_to", "repeat",
        "tile", "cpu", "cuda", "adjoint",
    )
)  # fmt: skip
"""Operators that only rearrange, repeat or select values: a layer table does not list them."""
FRESH = frozenset(
    (
        "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "zeros_like", "ones_like", "empty_like",
        "full_like", "rand_like", "randn_like",
    )
)  # fmt: skip
"""Operators whose result does not depend on the values of their argument."""
DROPOUTS = frozenset(
    (
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_dropout",
        "feature_alpha_dropout",
    )
)

_NAMES: Mapping[str, tuple[str, ...]] = {
    "conv": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "conv_transpose": ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"),
    "linear": ("input", "weight", "bias"),
    "max_pool": ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode"),
    "avg_pool": ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"),
    "adaptive": ("input", "output_size"),
    "mean": ("input", "dim", "keepdim"),
    "amax": ("input", "dim", "keepdim"),
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
    "dropout": ("input", "p", "training", "inplace"),
    "leaky_relu": ("input", "negative_slope"),
    "hardtanh": ("input", "min_val", "max_val"),
    "elu": ("input", "alpha"),
    "gelu": ("input", "approximate"),
    "softmax": ("input", "dim"),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"),
    "multi_head_attention_forward": (
        "query", "key", "value", "embed_dim", "heads", "in_weight", "in_bias", "k", "v", "zero", "dropout_p",
    ),
    "cat": ("tensors", "dim"),
}  # fmt: skip


def plain_name(name: str) -> str:
    """`relu` for relu_, `add` for __iadd__ and __radd__."""
    bare = name.strip("_")
    for prefix in ("i", "r"):
        if name.startswith("__") and bare.startswith(prefix) and bare[1:] in _ARITHMETIC:
            return bare[1:]
    return "matmul" if bare in ("rmatmul", "imatmul") else bare


def family(kind: str) -> str:
    """What a layer can be replaced by: an activation by another one. The kind itself if it has no family."""
    return _FAMILIES.get(kind, kind)


def read_operator(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], output: Tensor
) -> Operator | None:
    """The layer that a call is. None for one that changes nothing, such as dropout in evaluation."""
    bare = plain_name(name)
    given = _arguments(bare, args, kwargs)
    shape = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else ()
    method = name.startswith("__i") if name.endswith("__") else name.endswith("_")
    in_place = method or bool(kwargs.get("inplace"))
    if bare.startswith("conv") and isinstance(given.get("weight"), Tensor):
        return _convolution(bare, given)
    if bare in DROPOUTS:
        rate = float(given.get("p", 0.5))
        on = rate > 0 and given.get("training", True)
        return Operator("dropout", {"rate": rate, "form": bare}, bool(given.get("inplace"))) if on else None
    if bare in NORMS:
        return Operator(NORMS[bare], _norm(bare, given))
    if "pool" in bare or bare in ("mean", "amax"):
        return _pool(bare, given, shape, tuple(output.shape))
    if bare in ACTIVATIONS:
        if bare == "hardtanh" and (given.get("min_val"), given.get("max_val")) == (0, 6):
            bare, given = "relu6", {}
        values = {"slope": given.get("negative_slope", 0.01)} if bare == "leaky_relu" else {}
        if bare == "gelu" and given.get("approximate", "none") != "none":
            values = {"approximate": given["approximate"]}
        if bare in ("hardtanh", "elu"):
            values = {each: given[each] for each in ("min_val", "max_val", "alpha") if each in given}
        return Operator(ACTIVATIONS[bare], values, in_place)
    if bare in _ARITHMETIC:
        numbers = [each for each in args if isinstance(each, int | float)]
        if numbers == [0 if _ARITHMETIC[bare] in (ADDITION, "subtraction") else 1]:
            return None
        scale = {"alpha": kwargs["alpha"]} if kwargs.get("alpha", 1) != 1 else {}
        return Operator(_ARITHMETIC[bare], ({"by": numbers[0]} if numbers else {}) | scale, in_place)
    return Operator(_OTHERS.get(bare, bare), _other(bare, given, args, kwargs), in_place)


def _arguments(bare: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    key = (
        "conv_transpose" if bare.startswith("conv_transpose") else "conv" if bare.startswith("conv") else bare
    )
    key = "dropout" if bare in DROPOUTS else "adaptive" if bare.startswith("adaptive") else key
    key = key.rstrip("123d") if "pool" in key else key
    key = {"concat": "cat", "concatenate": "cat", "log_softmax": "softmax"}.get(key, key)
    return {**dict(zip(_NAMES.get(key, ("input",)), args, strict=False)), **kwargs}


def _convolution(bare: str, given: Mapping[str, Any]) -> Operator:
    weight, groups = given["weight"], given.get("groups", 1)
    transposed = bare.startswith("conv_transpose")
    kernel = tuple(weight.shape[2:])
    dilation = _each(given.get("dilation", 1), kernel)
    padding = given.get("padding", 0)
    if padding == "same":
        padding = tuple((size - 1) * step / 2 for size, step in zip(kernel, dilation, strict=True))
    wide = (weight.shape[0], weight.shape[1] * groups)
    before, after = wide if transposed else wide[::-1]
    settings: Settings = {
        "in": before,
        "out": after,
        "kernel": kernel,
        "stride": _each(given.get("stride", 1), kernel),
        "padding": _each(0 if padding == "valid" else padding, kernel),
        "dilation": dilation,
        "groups": groups,
        "bias": given.get("bias") is not None,
    }
    return Operator(_TRANSPOSED if transposed else _CONVOLUTION, settings)


def _norm(bare: str, given: Mapping[str, Any]) -> Settings:
    settings: Settings = {"eps": given.get("eps", 1e-5)}
    if bare == "batch_norm":
        settings["momentum"] = given.get("momentum", 0.1)
        settings["running statistics"] = given.get("running_mean") is not None
        # A frozen layer uses its running statistics in training too.
        settings["frozen"] = not given.get("training", True)
    if bare == "group_norm":
        settings["groups"] = given.get("num_groups")
    settings["weight"] = given.get("weight") is not None
    settings["bias"] = given.get("bias") is not None
    return settings


def _pool(
    bare: str, given: Mapping[str, Any], shape: tuple[int, ...], output: tuple[int, ...]
) -> Operator | None:
    size, after = shape[2:], output[2:]
    if bare in ("mean", "amax"):
        axes, rank = given.get("dim"), len(shape)
        chosen = tuple(
            sorted(
                axis % rank
                for axis in (axes if isinstance(axes, list | tuple) else (axes,))
                if axis is not None
            )
        )
        if rank == 4 and chosen in ((2, 3), (1, 2)):  # channels first or last
            return Operator(GLOBAL_POOL if bare == "mean" else _GLOBAL_MAX)
        return Operator("mean" if bare == "mean" else "maximum", {"over": chosen})
    maximum = "max" in bare
    if bare.startswith("adaptive"):
        if prod(after) == 1:
            return Operator(_GLOBAL_MAX if maximum else GLOBAL_POOL)
        if size == after:
            return None
        if any(full % part for full, part in zip(size, after, strict=True)):
            return Operator(f"adaptive {_POOLS['max_pool' if maximum else 'avg_pool']}", {"output": after})
        kernel = tuple(full // part for full, part in zip(size, after, strict=True))
        stride, padding = kernel, tuple(0 for _ in kernel)
    else:
        kernel = _each(given.get("kernel_size", 1), size)
        stride = _each(given.get("stride") or kernel, size)
        padding = _each(given.get("padding", 0), size)
    if prod(after) == 1 and kernel == size and not any(padding):
        return Operator(_GLOBAL_MAX if maximum else GLOBAL_POOL)
    settings: Settings = {"kernel": kernel, "stride": stride, "padding": padding}
    if given.get("ceil_mode"):
        settings["ceil_mode"] = True
    if any(padding) and given.get("count_include_pad", True) is False:
        settings["padding counts"] = False
    return Operator(next(_POOLS[each] for each in _POOLS if each in bare), settings)


def _other(bare: str, given: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Settings:
    if bare == "linear":
        weight = given["weight"]
        return {"in": weight.shape[1], "out": weight.shape[0], "bias": given.get("bias") is not None}
    if bare == "scaled_dot_product_attention":
        query = given["query"]
        settings: Settings = {"heads": query.shape[1] if query.dim() == 4 else 1}
        extra = {
            "dropout": given.get("dropout_p"),
            "causal": given.get("is_causal"),
            "scale": given.get("scale"),
        }
        return (
            settings | {name: value for name, value in extra.items() if value} | _mask(given.get("attn_mask"))
        )
    if bare == "multi_head_attention_forward":
        dropout = {"dropout": given["dropout_p"]} if given.get("dropout_p") else {}
        return {"heads": given["heads"]} | dropout | _mask(kwargs.get("attn_mask"))
    if bare in ("cat", "concat", "concatenate"):
        return {"dim": given.get("dim", 0)}
    if bare in ("softmax", "log_softmax"):
        rank = given["input"].dim() if isinstance(given.get("input"), Tensor) else 0
        return {"dim": given["dim"] % rank} if rank and isinstance(given.get("dim"), int) else {}
    plain = (bool, int, float, str)
    positional = {
        f"argument {number}": value for number, value in enumerate(args) if isinstance(value, plain)
    }
    hidden = ("inplace", "training", "dtype", "out", "_stacklevel")
    named = {key: value for key, value in kwargs.items() if isinstance(value, plain) and key not in hidden}
    return positional | named


def _mask(mask: object) -> Settings:
    return {"mask": True} if isinstance(mask, Tensor) else {}


def _each(value: Any, like: tuple[int, ...]) -> tuple[Any, ...]:
    """One value for each dimension."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return tuple(_whole(each) for each in (values * len(like) if len(values) == 1 else values))


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
