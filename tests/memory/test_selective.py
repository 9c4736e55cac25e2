"""Bytes of selective recompute: predicted to the byte, and fewer than without."""

from __future__ import annotations

import pytest

from overlap.memory import measure_step
from recompute import RecomputeConfig, RecomputeModule
from tests.memory.compare import assert_exact, decoder, none, tokens

INNER = ("core_attn", "layernorm", "mla_up_proj", "moe_act")
BLOCK = RecomputeConfig(granularity="selective", method="block", num_layers=1, modules=(*INNER, "shared_experts"))
SHAPE = {"layers": 2, "q_rank": 8, "attention_dropout": 0.1}


def measured(*modules: str) -> int:
    config = RecomputeConfig.selective(*modules) if modules else none
    return measure_step(decoder(config, **SHAPE), tokens(2)).usage.total


@pytest.fixture(scope="module")
def without() -> int:
    return measured()


@pytest.mark.parametrize("module", RecomputeModule)
def test_each_module_holds_less_than_none(module: RecomputeModule, without: int) -> None:
    assert measured(module) < without


def test_together_they_hold_less_than_each(without: int) -> None:
    """What one leaves, the next takes: a projection's input is an output of the part before it."""
    totals = [without, *(measured(*INNER[:count]) for count in range(1, len(INNER) + 1))]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == len(totals)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (RecomputeConfig.selective("attn", "experts", "shared_experts"), {"dtype": "bfloat16"}),
        (BLOCK, {"delay_wgrad": True, "mtp": 1, "mhc": 2, "mhc_iterations": 2, "layers": 1}),
        ([RecomputeConfig.selective(*INNER), none, RecomputeConfig.selective("moe_act")], {"layers": 2}),
    ],
)
def test_predicted_is_measured(config: object, shape: dict) -> None:
    assert_exact(lambda: decoder(config, **{**SHAPE, **shape}), tokens(3 if type(config) is list else 2))
