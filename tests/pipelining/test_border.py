"""A border keeps the count of messages, and lets go of what it sent once that is known to have arrived."""

from __future__ import annotations

from typing import Any, cast

import torch

from overlap.pipelining.border import StageBorder


class Noted:
    """A channel that notes what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log

    def __getattr__(self, call: str) -> Any:
        def note(microbatch: int, *_: Any) -> torch.Tensor:
            self._log.append(f"{self._name}.{call} {microbatch}")
            return torch.ones(1)

        return note


def border_with_log() -> tuple[StageBorder, list[str]]:
    log: list[str] = []
    ends = [cast(Any, Noted(name, log)) for name in ("arrivals", "returns", "departures", "gradients")]
    border = StageBorder(*ends)
    border.open = True
    return border, log


def test_a_backward_that_trains_on_both_sides() -> None:
    border, log = border_with_log()
    border.open_backward(2)
    border.await_gradient((None,), ())
    border.return_gradient((torch.ones(1),), ())
    border.close_backward((1,), first=False, last=False)
    assert log == ["gradients.take 2", "departures.settle 2", "returns.send 2"]


def test_a_backward_that_trains_on_no_side_keeps_the_count_whatever_the_one_before_did() -> None:
    border, log = border_with_log()
    border.open_backward(0)
    border.await_gradient((None,), ())
    border.return_gradient((torch.ones(1),), ())
    border.close_backward((1,), first=False, last=False)
    log.clear()
    border.open_backward(1)
    border.return_gradient((None,), ())
    border.close_backward((1,), first=False, last=False)
    assert log == ["gradients.take 1", "departures.settle 1", "returns.send_zeros 1"]


def test_the_ends_of_the_model_have_nobody_to_send_to() -> None:
    border, log = border_with_log()
    border.open_backward(0)
    border.close_backward((1,), first=True, last=True)
    assert log == []


def test_nothing_is_handed_over_outside_a_step() -> None:
    border, log = border_with_log()
    border.open = False
    state = torch.ones(1)
    assert border.receive(state) is state
    border.send(state)
    assert border.await_gradient((None,), ()) == (None,)
    assert border.return_gradient((state,), ()) == (None,)
    assert log == []
