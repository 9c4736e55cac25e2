"""The orientation formula, by hand."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from overlap.builder import ProgramBuilder
from overlap.chunk import ModelChunk
from overlap.memory import Bin, fake_chunk, formula, measure_step, take_footprint
from overlap.memory.facts import Footprint
from overlap.memory.formula import graph_bytes, input_bytes
from tests.memory.compare import block, decoder, none, tokens, uniform
from tests.overlap.programs import Own

LAYERS = 5
INPUT = 2 * 6 * 16 * 4


@cache
def footprint() -> Footprint:
    """Taken once; it does not depend on recompute."""
    with fake_chunk(lambda: decoder(layers=LAYERS, dense_layers=1)) as chunk:
        return take_footprint(chunk, tokens(1)[0], (False,))


def estimate(recompute, microbatches):
    """(bins, A) of a five-layer decoder."""
    chunk = decoder(recompute, layers=LAYERS, dense_layers=1)
    graph = max(graph_bytes(chunk.program, footprint().facts[False], layer) for layer in range(LAYERS))
    assert input_bytes(chunk.program, footprint(), footprint().facts[False], (1,)) == INPUT
    return formula(chunk, footprint(), microbatches), graph


@pytest.mark.parametrize(
    ("recompute", "microbatches", "inputs", "live", "rest"),
    [
        (uniform(1), 1, 5, 1, 0),
        (uniform(2), 4, 3 + 1, 2, 0),
        (uniform(8), 2, 1 + 1, 5, 0),
        (block(3), 2, 3 + 1, 1, 2 + 1),
        (none, 2, 0, 0, 5 + 1),
        ([none, uniform(1)], 2, 0, 0, 5 + 1),
    ],
    ids=str,
)
def test_formula(recompute, microbatches, inputs, live, rest) -> None:
    found, graph = estimate(recompute, microbatches)
    assert found.bins[Bin.SEGMENT_INPUTS] == inputs * INPUT
    assert found.bins[Bin.LIVE_SEGMENT] == live * graph
    assert found.bins[Bin.REST] == rest * graph
    assert found.bins[Bin.PINNED_ROUTING] == found.bins[Bin.PENDING_WGRAD] == found.bins[Bin.RNG_STATES] == 0
    assert found.total == found.as_json()["total"] == inputs * INPUT + (live + rest) * graph


def test_segment_inputs_are_exact_where_segments_have_one_input() -> None:
    recompute = uniform(1)
    found, _ = estimate(recompute, 2)
    peaks = measure_step(decoder(recompute, layers=LAYERS, dense_layers=1), tokens(2)).usage.peaks
    assert found.bins[Bin.SEGMENT_INPUTS] == peaks.bins[Bin.SEGMENT_INPUTS]


def test_feeds_that_a_segment_reads_count() -> None:
    """An MTP depth is replayed from the state of the layer before and from the ids, which are int64."""
    with fake_chunk(lambda: decoder(layers=1, dense_layers=1, mtp=1, mtp_dense=True)) as chunk:
        found = take_footprint(chunk, tokens(1)[0], (False,))
        assert input_bytes(chunk.program, found, found.facts[False], (1,)) == INPUT + 2 * 6 * 8


def split(module: Own, b: ProgramBuilder) -> None:
    x = b.input("x", needs_grad=True)
    with b.layer(0):
        halves = b.compute("attn", lambda x: (x * module.weight).split(4), x, outputs=("left", "right"),
                           parameters=(module.weight,))  # fmt: skip
    with b.layer(1):
        (loss,) = b.compute("attn", lambda left, right: (left * right).sum(), *halves, outputs=("loss",))
    b.loss(loss)


def test_storage_that_inputs_of_a_segment_share_counts_once() -> None:
    with fake_chunk(lambda: ModelChunk(Own(split, weight=torch.nn.Parameter(torch.ones(8))))) as chunk:
        found = take_footprint(chunk, {"x": torch.ones(8)}, (False,))
        assert input_bytes(chunk.program, found, found.facts[False], (1,)) == 8 * 4


def test_no_layers_no_bytes() -> None:
    with fake_chunk(lambda: decoder(uniform(1), layers=0)) as chunk:
        assert formula(chunk, take_footprint(chunk, tokens(1)[0], (False,)), 2).total == 0
