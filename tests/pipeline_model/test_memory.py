"""memory: the peaks of hand-made steps, each kind of number at its own peak."""

from __future__ import annotations

from overlap.pipeline_model.layout import ChunkHolds, Held
from overlap.pipeline_model.memory import Peak, peaks
from tests.pipeline_model.tools import schedule


def holds(inputs: int, eager: int, replayed: int, pending: int) -> ChunkHolds:
    return ChunkHolds(
        gap=Held(segment_inputs=inputs, layer_activations=eager),
        replayed=Held(layer_activations=replayed),
        pending=Held(layer_activations=pending),
    )


def peak(*ranks: str, held: ChunkHolds, stages: int = 1, microbatches: int = 2) -> Peak:
    made = schedule(*ranks, stages=stages, microbatches=microbatches)
    return peaks(made, [held] * stages, input_bytes=10, activation_bytes=100)[0]


def test_forwards_pile_up_and_backwards_replay() -> None:
    assert peak("0F0 0F1 0B0 0B1", held=holds(2, 1, 1, 1)) == Peak(
        inflight=2, segment_inputs=4, layer_activations=3, bytes=340
    )


def test_a_pair_holds_both_sides_at_once() -> None:
    one_by_one = peak("0F0 0B0 0F1 0B1", held=holds(1, 0, 1, 0))
    pair = peak("0F0 0F1;0B0 0B1", held=holds(1, 0, 1, 0))
    assert (one_by_one.inflight, pair.inflight) == (1, 2)
    assert (one_by_one.bytes, pair.bytes) == (110, 120)


def test_deferred_weight_gradients_keep_what_they_need() -> None:
    inside = peak("0F0 0F1 0I0 0I1 0W0 0W1", held=holds(1, 0, 2, 0))
    past = peak("0F0 0F1 0I0 0I1 0W0 0W1", held=holds(1, 0, 2, 2))
    assert (inside.layer_activations, past.layer_activations) == (2, 4)
    assert inside.inflight == past.inflight == 2


def test_all_is_given_back() -> None:
    """A second half that repeats the first does not raise the peak."""
    line = "0F{0} 0F{1} 0I{0} 0B{1} 0W{0}"
    once = peak(line.format(0, 1), held=holds(3, 2, 1, 4))
    twice = peak(f"{line.format(0, 1)} {line.format(2, 3)}", held=holds(3, 2, 1, 4), microbatches=4)
    assert once == twice


def test_each_rank_has_its_own() -> None:
    made = schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", microbatches=2)
    assert [p.segment_inputs for p in peaks(made, [holds(1, 0, 0, 0)] * 2)] == [2, 1]
