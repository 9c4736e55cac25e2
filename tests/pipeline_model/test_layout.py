"""Layouts: layers over virtual stages, one object per different chunk, what a chunk's rule makes it hold."""

from __future__ import annotations

import pytest

from overlap.pipeline_model.layout import Held, cut, even_layout, holds_of, is_empty
from recompute import ConfigError, RecomputeConfig, Replay
from tests.pipeline_model.tools import system

uniform, block, none = RecomputeConfig.uniform, RecomputeConfig.block, RecomputeConfig.none


def test_layers_are_spread_evenly() -> None:
    assert even_layout(8, 4) == (2, 2, 2, 2)
    assert even_layout(11, 4) == (3, 3, 3, 2)
    with pytest.raises(ConfigError, match="layers=3: must be at least one per virtual stage: 4"):
        even_layout(3, 4)


def test_equal_chunks_are_one_object() -> None:
    chunks = cut(system(9, uniform(1)), (2, 2, 2, 1, 2))
    assert chunks[1] is chunks[2]
    assert len({id(chunk) for chunk in chunks}) == 4
    assert [[stage.name for stage in chunk.program.stages if stage.layer is None] for chunk in chunks] == [
        ["embed"], [], [], [], ["head"],
    ]  # fmt: skip
    assert [len(chunk.program.layers) for chunk in chunks] == [2, 2, 2, 1, 2]


def test_layouts_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"pp_layout=\(2, 2\): must add up to the model's layers: 3"):
        cut(system(3, none()), (2, 2))


def test_a_stage_may_be_empty() -> None:
    chunks = cut(system(2, uniform(1)), (0, 0, 2, 0))
    assert [is_empty(chunk) for chunk in chunks] == [False, True, False, False]
    assert [holds_of(chunk, defer_wgrad=True).gap for chunk in chunks] == [
        Held(), Held(), Held(segment_inputs=2), Held(),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("recompute", "gap", "replayed"),
    [
        (none(), Held(layer_activations=5), Held()),
        (uniform(2), Held(segment_inputs=3), Held(layer_activations=2)),
        (uniform(2, replay=Replay.HIDDEN), Held(segment_inputs=3), Held(layer_activations=4)),
        (block(3), Held(segment_inputs=3, layer_activations=2), Held(layer_activations=1)),
    ],
    ids=str,
)
def test_what_a_chunk_holds(recompute: RecomputeConfig, gap: Held, replayed: Held) -> None:
    chunk = system(5, recompute)
    inside, past = (holds_of(chunk, defer_wgrad=defer) for defer in (False, True))
    assert (inside.gap, inside.replayed) == (past.gap, past.replayed) == (gap, replayed)
    assert inside.pending == Held(layer_activations=gap.layer_activations)
    assert past.pending == Held(layer_activations=5)
