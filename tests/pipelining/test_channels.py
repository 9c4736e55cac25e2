"""What a channel between ranks holds, and for how long; the messages themselves are tested on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from overlap.lanes import NullLanes
from overlap.pipelining.channels import Handover, Wire
from recompute.errors import RecomputeError

CPU = torch.device("cpu")


class Work:
    def __init__(self) -> None:
        self.waits = 0
        self.left = False

    def wait(self) -> None:
        self.waits += 1

    def is_completed(self) -> bool:
        return self.left


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """The handles of what was posted, in order."""
    posted: list[Work] = []

    def post(tensor: Tensor, **_: Any) -> Work:
        assert tensor.is_contiguous()
        posted.append(Work())
        return posted[-1]

    monkeypatch.setattr(dist, "isend", post)
    monkeypatch.setattr(dist, "irecv", post)
    return posted


def make_wire() -> Wire:
    return Wire(1, None, NullLanes(), torch.float32, CPU)


def test_a_message_is_held_until_it_has_left(works: list[Work]) -> None:
    wire = make_wire()
    for number in range(2):
        wire.send(number, torch.zeros(2, 3).T)
    works[0].left = True
    wire.send(2, torch.zeros(1))
    assert list(wire._sent) == [1, 2]
    wire.settle(1)
    wire.settle(1)
    wire.finish()
    assert not wire._sent
    assert [work.waits for work in works] == [0, 1, 1]


def test_a_receive_is_waited_for_when_it_is_taken(works: list[Work]) -> None:
    wire = make_wire()
    wire.expect(0, (2, 3))
    assert wire.coming(0).shape == (2, 3)
    assert works[0].waits == 0
    buffer = wire.take(0)
    assert (works[0].waits, wire.live, wire.peak) == (1, 1, 1)
    del buffer
    assert (wire.live, wire.peak) == (0, 1)


def test_after_a_failure_nothing_is_held_or_waited_for(works: list[Work]) -> None:
    wire = make_wire()
    wire.send(0, torch.zeros(1))
    wire.expect(1, (1,))
    wire.clear()
    assert wire.live == 0
    wire.finish()
    assert [work.waits for work in works] == [0, 0]
    handover = Handover(torch.float32, CPU)
    handover.send(0, torch.zeros(1))
    handover.clear()
    assert not handover._tensors


def test_another_type_than_the_receiver_expects_is_not_sent(works: list[Work]) -> None:
    with pytest.raises(RecomputeError, match=r"hands over torch\.float64, but torch\.float32 was announced"):
        make_wire().send(0, torch.zeros(1, dtype=torch.float64))
    assert not works
