"""Selects the methods and weights of a recipe, for the main phase of a run and for each initial phase.

Promises: pure functions. Numbers that the recipe leaves open come from the first method's paper; kd combines with any
method by its weight `a`. Rejects unknown methods and options with a suggestion, weights that no method takes, and
methods that do not work with the layout or with other fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drumline.config.aliases import method_name
from drumline.config.fields import Field, WrongValue, fields_of, from_text
from drumline.config.layouts import layout_named
from drumline.config.recipe import Distill, Recipe
from drumline.config.sources import names_code
from drumline.core.errors import UserError
from drumline.distillation.method import Method, Weights, check_option, options_of
from drumline.distillation.methods import METHODS, method_class
from drumline.distillation.schedules import CONSTANT, TermSchedule


@dataclass(frozen=True)
class WeightedMethod:
    """A method with its name, its weight, and how they change."""

    name: str
    method: Method
    weight: float
    schedule: TermSchedule = CONSTANT


@dataclass(frozen=True)
class Selection:
    """What a phase minimises."""

    r: float
    methods: tuple[WeightedMethod, ...]
    """kd comes first if it has a weight."""
    T: float = 1.0
    """The temperature at which an ensemble of teachers averages: that of the first method that compares logits."""
    standardised: tuple[str, ...] = ()
    """The methods whose logits are standardised."""
    initial: tuple[tuple[str, float], ...] = ()
    """The initial phases that come before: their methods and epochs."""
    phase: str = ""
    """The method whose initial phase this is; empty for the main phase."""
    unused_T: bool = False
    """The recipe has a temperature, but no method does."""

    @property
    def relating(self) -> list[str]:
        """The methods that relate all samples of the global batch."""
        return [each.name for each in self.methods if each.method.scope == "global_batch"]

    @property
    def reading_logits(self) -> list[str]:
        """The methods that read the teacher's logits."""
        return [each.name for each in self.methods if each.method.reads_logits]

    def describe(self) -> str:
        """The log line about the loss."""
        terms = [f"{self.r:g} cross-entropy"] if self.r else []
        terms += [f"{each.weight:g} {each.name}{each.schedule.describe()}" for each in self.methods]
        opening = f"initial phase of {self.phase}: " if self.phase else "loss = "
        return opening + " + ".join(terms) + self._temperatures() + self._standardisation()

    def _temperatures(self) -> str:
        found = {each.name: T for each in self.methods if (T := temperature(each.method)) is not None}
        if self.unused_T:
            return " (no method reads distill.T)"
        if len(set(found.values())) > 1:
            return ", T = " + ", ".join(f"{T:g} ({name})" for name, T in found.items())
        return "".join(f", T = {T:g}" for T in set(found.values()))

    def _standardisation(self) -> str:
        return f", logits of {' and '.join(self.standardised)} standardised" if self.standardised else ""


def temperature(method: Method) -> float | None:
    """The method's temperature; None if it has none."""
    found: float | None = getattr(method, "T", None)
    return found


def select_methods(distill: Distill, phase: str = "") -> Selection:
    """The methods of the main phase, or of the initial phase of a method, with every number filled in."""
    kinds = _kinds(distill)
    if phase:
        return _select_initial(distill, phase, kinds)
    others = [name for name in kinds if name != "kd"]
    first = kinds[others[0] if others else "kd"]
    paper = _paper(first, distill.standardise)
    r, a = paper.r, paper.a
    if others and "kd" in kinds:
        a = _paper(METHODS["kd"], True).a if distill.standardise else 1.0
    r, a = (found if wanted == "auto" else wanted for wanted, found in ((distill.r, r), (distill.a, a)))
    named = list(kinds)
    if a:
        kinds.setdefault("kd", METHODS["kd"])
    options = _options(distill.options, kinds, named)
    built = {name: _build(kind, _temperature(kind, distill) | options[name]) for name, kind in kinds.items()}
    schedules = {name: _schedule(distill, kind, options[name]) for name, kind in kinds.items()}
    weights = _weights(distill, kinds)
    methods = [WeightedMethod("kd", built["kd"], a, schedules["kd"])] if a else []
    methods += [
        WeightedMethod(name, built[name], weight, schedules[name])
        for name, weight in zip(others, weights, strict=True)
        if weight and not kinds[name].only_initial
    ]
    if not r and not methods:
        raise UserError(
            "distill.r, distill.a and distill.b are all 0, so there is nothing to minimise",
            "set one of them above 0",
        )
    on_logits = [each for each in methods if each.method.on_logits]
    if distill.standardise and not on_logits:
        raise UserError(
            f"distill.standardise = true: {', '.join(named)} does not compare logits",
            "remove it, or add kd with distill.a",
        )
    for key in ("initial_epochs", "initial_lr"):
        value = getattr(distill, key)
        if value != "auto" and not any(kinds[name].initial_epochs for name in others):
            known = [name for name, method in METHODS.items() if method.initial_epochs]
            raise UserError(
                f"distill.{key} = {value:g}: {', '.join(named)} has no initial phase",
                f"remove it; {', '.join(known)} have an initial phase",
            )
    initial = tuple(
        (name, kinds[name].initial_epochs if distill.initial_epochs == "auto" else distill.initial_epochs)
        for name in others
        if kinds[name].initial_epochs
    )
    standardised = tuple(each.name for each in on_logits) if distill.standardise else ()
    T = next((T for each in on_logits or methods if (T := temperature(each.method)) is not None), 1.0)
    unused_T = distill.T != "auto" and all(temperature(method) is None for method in built.values())
    return Selection(r, tuple(methods), T, standardised, initial, unused_T=unused_T)


def check_selection(selection: Selection, recipe: Recipe) -> None:
    """Raises a `UserError` if the methods do not work with the layout or with other fields of the recipe."""
    name = recipe.parallel.layout
    layout = layout_named(name)
    if layout.why_no_teacher:
        raise UserError(f"parallel.layout = {name}: {layout.why_no_teacher}", "use --parallel.layout ddp")
    initial = [selection.phase] if selection.phase else [name for name, epochs in selection.initial if epochs]
    relating = (
        f"{', '.join(selection.relating)} relates all samples of the global batch, and micro-batches would separate "
        "them"
    )
    if selection.relating and layout.staged:
        raise UserError(
            f"parallel.layout = {name}: {relating}",
            "use --parallel.layout ddp, or a method that does not relate samples",
        )
    if initial and layout.staged:
        raise UserError(
            f"parallel.layout = {name}: {', '.join(initial)} has an initial phase, which does not train the "
            "whole student",
            "use --parallel.layout ddp, or a different method",
        )
    if selection.relating and recipe.train.accumulate > 1:
        raise UserError(
            f"train.accumulate = {recipe.train.accumulate}: {relating}",
            "use --train.accumulate 1 with more processes or a smaller data.batch, or a method that does not relate "
            "samples",
        )
    micro = recipe.parallel.micro_batches if layout.staged else recipe.train.accumulate
    samples = recipe.data.batch // (1 if micro == "auto" else micro)
    for each in selection.methods:
        if samples < (least := each.method.least_samples):
            pieces = f" in {micro} micro-batches" if samples < recipe.data.batch else ""
            raise UserError(
                f"data.batch = {recipe.data.batch}{pieces}: {each.name} needs at least {least} samples at a time",
                f"use --data.batch {least * recipe.data.batch // max(samples, 1)} or more, or a method that treats "
                "samples one by one, such as kd",
            )
    unmixed = [each.name for each in selection.methods if not each.method.mixes]
    if unmixed and recipe.distill.unlabelled:
        raise UserError(
            f"distill.method = {', '.join(unmixed)}: needs the class of every image, which those of "
            "distill.unlabelled do not have",
            "remove distill.unlabelled, or use a different method, such as kd or dist",
        )
    if unmixed and (recipe.data.mixup or recipe.data.cutmix):
        raise UserError(
            f"distill.method = {', '.join(unmixed)}: needs one class per image, but a mixed image has two",
            "set data.mixup and data.cutmix to 0, or use a different method",
        )


def _select_initial(distill: Distill, name: str, kinds: dict[str, type[Method]]) -> Selection:
    """The initial phase of a method, whose only term is the loss of `initial_method`. `b` is its weight if the method
    takes no part in the main phase."""
    kind = kinds[name].initial_method()
    options = _options(distill.options, kinds, list(kinds))[name]
    weight = kind.weights.b
    if kinds[name].only_initial and distill.b:
        others = [other for other in kinds if other != "kd"]
        weight = _weights(distill, kinds)[others.index(name)]
    # Otherwise the schedule is that of the main phase.
    schedule = _schedule(distill, kinds[name], options) if kinds[name].only_initial else CONSTANT
    method = WeightedMethod(name, _build(kind, options), weight, schedule)
    return Selection(0.0, (method,), phase=name)


def _kinds(distill: Distill) -> dict[str, type[Method]]:
    """The classes of the methods that the recipe names, in order, by the names that they have in the loss."""
    if not distill.method:
        raise UserError("distill.method is empty", f"give one of: {', '.join(METHODS)}")
    found: dict[str, type[Method]] = {}
    for text in distill.method:
        kind = method_class(text)
        name = kind.name if names_code(text) else method_name(text)
        if name in found:
            raise UserError(
                f"distill.method = {','.join(distill.method)} names {name} twice", "name each method once"
            )
        found[name] = kind
    return found


def _weights(distill: Distill, kinds: dict[str, type[Method]]) -> list[float]:
    """The weight of each method except kd, in order."""
    others = [name for name in kinds if name != "kd"]
    if not distill.b:
        return [_paper(kinds[name], distill.standardise).b for name in others]
    if len(distill.b) != len(others):
        names = ", ".join(others) or "none (kd is weighted by distill.a)"
        raise UserError(
            f"distill.b = {','.join(f'{b:g}' for b in distill.b)} has {len(distill.b)} weight(s); the methods that "
            f"need one are: {names}",
            "give one weight per method, in their order",
        )
    return list(distill.b)


def _options(
    texts: tuple[str, ...], kinds: dict[str, type[Method]], named: list[str]
) -> dict[str, dict[str, Any]]:
    """The options of every method, parsed by the types of its fields. Those of a method that is not `named` in the
    recipe need its name."""
    found: dict[str, dict[str, Any]] = {name: {} for name in kinds}
    fields = {name: _option_fields(kind) for name, kind in kinds.items()}
    for text in texts:
        key, _, value = text.partition(min(":=", key=lambda sign: text.find(sign) % (len(text) + 1)))
        owner, _, option = key.rpartition(".")
        candidates = [name for name in found if name in (owner, method_name(owner))] if owner else named
        owners = [name for name in candidates if option in fields[name]]
        if not owners:
            known = ", ".join(f"{name}.{option}" for name in found for option in fields[name])
            raise UserError(
                f"distill.options: {text}: distill.method = {','.join(named)} has no option {key!r}",
                f"use one of: {known}",
            )
        if len(owners) > 1 and option == "warmup":  # that of the method whose paper has one
            owners = [name for name in owners if kinds[name].warmup] or owners
        if len(owners) > 1:
            raise UserError(
                f"distill.options: {text}: {' and '.join(owners)} both have it", f"write {owners[0]}.{text}"
            )
        field = fields[owners[0]][option]
        try:
            found[owners[0]][option] = from_text(field.hint, [value])
        except WrongValue:
            raise UserError(
                f"distill.options: {text}: {owners[0]}.{option} must be {field.takes()}",
                f"for example {option}:{field.choices[-1] if field.choices else field.default}",
            ) from None
        check_option(owners[0], field, found[owners[0]][option])
    return found


def _option_fields(kind: type[Method]) -> dict[str, Field]:
    """A method's options, and those of its schedule."""
    own, schedule = options_of(kind), fields_of(TermSchedule)
    changing = {key: field for key, field in schedule.items() if "T" in own or not key.startswith("T_")}
    return {**own, **changing}


def _schedule(distill: Distill, kind: type[Method], options: dict[str, Any]) -> TermSchedule:
    """The schedule of a method: its options, or the warm-up of its paper."""
    known = fields_of(TermSchedule)
    given = {key: value for key, value in options.items() if key in known}
    schedule = TermSchedule(**{"warmup": kind.warmup, **given})
    averaged = distill.ensemble == "probabilities" and len(distill.teacher_weights) > 1
    if schedule.T_schedule != "constant" and averaged:
        raise UserError(
            f"distill.options T_schedule = {schedule.T_schedule}: distill.ensemble = probabilities averages the "
            "teachers at one temperature",
            "use distill.ensemble=logits, or T_schedule:constant",
        )
    return schedule


def _paper(kind: type[Method], standardise: bool) -> Weights:
    """The weights of a method's paper or, for standardised logits, of the authors of the standardisation."""
    return kind.weights if kind.standardised is None or not standardise else kind.standardised


def _temperature(kind: type[Method], distill: Distill) -> dict[str, float]:
    """The recipe's temperature, or else that for standardised logits. Empty: the method's own."""
    if distill.T != "auto":
        return {"T": distill.T}
    return {"T": kind.standardised.T} if distill.standardise and kind.standardised else {}


def _build(kind: type[Method], numbers: dict[str, Any]) -> Method:
    """The method with these values for the options that it has."""
    known = options_of(kind)
    return kind(**{key: value for key, value in numbers.items() if key in known})
