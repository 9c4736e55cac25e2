"""Estimates (kind EST): what the oracle says of a MoE model, and of bigger groups."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap import ModelChunk, Program, ProgramBuilder
from overlap.memory import fake_chunk, measure_peak, take_footprint
from overlap.memory.facts import Footprint
from overlap.memory.formula import formula
from overlap.memory.oracle import highest_of
from tests.cases.model import NONE, U, make_chunk, make_feeds

KNOBS: dict[str, dict[str, Any]] = {
    "base": {"topk": 1, "shared_width": 0},
    "topk": {"topk": 2, "shared_width": 0},
    "shared": {"topk": 1, "shared_width": 24},
    "dense": {"topk": 1, "shared_width": 0, "dense_layers": 2},
    "dense, other experts": {"topk": 2, "experts": 8, "expert_width": 48, "dense_layers": 2},
}


@cache
def footprint(knob: str) -> Footprint:
    with fake_chunk(lambda: make_chunk(layers=2, **KNOBS[knob])) as chunk:
        return take_footprint(chunk, make_feeds(1)[0], (False,), constants=True)


def estimate(chunk: ModelChunk, knob: str) -> int:
    return highest_of(chunk, [footprint(knob)] * 2).bytes


@pytest.mark.parametrize("rule", [NONE, U(1)], ids=str)
def test_every_knob_of_a_moe_model_is_in_the_estimate(rule) -> None:
    """Row 67: to the byte, so with the right sign; a dense model does not change with its experts' settings."""
    found = {}
    for knob, changes in KNOBS.items():
        chunk = make_chunk(rule, layers=2, **changes)
        found[knob] = estimate(chunk, knob)
        assert found[knob] == measure_peak(chunk, make_feeds(2))
    assert found["base"] < min(found["topk"], found["shared"])
    assert found["dense"] == found["dense, other experts"]
    assert found["dense"] != found["base"]


class Thin(nn.Module):
    """Eight layers that keep little beside their input: bigger groups then help, up to a point."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))

    def program(self) -> Program:
        b = ProgramBuilder()
        hidden = b.input("hidden")
        (hidden,) = b.compute("embed", torch.clone, hidden, outputs=("embedded",))
        for index, layer in enumerate(self.layers):
            with b.layer(index):

                def forward(x: Tensor, layer: nn.Module = layer) -> Tensor:
                    return torch.tanh(layer(x))

                (hidden,) = b.compute("attn", forward, hidden, outputs=("hidden",), parameters=layer.parameters())
        (loss,) = b.compute("head", torch.sum, hidden, outputs=("loss",))
        b.loss(loss)
        return b.build()


def test_peak_over_the_group_size_has_its_minimum_inside() -> None:
    """Row 69: falls, then rises, as the formula does, and to the byte as the plan says."""
    feeds = [{"hidden": torch.randn(256, 64)} for _ in range(2)]
    with fake_chunk(lambda: ModelChunk(Thin())) as chunk:
        found = take_footprint(chunk, {"hidden": torch.randn(256, 64)}, (False,), constants=True)
    measured, textbook = {}, {}
    for group in (1, 2, 4, 8):
        chunk = ModelChunk(Thin(), recompute=U(group))
        measured[group] = measure_peak(chunk, feeds)
        assert measured[group] == highest_of(chunk, [found] * 2).bytes
        textbook[group] = formula(chunk, found, 2).total
    for peaks in (measured, textbook):
        smallest = min(peaks, key=lambda group: peaks[group])
        assert smallest not in (1, 8)
        assert peaks[1] > peaks[smallest] < peaks[8]
    assert sorted(measured, key=lambda g: measured[g]) == sorted(textbook, key=lambda g: textbook[g])


def test_one_group_of_all_layers_costs_what_no_recompute_costs() -> None:
    """Row 69: a replay of all layers holds all graphs."""
    kept, redone = (measure_peak(make_chunk(rule, layers=2), make_feeds(1)) for rule in (NONE, U(2)))
    assert 0.9 < redone / kept < 1.1
