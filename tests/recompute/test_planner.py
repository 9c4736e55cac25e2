"""Budgets, choices, the formula and the decision: no torch, no model."""

from __future__ import annotations

import pytest

from recompute.config import Keep, Method, RecomputeConfig, Replay
from recompute.errors import ConfigError
from recompute.modules import RecomputeModule
from recompute.planner import SELECTIONS, Candidate, Choice, Decision, choices, parse_bytes, refinements

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
    assert set(SELECTIONS) <= {choice.recompute for choice in choices(2, mtp=False, modules=MODULES)}
    some = {c.recompute.modules for c in choices(2, mtp=False, modules=("attn", "core_attn"))}
    assert some == {(), ("attn",), ("core_attn",)}


def test_short_chunks_are_tried_in_full() -> None:
    """The product of methods, layers, replays, weight gradients, modules and places, less what a rule refuses."""
    keeps = tuple(Keep)
    found = {choice.recompute for choice in choices(3, mtp=True, modules=MODULES, keeps=keeps)}
    blocks = {rule for rule in found if rule.method is Method.BLOCK}
    assert {rule.keep for rule in blocks} == set(keeps)
    assert len(blocks) == (3 + 2) * len(Replay) * (1 + len(SELECTIONS)) * len(keeps)
    assert {rule.modules for rule in blocks} == {(), *(selection.modules for selection in SELECTIONS)}
    alone = {(rule.modules, rule.keep) for rule in found if rule.modules and rule.method is None}
    assert (("attn",), Keep.SHARDED) in alone
    assert (("core_attn",), Keep.DEVICE) in alone
    assert (("core_attn",), Keep.HOST) not in alone
    assert refinements([Choice(rule, False) for rule in found], 3) == ()


def test_long_chunks_mix_what_is_best() -> None:
    plain = {choice.recompute for choice in choices(9, mtp=True, modules=MODULES)}
    assert not any(rule.method is not None and rule.modules for rule in plain)
    assert {rule.keep for rule in plain} == {Keep.DEVICE}
    best = [Choice(RecomputeConfig.block(4), True), Choice(RecomputeConfig.selective("attn"), False),
            Choice(RecomputeConfig.selective("moe_act"), False)]  # fmt: skip
    assert [str(choice) for choice in refinements(best, 9)] == [
        "block 4 + selective attn, delayed wgrad", "block 4 + selective moe_act, delayed wgrad",
        "block 4 keep host, delayed wgrad", "selective attn keep host",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "counts"), [(2, {1, 2}), (8, {*range(1, 9)}), (9, {1, 2, 4, 8, 9}), (61, {1, 2, 4, 8, 16, 32, 61})]
)
def test_long_chunks_are_tried_in_doublings(layers, counts) -> None:
    rules = [choice.recompute for choice in choices(layers, mtp=False, modules=())]
    assert {rule.num_layers for rule in rules if rule.enabled} == counts


def candidate(rule: RecomputeConfig, peak: int, milliseconds: float) -> Candidate:
    return Candidate(
        choice=Choice(rule, False), bins={"weights": 10, "activations": peak - 10}, milliseconds=milliseconds
    )


SLOW = candidate(RecomputeConfig.uniform(1), 30, 9.0)
MIDDLE = candidate(RecomputeConfig.uniform(1, replay=Replay.HIDDEN), 40, 8.0)
TIE = candidate(RecomputeConfig.uniform(3), 41, 8.0)
WORSE = candidate(RecomputeConfig.uniform(2), 45, 8.5)
FAST = candidate(RecomputeConfig.none(), 100, 7.0)


@pytest.mark.parametrize(("budget", "fastest"), [(29, None), (30, SLOW), (50, MIDDLE), (100, FAST)])
def test_fastest_that_fits(budget, fastest) -> None:
    decision = Decision(budget=budget, candidates=(WORSE, FAST, SLOW, TIE, MIDDLE))
    assert decision.fastest == fastest
    assert decision.frontier == (SLOW, MIDDLE, FAST)
    assert decision.missing == max(30 - budget, 0)
    assert (decision.smallest, decision.largest_bin) == (SLOW, "activations")
