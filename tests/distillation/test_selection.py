"""From a recipe to methods and numbers: those of the papers by default; unknown names are rejected."""

from __future__ import annotations

import dataclasses
import math

import pytest

from drumline.config.aliases import METHOD_ALIASES
from drumline.config.fields import fields_of, with_values
from drumline.config.limits import Range
from drumline.config.recipe import Distill, Recipe
from drumline.core.errors import UserError
from drumline.distillation.methods import METHODS
from drumline.distillation.methods.boundary import Abound
from drumline.distillation.methods.contrast import Crd
from drumline.distillation.methods.factor import Factor, Paraphrase
from drumline.distillation.methods.logits import Dkd, Kd
from drumline.distillation.methods.maps import Attention, Hint
from drumline.distillation.methods.statistics import Fsp
from drumline.distillation.schedules import TermSchedule
from drumline.distillation.selection import Selection, check_selection, select_methods, temperature

PAPERS: dict[str, tuple[float, float, float, float]] = {
    # r, a, b, T
    "kd": (0.1, 0.9, 0.0, 4.0),
    "dkd": (1.0, 0.0, 1.0, 4.0),
    "dist": (1.0, 0.0, 2.0, 1.0),
    "mlkd": (0.2, 0.0, 0.9, 4.0),
    "ctkd": (0.1, 0.0, 0.9, 4.0),
    "hint": (1.0, 0.0, 100.0, 4.0),
    "attention": (1.0, 0.0, 1000.0, 4.0),
    "similarity": (1.0, 0.0, 3000.0, 4.0),
    "correlation": (1.0, 0.0, 0.02, 4.0),
    "vid": (1.0, 0.0, 1.0, 4.0),
    "rkd": (1.0, 0.0, 1.0, 4.0),
    "pkt": (1.0, 0.0, 30000.0, 4.0),
    "crd": (1.0, 0.0, 0.8, 4.0),
    "reviewkd": (1.0, 0.0, 5.0, 4.0),
    "ofd": (1.0, 0.0, 1e-3, 4.0),
    "factor": (1.0, 0.0, 500.0, 4.0),
    "nst": (1.0, 0.0, 50.0, 4.0),
    "kdsvd": (1.0, 0.0, 1.0, 4.0),
    "fsp": (1.0, 0.0, 1.0, 4.0),
    "abound": (1.0, 0.0, 1.0, 4.0),
    "srd": (1.0, 0.0, 1.0, 1.0),
}
ONLY_INITIAL = ("fsp", "abound")


def chosen(*methods: str, **fields: object) -> Selection:
    return select_methods(Distill(method=methods, **fields))  # type: ignore[arg-type]


def weights(found: Selection) -> dict[str, float]:
    return {part.name: part.weight for part in found.methods}


def temperatures(found: Selection) -> dict[str, float]:
    return {part.name: T for part in found.methods if (T := temperature(part.method)) is not None}


def rejected(*methods: str, **fields: object) -> str:
    with pytest.raises(UserError) as caught:
        chosen(*methods, **fields)
    return f"{caught.value.what} | {caught.value.fix}"


@pytest.mark.parametrize("name", PAPERS)
def test_missing_numbers_come_from_the_paper(name: str) -> None:
    r, a, b, T = PAPERS[name]
    found = chosen(name)
    expected = {"kd": a} if a else {}
    if b and name not in ONLY_INITIAL:
        expected[name] = b
    assert (found.r, weights(found)) == (r, expected)
    assert temperatures(found) in ({}, {name: T})


def test_an_empty_recipe_selects_hintons_kd() -> None:
    found = select_methods(Distill())
    assert (found.r, found.T, weights(found), found.initial) == (0.1, 4.0, {"kd": 0.9}, ())
    assert found.methods[0].method == Kd(T=4.0)


@pytest.mark.parametrize("name", ["crd", "rkd", "dkd"])
def test_kd_combines_with_any_method_by_its_weight(name: str) -> None:
    found = chosen(name, a=0.7, T=2.5)
    assert weights(found) == {"kd": 0.7, name: PAPERS[name][2]}
    assert found.methods[0].method == Kd(T=2.5)
    assert (found.r, found.T) == (1.0, 2.5)


@pytest.mark.parametrize("methods", [("crd", "kd"), ("kd", "crd")])
def test_kd_named_beside_a_method_has_weight_one(methods: tuple[str, ...]) -> None:
    assert weights(chosen(*methods)) == {"kd": 1.0, "crd": 0.8}
    assert chosen(*methods).r == 1.0
    assert weights(chosen(*methods, a=0.3)) == {"kd": 0.3, "crd": 0.8}


def test_after_its_initial_phase_a_student_of_fsp_learns_from_labels_alone() -> None:
    assert weights(chosen("fsp")) == {}
    assert weights(chosen("fsp", a=0.5)) == {"kd": 0.5}


def test_standardised_kd_has_the_defaults_of_its_own_paper() -> None:
    found = chosen("kd", standardise=True)
    assert (found.r, weights(found), found.T) == (0.1, {"kd": 9.0}, 2.0)
    given = chosen("kd", standardise=True, r=1.0, a=4.0, T=3.0)
    assert (given.r, weights(given), given.T) == (1.0, {"kd": 4.0}, 3.0)


def test_standardised_dkd_has_the_numbers_of_the_authors_of_the_standardisation() -> None:
    """They multiply alpha and beta by 9, which is a weight of 9."""
    found = chosen("dkd", standardise=True)
    assert (found.r, weights(found), temperatures(found)) == (1.0, {"dkd": 9.0}, {"dkd": 2.0})
    given = chosen("dkd", standardise=True, b=(1.0,), T=4.0)
    assert (weights(given), temperatures(given)) == ({"dkd": 1.0}, {"dkd": 4.0})
    assert weights(chosen("hint", "kd", standardise=True)) == {"kd": 9.0, "hint": 100.0}


def test_the_loss_line_names_the_methods_whose_logits_are_standardised() -> None:
    assert chosen("kd", standardise=True).describe() == (
        "loss = 0.1 cross-entropy + 9 kd, T = 2, logits of kd standardised"
    )
    assert chosen("hint", "kd", "dist", standardise=True).describe().endswith("kd and dist standardised")
    assert "standardised" not in chosen("kd").describe()


def test_each_method_has_the_temperature_of_its_own_paper() -> None:
    found = chosen("dist", "kd", "srd")
    assert temperatures(found) == {"kd": 4.0, "dist": 1.0, "srd": 1.0}
    assert ", T = 4 (kd), 1 (dist), 1 (srd)" in found.describe()
    assert temperatures(chosen("srd", a=1.0)) == {"kd": 4.0, "srd": 1.0}


def test_a_temperature_of_the_recipe_is_for_all_methods_and_one_of_an_option_for_its_own() -> None:
    assert temperatures(chosen("dist", "kd", T=3.0)) == {"kd": 3.0, "dist": 3.0}
    found = chosen("dist", "kd", T=3.0, options=("dist.T:1",))
    assert temperatures(found) == {"kd": 3.0, "dist": 1.0}
    assert temperatures(chosen("dist", a=1.0, options=("kd.T:2",))) == {"kd": 2.0, "dist": 1.0}
    assert temperatures(chosen("dist", options=("T:2",))) == {"dist": 2.0}
    assert "kd and dist both" in rejected("kd", "dist", options=("T:2",))


def test_an_ensemble_averages_at_the_temperature_of_the_first_method_on_logits() -> None:
    assert chosen("dist", "kd").T == 4.0
    assert chosen("dist", "kd", T=3.0).T == 3.0
    assert chosen("dist").T == 1.0


def test_standardising_without_a_method_on_logits_is_rejected() -> None:
    message = rejected("hint", standardise=True)
    assert "distill.standardise" in message
    assert "hint" in message
    assert "distill.a" in message
    assert weights(chosen("hint", standardise=True, a=1.0)) == {"kd": 1.0, "hint": 100.0}


@pytest.mark.parametrize("name", ["dkd", "dist", "srd"])
def test_the_temperature_reaches_every_method_that_has_one(name: str) -> None:
    found = chosen(name, T=7.0, a=1.0)
    assert [part.method.T for part in found.methods] == [7.0, 7.0]  # type: ignore[attr-defined]


def test_weights_are_in_the_order_of_the_methods_without_kd() -> None:
    assert weights(chosen("rkd", "kd", "crd", b=(3.0, 4.0))) == {"kd": 1.0, "rkd": 3.0, "crd": 4.0}


@pytest.mark.parametrize(
    ("methods", "b", "message"),
    [
        (("crd",), (1.0, 2.0), "2 weight(s); the methods that need one are: crd"),
        (("crd", "rkd"), (1.0,), "1 weight(s); the methods that need one are: crd, rkd"),
        (("kd",), (0.5,), "none (kd is weighted by distill.a)"),
        (("kd", "crd"), (0.5, 0.5), "2 weight(s); the methods that need one are: crd"),
    ],
)
def test_a_wrong_number_of_weights_is_rejected(
    methods: tuple[str, ...], b: tuple[float, ...], message: str
) -> None:
    message = rejected(*methods, b=b)
    assert message.startswith("distill.b = ")
    assert message in message


def test_a_weight_of_zero_leaves_a_method_out() -> None:
    assert weights(chosen("crd", "rkd", b=(0.0, 2.0))) == {"rkd": 2.0}
    assert weights(chosen("kd", a=0.0)) == {}


@pytest.mark.parametrize(
    ("name", "near"), [("kdd", "kd"), ("crdd", "crd"), ("atention", "attention"), ("reviewkd2", "reviewkd")]
)
def test_an_unknown_method_suggests_the_nearest_one(name: str, near: str) -> None:
    message = rejected(name)
    assert f"distill.method = {name}" in message
    assert f"did you mean {near}?" in message


def test_aliases_and_capitals_mean_a_known_method() -> None:
    found = chosen("SP", "Kd", "cc", a=0.5, options=("sp.warmup:3",), b=(1.0, 2.0))
    assert weights(found) == {"kd": 0.5, "similarity": 1.0, "correlation": 2.0}
    assert found.methods[1].schedule.warmup == 3
    assert not METHODS.keys() & METHOD_ALIASES.keys()
    assert METHODS.keys() >= set(METHOD_ALIASES.values())
    assert "names similarity twice" in rejected("sp", "similarity")


def test_a_name_similar_to_none_lists_all_methods() -> None:
    message = rejected("zzzzzz")
    assert all(name in message for name in METHODS)


def test_no_method_and_a_repeated_method_are_rejected() -> None:
    assert "distill.method is empty" in rejected()
    assert "names crd twice" in rejected("crd", "crd")


@pytest.mark.parametrize("sign", [":", "="])
def test_options_are_parsed_by_the_type_of_their_field(sign: str) -> None:
    (crd,) = chosen("crd", options=(f"K{sign}512", f"tau{sign}0.1", f"momentum{sign}0")).methods
    assert crd.method == Crd(K=512, tau=0.1, momentum=0.0)
    assert [type(crd.method.K), type(crd.method.momentum)] == [int, float]  # type: ignore[attr-defined]
    (attention,) = chosen("attention", options=(f"layers{sign}2+3",)).methods
    assert attention.method == Attention(layers="2+3")


def test_the_value_of_an_option_may_contain_the_other_separator() -> None:
    (attention,) = chosen("attention", options=("layers=a:b",)).methods
    assert attention.method == Attention(layers="a:b")


@pytest.mark.parametrize("sign", [":", "="])
def test_an_option_may_name_its_method(sign: str) -> None:
    found = chosen("dkd", "hint", options=(f"dkd.beta{sign}2", f"hint.layer{sign}1", "warmup:3"))
    assert [part.method for part in found.methods] == [Dkd(beta=2.0), Hint(layer=1)]
    assert [part.schedule.warmup for part in found.methods] == [3.0, 0.0]


def test_an_option_that_two_methods_have_must_name_its_method() -> None:
    message = rejected("dkd", "reviewkd", options=("warmup:5",))
    assert "dkd and reviewkd both have it" in message
    assert "write dkd.warmup:5" in message
    found = chosen("dkd", "reviewkd", options=("dkd.warmup:5",))
    assert [part.schedule.warmup for part in found.methods] == [5.0, 20.0]


@pytest.mark.parametrize("text", ["gama:2", "crd.beta:2", "crd.T:3"])
def test_an_unknown_option_lists_the_known_ones(text: str) -> None:
    message = rejected("dkd", "crd", options=(text,))
    assert f"distill.options: {text}" in message
    assert all(known in message for known in ("dkd.alpha", "dkd.beta", "dkd.warmup", "crd.K", "crd.tau"))


@pytest.mark.parametrize("text", ["rkd.angle:2", "dkdd.beta:2"])
def test_an_option_of_a_method_that_is_not_selected_is_rejected(text: str) -> None:
    message = rejected("dkd", options=(text,))
    assert f"distill.options: {text}" in message
    assert "dkd.beta" in message


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("K:many", "a whole number"),
        ("K:1.5", "a whole number"),
        ("tau:warm", "a number"),
        ("tau:nan", "a number"),
        ("tau", "a number"),
    ],
)
def test_an_option_of_a_wrong_type_is_rejected(text: str, kind: str) -> None:
    message = rejected("crd", options=(text,))
    assert f"distill.options: {text}" in message
    assert f"must be {kind}" in message


OUT_OF_RANGE = {
    "correlation": ("dim:-4", "dim:0", "dim:1000000000"),
    "factor": ("k:0", "k:-1", "k:1e9"),
    "dkd": ("beta:-8", "alpha:-1", "warmup:-3", "T:0", "T:-2", "T:1e30"),
    "rkd": ("distance:-1", "angle:-1"),
    "reviewkd": ("warmup:-3", "mid:-1"),
    "crd": ("K:0", "dim:0", "tau:0", "momentum:1", "momentum:-0.1"),
    "dist": ("beta:-1", "gamma:-1", "T:0"),
    "hint": ("layer:0",),
    "kdsvd": ("k:0",),
    "abound": ("margin:0",),
    "srd": ("exponent:0.5", "T:0"),
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in OUT_OF_RANGE.items() for text in texts]
)
def test_an_option_outside_its_limits_is_rejected_with_method_value_and_range(name: str, text: str) -> None:
    message, option = rejected(name, options=(text,)), text.partition(":")[0]
    assert f"distill.options: {name}.{option} = " in message
    takes = {**fields_of(METHODS[name]), **fields_of(TermSchedule)}[option].takes()
    assert f"{name}.{option} takes {takes}" in message


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_numbers_that_are_not_finite_are_rejected(name: str, value: str) -> None:
    """As text, and from Python."""
    for option, field in fields_of(METHODS[name]).items():
        if field.hint is float:
            message = rejected(name, options=(f"{name}.{option}:{value}",))
            assert f"{name}.{option} must be {field.takes()}" in message
        if field.hint in (int, float):
            with pytest.raises(UserError, match=f"{name}.{option} = "):
                METHODS[name](**{option: float(value)})


@pytest.mark.parametrize("name", METHODS)
def test_every_number_of_a_method_declares_its_limits(name: str) -> None:
    for option, field in fields_of(METHODS[name]).items():
        if field.hint in (int, float):
            assert any(isinstance(limit, Range) for limit in field.limits), option


@pytest.mark.parametrize("field", ["distill.r", "distill.a", "distill.b", "distill.T"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_weights_outside_their_limits_are_rejected(field: str, value: float) -> None:
    given = (value,) if field == "distill.b" else value
    with pytest.raises(UserError, match=field):
        with_values(Recipe(), {field: given}).check()


@pytest.mark.parametrize(
    ("name", "least"),
    [("similarity", 2), ("correlation", 2), ("rkd", 3), ("pkt", 2), ("srd", 2), ("reviewkd", 2), ("dist", 2)],
)
def test_a_batch_that_is_too_small_for_a_method_is_rejected(name: str, least: int) -> None:
    """Of fewer samples, these methods learn nothing, or their BatchNorm has one value."""
    found = chosen(name)
    check_selection(found, with_values(Recipe(), {"data.batch": least}))
    recipe = with_values(Recipe(), {"data.batch": least - 1})
    with pytest.raises(UserError, match=f"data.batch = {least - 1}: {name} needs at least {least}"):
        check_selection(found, recipe)
    if name == "reviewkd":
        with pytest.raises(UserError) as caught:
            check_selection(found, with_values(recipe, {"data.batch": 8, "train.accumulate": 8}))
        assert "data.batch = 8 in 8 micro-batches: reviewkd" in caught.value.what
        assert "--data.batch 16" in caught.value.fix


def test_initial_phases_are_listed_in_order_with_their_epochs() -> None:
    assert chosen("factor").initial == (("factor", 30.0),)
    assert chosen("abound", "crd", "fsp").initial == (("abound", 30.0), ("fsp", 30.0))
    assert chosen("fsp", "factor", initial_epochs=2.5).initial == (("fsp", 2.5), ("factor", 2.5))
    listed = {name for name in METHODS if chosen(name).initial}
    assert listed == {"factor", "fsp", "abound"}


@pytest.mark.parametrize(
    ("name", "method", "weighed"),
    [("fsp", Fsp(), True), ("abound", Abound(), True), ("factor", Paraphrase(), False)],
)
def test_an_initial_phase_minimises_the_loss_of_its_initial_method_alone(
    name: str, method: object, weighed: bool
) -> None:
    """Its weight is 1, as in public code, or the user's if the method takes no part in the main phase."""
    distill = Distill(method=(name, "crd"), r=2.0, a=3.0, T=9.0, options=("crd.K:32",))
    found = select_methods(distill, name)
    assert found.r == 0.0
    assert found.initial == ()
    assert [(part.name, part.method, part.weight) for part in found.methods] == [(name, method, 1.0)]
    (part,) = select_methods(dataclasses.replace(distill, b=(7.0, 0.5)), name).methods
    assert part.weight == (7.0 if weighed else 1.0)


def test_a_recipe_with_nothing_to_minimise_is_rejected() -> None:
    assert "nothing to minimise" in rejected("kd", r=0.0, a=0.0)
    assert "nothing to minimise" in rejected("fsp", r=0.0)


def test_an_initial_phase_uses_the_options_that_it_shares_with_its_method() -> None:
    distill = Distill(method=("factor",), options=("k:0.25",))
    (part,) = select_methods(distill, "factor").methods
    assert part.method == Paraphrase(k=0.25)
    assert select_methods(distill).methods[0].method == Factor(k=0.25)
    (margin,) = select_methods(Distill(method=("abound",), options=("margin:2",)), "abound").methods
    assert margin.method == Abound(margin=2.0)


def test_the_same_recipe_gives_the_same_selection() -> None:
    distill = Distill(method=("crd", "kd"), options=("K:64",))
    assert select_methods(distill) == select_methods(dataclasses.replace(distill))


def test_the_temperature_is_logged_for_methods_that_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Margin(Hint):
        on_logits = True

    monkeypatch.setitem(METHODS, "margin", Margin)
    for name in METHODS:
        method = chosen(name, **({} if name in ("kd", *ONLY_INITIAL) else {"a": 0.0}))
        has = any("T" in vars(part.method) for part in method.methods)
        assert (", T = " in method.describe()) == has, name
    assert ", T = 1" in chosen("srd").describe()


@pytest.mark.parametrize(
    ("methods", "noted"),
    [(("hint",), True), (("ctkd",), True), (("hint", "kd"), False), (("srd",), False)],
)
def test_the_log_says_that_no_method_reads_the_temperature(methods: tuple[str, ...], noted: bool) -> None:
    line = select_methods(Distill(method=methods, T=2.0)).describe()
    assert ("no method reads distill.T" in line) == noted
    assert "reads distill.T" not in select_methods(Distill(method=methods)).describe()


@pytest.mark.parametrize(("typed", "meant"), [("fit-net", "hint"), ("review-kd", "reviewkd"), ("kkd", "kd")])
def test_a_misspelt_method_is_answered_with_the_name_of_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(UserError) as caught:
        select_methods(Distill(method=(typed,)))
    assert caught.value.fix == f"did you mean {meant}?"
