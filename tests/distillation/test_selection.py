"""From a recipe to methods and numbers: those of the papers by default; unknown names are rejected."""

from __future__ import annotations

import dataclasses

import pytest

from drumline.config.recipe import Distill
from drumline.core.errors import UserError
from drumline.distillation.methods import METHODS
from drumline.distillation.methods.boundary import Abound
from drumline.distillation.methods.contrast import Crd
from drumline.distillation.methods.factor import Factor, Paraphrase
from drumline.distillation.methods.logits import Dkd, Kd
from drumline.distillation.methods.maps import Attention, Hint
from drumline.distillation.methods.statistics import Fsp
from drumline.distillation.selection import Selection, select_methods

PAPERS: dict[str, tuple[float, float, float, float]] = {
    # r, a, b, T
    "kd": (0.1, 0.9, 0.0, 4.0),
    "dkd": (1.0, 0.0, 1.0, 4.0),
    "dist": (1.0, 0.0, 2.0, 1.0),
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
    assert (found.r, found.T, weights(found)) == (r, T, expected)


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


def test_standardising_does_not_change_the_defaults_of_other_methods() -> None:
    found = chosen("dkd", standardise=True)
    assert (found.r, weights(found), found.T) == (1.0, {"dkd": 1.0}, 4.0)


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
        (("crd",), (1.0, 2.0), "2 weight(s); the methods that take one are: crd"),
        (("crd", "rkd"), (1.0,), "1 weight(s); the methods that take one are: crd, rkd"),
        (("kd",), (0.5,), "none (kd is weighted by distill.a)"),
        (("kd", "crd"), (0.5, 0.5), "2 weight(s); the methods that take one are: crd"),
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
    ("name", "near"), [("kdd", "kd"), ("CRD", "crd"), ("atention", "attention"), ("reviewkd2", "reviewkd")]
)
def test_an_unknown_method_suggests_the_nearest_one(name: str, near: str) -> None:
    message = rejected(name)
    assert f"distill.method = {name}" in message
    assert f"did you mean {near}?" in message


def test_a_name_similar_to_none_lists_all_methods() -> None:
    message = rejected("zzzzzz")
    assert all(name in message for name in METHODS)


def test_no_method_and_a_repeated_method_are_rejected() -> None:
    assert "distill.method is empty" in rejected()
    assert "names a method twice" in rejected("crd", "crd")


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


@pytest.mark.parametrize("text", ["gama:2", "crd.beta:2", "T:3"])
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


def test_errors_of_the_method_itself_are_reported() -> None:
    assert "distill.T = 0" in rejected("kd", T=0.0)


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
