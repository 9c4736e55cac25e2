"""Slot by slot: the worst of each kind first, and which tensors make the difference."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from benchmarks.memory.slots import Level, TensorRecorder, TensorWalk, slot_lines, tensor_lines
from overlap.ir import Op
from overlap.memory import StorageTracker, fake_chunk, footprints_of, gaps_of, zero_gradients
from overlap.step import step_plans, train_step
from tests.memory.compare import decoder, tokens, uniform

MIB = 2**20
LEVELS = [
    Level(slot=f"{op}0.{layer}.{stage}", top=8 * MIB, end=4 * MIB)
    for op, layer, stage in (("N", 0, "attn"), ("N", 1, "attn"), ("B", 1, "experts"), ("B", 0, "experts"))
]


def test_the_worst_slot_of_each_kind() -> None:
    predicted = [*LEVELS]
    predicted[1] = replace(LEVELS[1], top=9 * MIB, end=6 * MIB)
    predicted[2] = replace(LEVELS[2], top=15 * MIB)
    first, second = slot_lines(LEVELS, predicted)
    assert first.split() == ["B0.1.experts", "top", "8.0", "15.0", "end", "4.0", "4.0", "inside", "+5.00"]
    assert second.split()[0] == "N0.1.attn"
    assert second.endswith("+1.00")


def test_the_border_with_most_bytes_that_differ() -> None:
    few, many = Counter({(Op.REPLAY, 3 * MIB): 2}), Counter({(Op.REPLAY, 3 * MIB): 2, (Op.FORWARD, MIB): 4})
    head, *rest = tensor_lines(["one", "two", "three"], [few, few, many], [few, many, few + few])
    assert head.split(" after ")[1] == "three: 2 kinds"
    assert [line.split() for line in rest] == [
        ["born", "in", "R", "3.0000", "MiB:", "measured", "2,", "predicted", "4"],
        ["born", "in", "F", "1.0000", "MiB:", "measured", "4,", "predicted", "0"],
    ]


def test_both_sides_count_the_same_tensors() -> None:
    """On a CPU, where the prediction is exact."""
    feeds, chunk = tokens(2), decoder(uniform(1), layers=1)
    zero_gradients(chunk)
    with StorageTracker() as tracker:
        recorder = TensorRecorder(tracker)
        train_step(chunk, feeds, observers=(recorder,))
    with fake_chunk(lambda: decoder(uniform(1), layers=1)) as fake:
        walk = TensorWalk(footprints_of(fake, feeds), gaps_of(fake, 2), delayed=False)
        walk.run(step_plans(fake, 2))
    assert recorder.borders == walk.borders
    assert any(recorder.borders)
