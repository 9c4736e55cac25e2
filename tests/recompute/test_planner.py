"""Budgets, choices, the formula and the decision: no torch, no model."""

from __future__ import annotations

import pytest

from recompute.config import RecomputeConfig, Replay
from recompute.errors import ConfigError
from recompute.modules import RecomputeModule
from recompute.planner import SELECTIONS, Candidate, Choice, Decision, choices, parse_bytes

MODULES = tuple(RecomputeModule)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("80GiB", 80 * 2**30), ("1.5 GB", 1_500_000_000), ("4096", 4096), ("512 kib", 2**19), ("2TiB", 2**41), ("7b", 7)],
)
def test_sizes(text, nbytes) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "80 gigs", "-1GiB", "0", "GiB", "1e9", "80GiB 1"])
def test_what_is_no_size_is_refused(text) -> None:
    with pytest.raises(ConfigError, match="budget"):
        parse_bytes(text)


def test_choices_are_distinct_and_complete() -> None:
    found = choices(3, mtp=True, modules=())
    assert len(found) == len(set(found))
    rules = {str(choice.recompute) for choice in found}
    for count in (1, 2, 3):
        assert {f"uniform {count} keep host", f"uniform {count} hidden keep host"} <= rules
        assert {f"uniform {count}", f"uniform {count} hidden", f"block {count}", f"block {count} hidden"} <= rules
    assert {"none", "block 2 + mtp", "block 2 + mtp hidden"} <= rules
    assert "block 3 + mtp" not in rules
    assert all(Choice(choice.recompute, not choice.delay_wgrad) in found for choice in found)
    assert not any("mtp" in str(choice) for choice in choices(3, mtp=False, modules=()))


def test_modules_that_no_chunk_has_are_not_tried() -> None:
    every = {config for config in SELECTIONS if config in {c.recompute for c in choices(2, mtp=False, modules=MODULES)}}
    assert every == set(SELECTIONS)
    some = {c.recompute.modules for c in choices(2, mtp=False, modules=("attn", "core_attn"))}
    assert some == {(), ("attn",), ("core_attn",)}


@pytest.mark.parametrize(("layers", "counts"), [(2, {1, 2}), (9, {*range(1, 9), 9}), (61, {*range(1, 9), 16, 32, 61})])
def test_long_chunks_are_tried_in_doublings(layers, counts) -> None:
    rules = [choice.recompute for choice in choices(layers, mtp=False, modules=())]
    assert {rule.num_layers for rule in rules if rule.enabled} == counts


def candidate(rule: RecomputeConfig, peak: int, milliseconds: float) -> Candidate:
    return Candidate(
        choice=Choice(rule, False), bins={"weights": 10, "activations": peak - 10}, milliseconds=milliseconds
    )


SLOW = candidate(RecomputeConfig.uniform(1), 30, 9.0)
MIDDLE = candidate(RecomputeConfig.uniform(1, replay=Replay.HIDDEN), 40, 8.0)
WORSE = candidate(RecomputeConfig.uniform(2), 45, 8.5)
FAST = candidate(RecomputeConfig.none(), 100, 7.0)


@pytest.mark.parametrize(("budget", "fastest"), [(29, None), (30, SLOW), (50, MIDDLE), (100, FAST)])
def test_fastest_that_fits(budget, fastest) -> None:
    decision = Decision(budget=budget, candidates=(WORSE, FAST, SLOW, MIDDLE))
    assert decision.fastest == fastest
    assert decision.frontier == (SLOW, MIDDLE, FAST)
    assert decision.missing == max(30 - budget, 0)
    assert (decision.smallest, decision.largest_bin) == (SLOW, "activations")
