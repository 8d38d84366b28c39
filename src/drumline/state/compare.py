"""`drumline compare`: do two runs have the same bits, and if not, where do they first differ?

Promises: reports the first common step that differs, the first differing group in causal order (samples, gradients,
buffers, parameters, optimizer) and tensor, the last step that is equal, and the differences in recipe and environment
that could be the cause. Compares fingerprints first, then checkpoints. Rejects damaged files.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drumline.core.errors import UserError
from drumline.core.files import CorruptError, read_small
from drumline.state import chain
from drumline.state.chain import Record
from drumline.state.checkpoint import checkpoints, is_checkpoint, read_checkpoint, step_of, verify_checkpoint
from drumline.state.manifest import read_manifest
from drumline.state.provenance import changed_environment, changed_settings
from drumline.state.verify import MAX_RECORD

GROUP_NAMES = {"ids": "samples of the global batch"}
_NAMED = 3
"""Number of tensors to show."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a run folder or a checkpoint."""

    path: Path
    records: Mapping[int, Record]
    checkpoints: Mapping[int, Path]
    recipe: str
    environment: Mapping[str, Any]
    torn: str = ""
    """A message if the last record of fingerprints is incomplete, and ignored."""

    @property
    def last(self) -> int:
        return max((*self.records, *self.checkpoints))


@dataclass(frozen=True)
class RunComparison:
    """The result. `step`, `group` and `tensor` describe the first difference; they are 0 and empty without one."""

    equal: bool
    a: str
    b: str
    steps: int
    """Number of steps that both have."""
    agreed: int
    """The last of them before the first difference; 0 if there is none."""
    step: int
    group: str
    tensor: str
    settings: tuple[str, ...]
    environment: tuple[str, ...]
    lines: tuple[str, ...]


def compare(a: Path, b: Path) -> RunComparison:
    """Compares two runs, two checkpoints, or a checkpoint with the same step of a run."""
    one, other = _open(a), _open(b)
    recorded = sorted(one.records.keys() & other.records.keys())
    saved = sorted(one.checkpoints.keys() & other.checkpoints.keys())
    steps = sorted({*recorded, *saved})
    if not steps:
        raise UserError(
            f"nothing to compare: {a} has {_extent(one)}, {b} has {_extent(other)}",
            "compare runs that recorded or saved the same step (guard.every, checkpoint.every_steps)",
        )
    settings: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    strict = _is_strict(one) and _is_strict(other)
    if one.recipe and other.recipe:
        settings = tuple(changed_settings(one.recipe, other.recipe, strict))
    if one.environment and other.environment:
        environment = tuple(changed_environment(dict(one.environment), dict(other.environment), strict))

    agreed = 0
    for step in steps:
        group, tensor, where = _difference(one, other, step)
        if not group:
            agreed = step
            continue
        lines = [f"different: first at step {step:,}, in the {GROUP_NAMES.get(group, group)}{where}"]
        lines.append(f"equal up to step {agreed:,}" if agreed else "there is no earlier common step")
        lines += [f"recipe: {change}" for change in settings]
        lines += [f"environment: {change}" for change in environment]
        if not settings and not environment:
            lines.append("recipe and environment do not differ in anything that decides bits")
        lines += _by_tensor(one, other, step)
        lines += [f"note: {side.torn}" for side in (one, other) if side.torn]
        return RunComparison(
            False,
            str(a),
            str(b),
            len(steps),
            agreed,
            step,
            group,
            tensor,
            settings,
            environment,
            tuple(lines),
        )
    many = f"all {len(steps)} common steps" if len(steps) > 1 else "the only common step"
    lines = [f"equal: the same bits at {many}, up to step {agreed:,}"]
    lines += [f"{side.path} continues to step {side.last:,}" for side in (one, other) if side.last > agreed]
    if one.path.resolve() == other.path.resolve():
        lines.append("note: both are the same folder")
    lines += [f"note: {side.torn}" for side in (one, other) if side.torn]
    lines += [f"although the recipe differs: {change}" for change in settings]
    lines += [f"although the environment differs: {change}" for change in environment]
    return RunComparison(
        True, str(a), str(b), len(steps), agreed, 0, "", "", settings, environment, tuple(lines)
    )


def _open(path: Path) -> Side:
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}", "give a run folder or one of its checkpoints/step-N")
    if is_checkpoint(path):
        manifest = _manifest(path)
        return Side(path, {}, {manifest.position.step: path}, manifest.recipe, manifest.environment)
    file = path / chain.FILE
    records: list[Record] = []
    torn = ""
    try:
        records, torn = chain.read_whole(file)
    except FileNotFoundError:
        pass  # a run of an early version: compare its checkpoints
    except (chain.Damaged, CorruptError) as reason:
        what = str(reason) if isinstance(reason, CorruptError) else f"{file}: {reason}"
        raise UserError(
            what, "restore it from a copy, or delete it to compare the checkpoints alone"
        ) from None
    saved = {step_of(each): each for each in checkpoints(path / "checkpoints") or checkpoints(path)}
    if not records and not saved:
        raise UserError(
            f"{path} holds no run: neither {chain.FILE} nor checkpoints",
            "give a run folder or one of its checkpoints/step-N",
        )
    message = f"{file}: {torn} and is ignored" if torn else ""
    return Side(path, {record.step: record for record in records}, saved, *_facts(path), message)


def _facts(run: Path) -> tuple[str, Mapping[str, Any]]:
    """The recipe and the environment of a run folder; empty if it has none."""
    try:
        recipe = _text(run / "recipe.toml")
        environment = json.loads(_text(run / "environment.json") or "{}")
        if not all(isinstance(table, dict) for table in tomllib.loads(recipe).values()):
            raise ValueError("recipe.toml has values outside of sections")
    except (CorruptError, ValueError, RecursionError) as error:
        raise UserError(
            f"{run}: cannot read recipe.toml or environment.json: {error}", "restore it from a copy"
        ) from None
    if environment and not (isinstance(environment, dict) and isinstance(environment.get("packages"), dict)):
        raise UserError(f"{run}/environment.json is not the environment of a run", "restore it or delete it")
    return recipe, environment


def _text(file: Path) -> str:
    """The text of a file of a run; empty if it is missing."""
    try:
        return read_small(file, MAX_RECORD).decode()
    except FileNotFoundError:
        return ""


def _is_strict(side: Side) -> bool:
    return bool(tomllib.loads(side.recipe).get("run", {}).get("strict", False))


def _difference(a: Side, b: Side, step: int) -> tuple[str, str, str]:
    """The first group and tensor that differ at a step, and a description; empty if none differs."""
    if step in a.records and step in b.records:
        one, other = a.records[step], b.records[step]
        if one.groups != other.groups:
            group = chain.first_group(one, other)
            return (group, *_named(a, b, step, group))
    if step in a.checkpoints and step in b.checkpoints:
        folders = a.checkpoints[step], b.checkpoints[step]
        # The files, not only the hash of the state, which does not cover the moving average.
        if _verified(folders[0]) != _verified(folders[1]) and (apart := _differing_tensors(*folders)):
            group, name = apart[0][:2]
            return group, name, f": {name!r} (in the checkpoints)"
    return "", "", ""


def _named(a: Side, b: Side, step: int, group: str) -> tuple[str, str]:
    """The first differing tensor of the group, from the first records since this step that list tensors."""
    for at in sorted(each for each in a.records.keys() & b.records.keys() if each >= step):
        one, other = a.records[at], b.records[at]
        if one.names and other.names and (names := chain.differing_names(one, other, group)):
            if group == "ids":
                return "batch", ""
            total = len({name for each, name in (*one.names, *other.names) if each == group})
            later = "" if at == step else f" at step {at:,}, the next that lists tensors"
            only = [
                side.path for side, record in ((a, one), (b, other)) if (group, names[0]) not in record.names
            ]
            missing = f", which is missing in {only[0]}" if only else ""
            return names[0], f": {names[0]!r}{missing} ({len(names)} of {total} tensors differ{later})"
    return "", ""


def _by_tensor(a: Side, b: Side, step: int) -> list[str]:
    """How far apart the first common checkpoints since this step are."""
    both = sorted(each for each in a.checkpoints.keys() & b.checkpoints.keys() if each >= step)
    if not both:
        return ["there is no later common checkpoint that shows how large the difference is"]
    apart = _differing_tensors(a.checkpoints[both[0]], b.checkpoints[both[0]])
    if not apart:
        return [f"the checkpoints of step {both[0]:,} are equal"]
    largest = sorted(apart, key=lambda each: -each[4])[:_NAMED]
    lines = [f"checkpoint step-{both[0]}: {len(apart)} tensors differ; the largest differences:"]
    for group, name, count, total, distance in largest:
        how = (
            f"{count:,} of {total:,} values, by up to {distance:.3g}"
            if total
            else "different shape or type, or only in one"
        )
        lines.append(f"  {group} {name}: {how}")
    return lines


def _differing_tensors(a: Path, b: Path) -> list[tuple[str, str, int, int, float]]:
    """(group, name, number of differing values, of values, largest difference) of each tensor that differs."""
    one, other = _groups(a), _groups(b)
    order = [
        group for group in ("model", "helpers", "optimizer", "average", "memory") if group in {**one, **other}
    ]
    found: list[tuple[str, str, int, int, float]] = []
    for group in order:
        mine, theirs = one.get(group, {}), other.get(group, {})
        for name in sorted(mine.keys() | theirs.keys()):
            x, y = mine.get(name), theirs.get(name)
            if x is None or y is None or x.shape != y.shape or x.dtype != y.dtype:
                found.append((group, name, 0, 0, float("inf")))
                continue
            unequal = _bits(x) != _bits(y)
            if unequal.any():
                rows = unequal.reshape(max(1, x.numel()), -1).any(dim=1)
                distance = (x.double() - y.double()).abs().nan_to_num(float("inf"), float("inf")).max().item()
                found.append((group, name, int(rows.sum()), x.numel(), distance))
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _groups(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    try:
        return read_checkpoint(folder)[1]
    except CorruptError as reason:
        raise _unsound(reason) from None


def _manifest(folder: Path) -> Any:
    try:
        return read_manifest(folder)
    except CorruptError as reason:
        raise _unsound(reason) from None


def _verified(folder: Path) -> Any:
    """The verified checksums of a checkpoint's files."""
    try:
        return verify_checkpoint(folder).files
    except CorruptError as reason:
        raise _unsound(reason) from None


def _unsound(reason: CorruptError) -> UserError:
    return UserError(
        f"cannot compare: {reason}", "delete it or restore it from a copy; `drumline verify` lists all damage"
    )


def _extent(side: Side) -> str:
    recorded = (
        f"fingerprints of steps {min(side.records):,} to {max(side.records):,}" if side.records else "none"
    )
    saved = ", ".join(f"step-{step}" for step in sorted(side.checkpoints)) or "no checkpoint"
    return f"{recorded} and {saved}" if side.records else saved
