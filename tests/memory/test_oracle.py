"""The oracle against the CPU allocator's own events: the highest point of a whole step, to the byte."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import cycle

import pytest
import torch

from overlap.memory import fake_chunk, measure_peak, predict_peak, take_footprint
from overlap.memory.facts import Footprint
from overlap.memory.oracle import allocator_peak, highest_of
from overlap.model.swiglu import swiglu
from recompute.config import Keep, RecomputeConfig, Replay
from recompute.modules import RecomputeModule
from tests.memory.compare import block, decoder, none, tokens, uniform

MICROBATCHES = 3
RULES = (none, uniform(1), uniform(2), uniform(3), block(2), uniform(1, replay=Replay.HIDDEN))
SELECTIVE = (
    *(RecomputeConfig.selective(module) for module in RecomputeModule),
    RecomputeConfig.selective("core_attn", "layernorm", "mla_up_proj", "moe_act"),
    RecomputeConfig(granularity="selective", method="block", num_layers=1, modules=("moe_act", "shared_experts")),
)
HOST = (uniform(1, keep=Keep.HOST), uniform(2, replay=Replay.HIDDEN, keep=Keep.HOST),
        RecomputeConfig.selective("attn", "experts", keep=Keep.HOST))  # fmt: skip
MODELS: dict[str, dict[str, object]] = {
    "plain": {"layers": 3, "dense_layers": 1},
    "mtp": {"layers": 1, "mtp": 1, "tied": True},
    "mhc": {"layers": 1, "dense_layers": 0, "mhc": 4, "mhc_iterations": 1},
    "cut": {"layers": 2, "dense_layers": 1, "mhc": 2, "mhc_iterations": 1, "cut_attention": True},
}
DRAWS: dict[str, object] = {"dropout": 0.1, "attention_dropout": 0.1, "jitter": 0.1, "attention": "gqa", "kv_rank": 16}


@cache
def footprint(model: str) -> Footprint:
    """Taken once; it holds for every rule, order and setting of delayed weight gradients."""
    with fake_chunk(lambda: decoder(**MODELS[model])) as chunk:
        return take_footprint(chunk, tokens(1)[0], rules=SELECTIVE if model == "plain" else (), constants=True)


TABLE = [
    *(("plain", rule, delay_wgrad) for rule, delay_wgrad in zip(RULES, cycle((False, True)))),
    *(("mtp", rule, delay_wgrad) for rule, delay_wgrad in zip(RULES, cycle((True, False)))),
    *(("mhc", rule, True) for rule in (none, uniform(1, replay=Replay.HIDDEN))),
    *(("cut", rule, False) for rule in (uniform(2), uniform(1, replay=Replay.HIDDEN))),
]


@pytest.mark.parametrize(("model", "rule", "delay_wgrad"), TABLE, ids=str)
def test_peak_is_the_allocators(model, rule, delay_wgrad) -> None:
    chunk = decoder(rule, delay_wgrad=delay_wgrad, **MODELS[model])
    predicted = highest_of(chunk, [footprint(model)] * MICROBATCHES)
    assert predicted.bytes == measure_peak(chunk, tokens(MICROBATCHES))


@pytest.mark.parametrize(("rule", "delay_wgrad"), [*zip((*SELECTIVE, *HOST), cycle((False, True)))], ids=str)
def test_peak_with_parts_rebuilt_and_inputs_on_the_host(rule, delay_wgrad) -> None:
    """Host memory is the CPU allocator's too."""
    chunk = decoder(rule, delay_wgrad=delay_wgrad, **MODELS["plain"])
    predicted = highest_of(chunk, [footprint("plain")] * MICROBATCHES)
    assert predicted.bytes == measure_peak(chunk, tokens(MICROBATCHES))


@pytest.mark.parametrize(
    ("lead", "rule"), [(1, none), (2, uniform(1)), (3, uniform(1, replay=Replay.HIDDEN)), (2, HOST[0])]
)
def test_peak_with_a_lead(lead, rule) -> None:
    """Two forwards at once; the first plan may hold most."""
    chunk = decoder(rule, lead=lead, **MODELS["plain"])
    predicted = highest_of(chunk, [footprint("plain")] * MICROBATCHES)
    assert predicted.bytes == measure_peak(chunk, tokens(MICROBATCHES))
    usual = highest_of(decoder(rule, **MODELS["plain"]), [footprint("plain")] * MICROBATCHES)
    assert predicted.bytes >= usual.bytes


def test_microbatches_of_several_shapes_that_draw() -> None:
    feeds = [*tokens(1, batch=1, seq=4), *tokens(1, batch=3, seq=5)]
    predicted = predict_peak(lambda: decoder(uniform(1), layers=1, **DRAWS), feeds)
    assert predicted.bytes == measure_peak(decoder(uniform(1), layers=1, **DRAWS), feeds)


def without_temporaries(found: Footprint) -> Footprint:
    facts = {kind: replace(fact, trace=()) for kind, fact in found.facts[False].items()}
    return replace(found, facts={False: facts})


def test_temporaries_and_constants_count() -> None:
    """Negative controls: without either, the peak is another."""
    chunk = decoder(uniform(1), **MODELS["plain"])
    measured = measure_peak(chunk, tokens(MICROBATCHES))
    bare = without_temporaries(footprint("plain"))
    assert highest_of(chunk, [bare] * MICROBATCHES).bytes < measured
    with fake_chunk(lambda: decoder(**MODELS["plain"])) as fake:
        missing = take_footprint(fake, tokens(1)[0], (False,))
    assert highest_of(chunk, [missing] * MICROBATCHES).bytes < measured


def test_a_death_that_another_holder_prevents(monkeypatch) -> None:
    """Negative control: the walk must know who else holds what dies in a slot."""
    chunk = decoder(none, **MODELS["plain"])
    right = highest_of(chunk, [footprint("plain")] * MICROBATCHES)
    monkeypatch.setattr(import_module("overlap.memory.predict"), "_deaths", lambda slot: {})
    assert highest_of(chunk, [footprint("plain")] * MICROBATCHES).bytes > right.bytes


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Tokens, experts per token, gate and up, bytes.
        ({"layers": 2, "expert_width": 256}, 2 * 6 * 2 * 2 * 256 * 4),
        ({"layers": 2, "dense_layers": 2, "ffn_width": 512}, 2 * 6 * 2 * 512 * 4),
    ],
)
def test_gradients_over_their_input_lower_the_peak(settings, expected, monkeypatch) -> None:
    """By the bytes of the experts' first product, predicted and measured."""
    peaks: dict[str, list[int]] = {"uniform 1": [], "none": []}
    for consumes in (True, False):
        if not consumes:
            monkeypatch.setattr("overlap.model.experts.swiglu", lambda x, probs=None, **_: swiglu(x, probs))
        with fake_chunk(lambda: decoder(**settings)) as fake:
            found = take_footprint(fake, tokens(1)[0], (False,), constants=True)
        for rule in (uniform(1), none):
            chunk = decoder(rule, **settings)
            predicted = highest_of(chunk, [found] * 2)
            assert predicted.bytes == measure_peak(chunk, tokens(2))
            peaks[str(rule)].append(predicted.bytes)
    assert [second - first for first, second in peaks.values()] == [expected] * 2


def test_allocator_peak_sees_what_is_gone() -> None:
    def run() -> None:
        first = torch.empty(1000, dtype=torch.uint8)
        del first
        torch.empty(600, dtype=torch.uint8)

    assert allocator_peak(run) == 1000
