"""The oracle beside a GPU, slot by slot: where a prediction leaves the measurement, and by which tensors.

Short text for the console; every slot is in the result file.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.memory.cases import MICROBATCHES, NONE, Case, hidden
from benchmarks.memory.measure import Bench
from benchmarks.memory.oracle import Oracle
from overlap.engine import MicrobatchState
from overlap.ir import Op
from overlap.lower import Issue
from overlap.memory import StorageTracker, gaps_of
from overlap.memory.bins import Storage
from overlap.memory.gap import slot_text
from overlap.memory.predict import Walk, WalkedSlot
from overlap.planning.survey import CUDA_BLOCK
from overlap.step import step_plans, train_step
from recompute import RecomputeConfig

_MIB = 2**20
_UNIFORM = RecomputeConfig.uniform(1)
CASES = (
    Case(proxy="proxy-8", recompute=NONE),
    Case(proxy="proxy-8", recompute=hidden(_UNIFORM)),
    Case(proxy="proxy-8", recompute=_UNIFORM, order="single_queue", delay_wgrad=True),
)
_SLOTS, _TENSORS = 15, 8
"""Lines of text for each case."""
Tensors = Counter[tuple[Op, int]]
"""How many live storages there are of each birth and size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Bytes of one slot."""

    slot: str
    top: int
    """Highest point while it runs."""
    end: int
    """When it has run, before its frees."""


class LevelRecorder:
    """Observer: what the caching allocator gave out, above what was there before the step."""

    def __init__(self, base: int) -> None:
        self.levels: list[Level] = []
        self._base = base

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        """A slot begins."""
        torch.cuda.reset_peak_memory_stats()

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        """It has ended."""
        top, end = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        self.levels.append(Level(slot=slot_text(issue, owner.number), top=top - self._base, end=end - self._base))


class TensorRecorder:
    """Observer: the live storages at the end of every slot."""

    def __init__(self, tracker: StorageTracker) -> None:
        self.borders: list[Tensors] = []
        self._tracker = tracker

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        """Births belong to this slot from now on."""
        self._tracker.current = issue.slot.op

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        """Count what is alive."""
        self._tracker.current = Op.CALL
        self.borders.append(count(dict(self._tracker.live).values()))


class TensorWalk(Walk):
    """Notes the predicted storages at the end of every slot; `borders` as the recorder's."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.borders: list[Tensors] = []

    def _end(self, name: str, slot: WalkedSlot, start: int) -> None:
        super()._end(name, slot, start)
        self.borders.append(count(self._ledger.alive()))


def count(storages: Iterable[Storage]) -> Tensors:
    """By birth and size."""
    return Counter((storage.born, storage.nbytes) for storage in storages)


def slots() -> list[dict[str, Any]]:
    """Measure and predict every slot of a few cases; needs a GPU."""
    oracle, bench = Oracle("proxy-8"), Bench("proxy-8")
    rows: list[dict[str, Any]] = []
    for case in CASES:
        walk = _walk(oracle, case, 1)
        walk.run(step_plans(oracle.chunk(case), MICROBATCHES))
        predicted = levels(oracle, case)
        measured = _measured_levels(bench, case)
        rows += _rows(case.name, measured, predicted)
        print(case.name)
        print("\n".join(slot_lines(measured, predicted)))
        print(
            "\n".join(tensor_lines([level.slot for level in predicted], _measured_tensors(bench, case), walk.borders))
        )
        print(_requested(bench, case), flush=True)
    return rows


def levels(oracle: Oracle, case: Case) -> list[Level]:
    """Predicted, each allocation rounded up to 512 bytes."""
    walk = _walk(oracle, case, CUDA_BLOCK)
    usage = walk.run(step_plans(oracle.chunk(case), MICROBATCHES))
    return [
        Level(slot=top.slot, top=top.bytes, end=border.total)
        for top, border in zip(walk.tops, usage.curve, strict=True)
    ]


def slot_lines(measured: Sequence[Level], predicted: Sequence[Level]) -> Iterator[str]:
    """Of each kind of slot the one whose highest point is predicted worst, worst first.

    `inside` is the part of its error that the slot before did not leave behind.
    """
    worst: dict[str, tuple[int, int]] = {}
    for place, (left, right) in enumerate(zip(measured, predicted, strict=True)):
        assert left.slot == right.slot
        kind = f"{left.slot[0]}.{left.slot.rpartition('.')[2]}"
        worst[kind] = max(worst.get(kind, (-1, 0)), (abs(right.top - left.top), place))
    for _, place in sorted(worst.values(), reverse=True)[:_SLOTS]:
        left, right = measured[place], predicted[place]
        before = predicted[place - 1].end - measured[place - 1].end if place else 0
        inside = right.top - left.top - before
        tops, ends = (f"{x / _MIB:7.1f} {y / _MIB:7.1f}" for x, y in ((left.top, right.top), (left.end, right.end)))
        yield f"  {left.slot:16s} top {tops}  end {ends}  inside {inside / _MIB:+7.2f}"


def tensor_lines(names: Sequence[str], measured: Sequence[Tensors], predicted: Sequence[Tensors]) -> Iterator[str]:
    """At the border where most bytes differ, what differs: birth, size, how many are measured and predicted."""
    gaps = [_differences(left, right) for left, right in zip(measured, predicted, strict=True)]
    place = max(range(len(gaps)), key=lambda place: sum(nbytes for nbytes, _ in gaps[place]))
    yield f"  tensors that differ after {names[place]}: {len(gaps[place])} kinds"
    for _, (born, size) in gaps[place][:_TENSORS]:
        here, there = (tensors[place][born, size] for tensors in (measured, predicted))
        yield f"    born in {born.value} {size / _MIB:9.4f} MiB: measured {here}, predicted {there}"


def _differences(left: Tensors, right: Tensors) -> list[tuple[int, tuple[Op, int]]]:
    """Bytes by which a kind of storage differs, most first."""
    found = [(abs(left[kind] - right[kind]) * kind[1], kind) for kind in left.keys() | right.keys()]
    return sorted((gap for gap in found if gap[0]), key=lambda gap: (-gap[0], gap[1]))


def _walk(oracle: Oracle, case: Case, granule: int) -> TensorWalk:
    gaps = gaps_of(oracle.chunk(case), MICROBATCHES)
    found = [oracle.footprints[granule]] * MICROBATCHES
    return TensorWalk(found, gaps, delayed=case.delay_wgrad, streams=True)


def _measured_levels(bench: Bench, case: Case) -> list[Level]:
    step = bench.step_of(case)
    step()
    step()
    torch.cuda.synchronize()
    gc.collect()
    recorder = LevelRecorder(torch.cuda.memory_allocated())
    train_step(bench.chunk(case), bench.feeds, observers=(recorder,))
    return recorder.levels


def _measured_tensors(bench: Bench, case: Case) -> list[Tensors]:
    with StorageTracker() as tracker:
        recorder = TensorRecorder(tracker)
        train_step(bench.chunk(case), bench.feeds, observers=(recorder,))
    return recorder.borders


def _requested(bench: Bench, case: Case) -> str:
    """What the allocator gave out beyond what was asked for: parts of blocks that it did not split."""
    before = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    bench.step_of(case)()
    after = torch.cuda.memory_stats()
    given, asked = (
        (after[f"{kind}_bytes.all.peak"] - before[f"{kind}_bytes.all.current"]) / _MIB
        for kind in ("allocated", "requested")
    )
    return f"  peak given out {given:.1f} MiB, asked for {asked:.1f} MiB"


def _rows(name: str, measured: Sequence[Level], predicted: Sequence[Level]) -> list[dict[str, Any]]:
    return [
        {
            "name": f"{name}: {left.slot}",
            "top": left.top / _MIB,
            "predicted_top": right.top / _MIB,
            "end": left.end / _MIB,
            "predicted_end": right.end / _MIB,
        }
        for left, right in zip(measured, predicted, strict=True)
    ]
