"""StageBorder: what a virtual stage's program calls to hand over and to wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from overlap.ir import Lane
from overlap.pipelining.channels import Channel


class StageBorder:
    """The four channels of a virtual stage; see overlap.model.cut.Border.

    A plan runs forward of at most one microbatch of a stage and backward of at most one: `forward` and `backward` say
    which. The stages before and after count on one message for each microbatch and direction, whatever trains.

    Args:
        arrivals: States from the stage before.
        returns: Their gradients, back to it.
        departures: States for the stage after.
        gradients: Their gradients, from it.
    """

    def __init__(self, arrivals: Channel, returns: Channel, departures: Channel, gradients: Channel) -> None:
        self.arrivals = arrivals
        self.returns = returns
        self.departures = departures
        self.gradients = gradients
        self.forward = 0
        self.backward = 0
        self.open = False
        """Whether a step runs; outside one, as when the stages are checked, nothing is handed over."""
        self._returned = False
        self._awaited = False

    @property
    def channels(self) -> tuple[Channel, ...]:
        """All four."""
        return (self.arrivals, self.returns, self.departures, self.gradients)

    @property
    def lane_in(self) -> Lane:
        """Lane of the stage `recv`."""
        return self.arrivals.lane

    @property
    def lane_out(self) -> Lane:
        """Lane of the stage `send`."""
        return self.departures.lane

    def receive(self, arriving: Tensor) -> Tensor:
        """Stage `recv`: wait until the state has arrived."""
        if self.open:
            self.arrivals.take(self.forward)
        return arriving

    def return_gradient(self, grads: Sequence[Tensor | None], pinned: Sequence[Any]) -> tuple[None]:
        """Adjoint of `recv`: send the state's gradient back."""
        (gradient,) = grads
        if gradient is not None and self.open:
            self.returns.send(self.backward, gradient)
            self._returned = True
        return (None,)

    def send(self, state: Tensor) -> tuple[()]:
        """Stage `send`: send the state on."""
        if self.open:
            self.departures.send(self.forward, state)
        return ()

    def await_gradient(self, grads: Sequence[Tensor | None], pinned: Sequence[Any]) -> tuple[Tensor | None]:
        """Adjoint of `send`: wait for the state's gradient, which proves that the state has arrived."""
        if not self.open:
            return (None,)
        gradient = self.gradients.take(self.backward)
        self.departures.settle(self.backward)
        self._awaited = True
        return (gradient,)

    def open_backward(self, microbatch: int) -> None:
        """Backward of this microbatch runs next."""
        self.backward = microbatch
        self._returned = self._awaited = False

    def close_backward(self, shape: Sequence[int], *, first: bool, last: bool) -> None:
        """Backward has run: keep the count of messages where nothing trained on one side of the border.

        Args:
            shape: Of the state.
            first: Whether there is no stage before.
            last: Whether there is none after.
        """
        if not last and not self._awaited:
            self.gradients.take(self.backward)
            self.departures.settle(self.backward)
        if not first and not self._returned:
            self.returns.send_zeros(self.backward, shape)
