"""Storages are seen when they are born and when they die, on real and on fake tensors."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from overlap import Program, ProgramBuilder
from overlap.chunk import ModelChunk
from overlap.ir import Op
from overlap.memory import StorageTracker, measure_step
from overlap.memory.tracker import OUTSIDE
from tests.memory.compare import none, uniform


@pytest.fixture(params=[nullcontext, FakeTensorMode], ids=["real", "fake"])
def tracker(request):
    with request.param(), StorageTracker() as active:
        yield active


def live_bytes(tracker: StorageTracker) -> int:
    return sum(storage.nbytes for storage in tracker.live.values())


def test_a_storage_lives_as_long_as_its_last_view(tracker) -> None:
    base = torch.zeros(4, 8)
    view = base[1, :2]
    assert live_bytes(tracker) == 4 * 8 * 4
    del base
    assert live_bytes(tracker) == 4 * 8 * 4
    del view
    assert live_bytes(tracker) == 0


def test_aliases_share_an_id_and_new_storages_do_not(tracker) -> None:
    one, two = torch.zeros(3), torch.zeros(3)
    assert tracker.ids_of([one, {"x": (one.view(3, 1), two)}, "text"]) == [0, 0, 1]


def test_ids_are_never_used_twice(tracker) -> None:
    ids = [tracker.ids_of(torch.zeros(5))[0] for _ in range(4)]
    assert ids == [0, 1, 2, 3]


def test_saved_tensors_count_until_backward(tracker) -> None:
    x = torch.ones(6).requires_grad_()
    x.grad = torch.zeros(6)
    y = (x.exp() * x).sum()
    before = live_bytes(tracker)
    y.backward()
    assert live_bytes(tracker) == before - 6 * 4, "exp's result was held by the graph alone"


def test_a_view_of_a_foreign_storage_stays_foreign() -> None:
    foreign = torch.ones(3, 5)
    with StorageTracker() as tracker:
        view = foreign.t().detach()
        assert tracker.ids_of(view) == [OUTSIDE]
        assert not tracker.live


def test_births_know_their_operation_and_the_slot_peak_its_temporaries() -> None:
    with StorageTracker() as tracker:
        outside = torch.zeros(100)
        assert tracker.slot_peak == 0
        tracker.current = Op.REPLAY
        inside = (torch.ones(10) + 1) * 2
        tracker.current = Op.CALL
        (key,) = tracker.ids_of(inside)
        assert tracker.live[key].born is Op.REPLAY
        assert tracker.live[tracker.ids_of(outside)[0]].born is Op.CALL
        assert tracker.slot_peak == 400 + 3 * 40 - 40, "ones dies when its sum exists"


def test_an_enlarged_storage_counts_in_full() -> None:
    with StorageTracker() as tracker:
        out = torch.empty(0)
        torch.add(torch.ones(7), 1, out=out)
        assert [storage.nbytes for storage in tracker.live.values()] == [28]


class Elementwise(nn.Module):
    """Kernels without temporaries of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(64)) for _ in range(4))

    def program(self) -> Program:
        b = ProgramBuilder()
        hidden = b.input("hidden")
        for index, weight in enumerate(self.weights):
            with b.layer(index):
                (hidden,) = b.compute("mix", Wave(weight), hidden, outputs=("hidden",), parameters=(weight,))
        (loss,) = b.compute("loss", torch.sum, hidden, outputs=("loss",))
        b.loss(loss)
        return b.build()


class Wave:
    """sin(tanh(x * weight))."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight).sin()


@pytest.mark.filterwarnings("ignore")  # the profiler's own
@pytest.mark.parametrize("recompute", [none, uniform(2)], ids=str)
def test_the_allocator_says_the_same(recompute) -> None:
    """An independent witness: torch's CPU allocator reports its own events."""
    chunk = ModelChunk(Elementwise(), recompute=recompute, order="plain")
    feeds = [{"hidden": torch.randn(100, 64)} for _ in range(3)]
    with torch.profiler.profile(profile_memory=True) as profiler:
        measured = measure_step(chunk, feeds)
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    gradients = 4 * 64 * 4
    assert peak == measured.in_slot_peak + gradients
