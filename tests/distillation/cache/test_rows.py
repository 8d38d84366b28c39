"""Rows of a teacher cache: every output is encoded and decoded exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.distillation.cache.rows import Rule, decode, differences, encode
from drumline.parallel.world import single_process
from tests.distillation.cache_ranks import CLASSES, key

CPU = torch.device("cpu")
HERE = single_process(CPU)
TYPES = ["float32", "bfloat16", "float16"]


def outputs(rule: Rule, count: int, seed: int, levels: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits with many ties when there are few levels."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randint(-levels, levels + 1, (count, rule.classes), generator=draw) * (8 / levels)
    pooled = torch.randn(count, rule.pooled, generator=draw).to(rule.numbers) if rule.pooled else None
    return logits.to(rule.numbers), pooled


rules = st.builds(
    Rule,
    classes=st.integers(1, 40),
    dtype=st.sampled_from(TYPES),
    top=st.integers(0, 45),
    pooled=st.integers(0, 7),
)


@settings(max_examples=150)
@given(rule=rules, count=st.integers(1, 9), seed=st.integers(0, 99), levels=st.sampled_from([1, 3, 1000]))
def test_decoding_returns_the_encoded_outputs(rule: Rule, count: int, seed: int, levels: int) -> None:
    logits, pooled = outputs(rule, count, seed, levels)
    rows = encode(logits, pooled, rule)
    assert rows.shape == (count, rule.row_bytes)
    assert rows.dtype == torch.uint8
    back, features = decode(rows, rule)
    assert back.shape == logits.shape
    if rule.pooled:
        assert features is not None
        assert torch.equal(features, pooled)
        assert features.dtype == rule.numbers
    else:
        assert features is None
    if not rule.top:
        assert back.dtype == rule.numbers
        assert torch.equal(back, logits)
    # The same from any part of a batch: rows are cut for micro-batches.
    for first in range(count):
        part, _ = decode(rows[first:], rule)
        assert torch.equal(part, back[first:])


@settings(max_examples=100)
@given(
    rule=rules.filter(lambda rule: rule.top > 0),
    seed=st.integers(0, 99),
    levels=st.sampled_from([1, 3, 1000]),
)
def test_the_top_k_rule_equals_a_reference(rule: Rule, seed: int, levels: int) -> None:
    logits, pooled = outputs(rule, 5, seed, levels)
    found, _ = decode(encode(logits, pooled, rule), rule)
    assert found.dtype == torch.float32
    for row, got in zip(logits.double().numpy(), found.numpy(), strict=True):
        kept = sorted(range(rule.classes), key=lambda c: (-row[c], c))[: rule.top]
        others = [c for c in range(rule.classes) if c not in kept]
        mass = np.exp(row[others]).sum()
        assert [got[c] for c in kept] == [row[c] for c in kept]
        np.testing.assert_allclose(got[others], math.log(mass / len(others)), rtol=1e-5, atol=1e-6)
        wanted, have = np.exp(row) / np.exp(row).sum(), np.exp(got.astype(np.float64))
        np.testing.assert_allclose((have / have.sum())[kept], wanted[kept], rtol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
def test_special_values_keep_their_bits(dtype: str) -> None:
    rule = Rule(4, dtype)
    logits = torch.tensor([[math.nan, math.inf, -math.inf, -0.0]]).to(rule.numbers)
    word = torch.int32 if dtype == "float32" else torch.int16
    assert torch.equal(decode(encode(logits, None, rule), rule)[0].view(word), logits.view(word))


def test_top_k_of_every_class_keeps_all() -> None:
    assert Rule(10, "float16", top=10) == Rule(10, "float16") == Rule(10, "float16", top=99)
    assert key(Rule(CLASSES, "float16", top=CLASSES)) == key(Rule(CLASSES, "float16"))


@pytest.mark.parametrize(("classes", "bytes_each"), [(65536, 2), (65537, 4)])
def test_the_highest_class_numbers_are_kept(classes: int, bytes_each: int) -> None:
    rule = Rule(classes, "float32", top=3)
    assert rule.row_bytes == 3 * 4 + 3 * bytes_each + 4
    logits = torch.zeros(2, classes)
    logits[0, [classes - 1, 40000, 0]] = torch.tensor([5.0, 4.0, 3.0])
    logits[1, [32767, 32768, 65535]] = torch.tensor([5.0, 4.0, 3.0])
    found, _ = decode(encode(logits, None, rule), rule)
    assert found[0, [classes - 1, 40000, 0]].tolist() == [5.0, 4.0, 3.0]
    assert found[1, [32767, 32768, 65535]].tolist() == [5.0, 4.0, 3.0]
    assert found.abs().amin() < 1e-4  # the mass of the others, log 1 each
    assert (found > 1).sum() == 6


def test_classes_without_probability_keep_none() -> None:
    logits = torch.tensor([[1.0, -math.inf, 2.0, -math.inf]])
    rule = Rule(4, "float32", top=2)
    assert torch.equal(decode(encode(logits, None, rule), rule)[0], logits)


def test_encoding_shares_no_memory_with_the_teacher() -> None:
    logits = torch.zeros(2, 3)
    rows = encode(logits, None, Rule(3, "float32"))
    logits += 1
    assert not rows.any()


@pytest.mark.parametrize("rule", [Rule(9, "float32", pooled=2), Rule(9, "float32", top=3, pooled=2)])
def test_differences_to_live_outputs_are_the_largest_of_each_row(rule: Rule) -> None:
    logits, pooled = torch.randn(4, 9), torch.randn(4, 2)
    rows = encode(logits, pooled, rule)
    same, features = differences(rows, logits, pooled, rule)
    assert same.max() < 1e-6
    assert not features.any()
    best = logits.argmax(1)
    live, live_pooled = logits.clone(), pooled.clone()
    live[1, best[1]] -= 0.01
    live_pooled[2, 0] += 0.5
    apart, features = differences(rows, live, live_pooled, rule)
    assert apart[1] == pytest.approx(0.01, rel=1e-2)
    assert apart[[0, 2, 3]].max() < 1e-6
    assert features.tolist() == pytest.approx([0, 0, 0.5, 0], rel=1e-5)
