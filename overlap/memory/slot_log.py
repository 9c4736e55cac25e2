"""SlotLog: what one slot of a dry run does: births and deaths in order, arithmetic, traffic."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from overlap.memory.device_model import DeviceModel
from overlap.memory.facts import NO_WORK, Work
from overlap.memory.inside import ON_CPU, Inside
from overlap.memory.refs import OUTSIDE_REF, Ref
from overlap.memory.trace import Trace, make_trace
from overlap.memory.tracker import OUTSIDE, tensors_of

_WITHIN = -2
"""Id of what an operator allocates and frees within itself."""
Flops = Callable[..., int]


class SlotLog:
    """Told by a tracker what happens; read by a dry run after each slot.

    Args:
        device: Turns work into milliseconds; None: they stay 0.
        inside: What operators allocate and free within themselves.
    """

    def __init__(self, device: DeviceModel | None = None, inside: Inside = ON_CPU) -> None:
        self._device = device
        self._inside = inside
        self._events: list[tuple[int, int]] = []
        self._ends: list[tuple[int, int]] = []
        """Of each operator: how many nodes graphs had when it ran, and how many events there were after it."""
        self._first = OUTSIDE
        """Storage of the first gradient of a sum, until the next operator runs."""
        self._sum = 0
        """The event at which that sum was born."""
        self._work = NO_WORK

    def start(self) -> None:
        """A slot begins."""
        self._events = []
        self._ends = []
        self._first = OUTSIDE
        self._work = NO_WORK

    def changed(self, key: int, nbytes: int) -> None:
        """A storage was born or grew by so many bytes, or died (negative)."""
        if nbytes < 0 and key == self._first:
            # Nobody else held it: on tensors with data autograd adds into it.
            self._events.insert(self._sum, (key, nbytes))
            self._ends[-1] = (self._ends[-1][0], len(self._events))
        else:
            self._events.append((key, nbytes))

    def ran(self, func: Any, args: Sequence[Any], keywords: Mapping[str, Any], result: Any, *, allocates: bool) -> None:
        """An operator ran; a view does no work."""
        nbytes = self._inside[func](*args, **keywords) if func in self._inside else 0
        if nbytes:
            self._events += [(_WITHIN, nbytes), (_WITHIN, -nbytes)]
        self._first = OUTSIDE
        self._ends.append((torch._C._autograd._get_sequence_nr(), len(self._events)))
        if self._device is None or not (allocates or func._schema.is_mutable):
            return
        formula: Flops | None = flop_registry.get(func.overloadpacket)
        flops = 0.0 if formula is None else float(formula(*args, **keywords, out_val=result))
        # One that returns nothing reads and writes its first argument, and works in the type of the others.
        changed = args[0] if result is None else result
        traffic = float(sum(t.numel() * t.element_size() for t in tensors_of((args, keywords, changed))))
        self._work = Work(
            flops=self._work.flops + flops,
            traffic=self._work.traffic + traffic,
            milliseconds=self._work.milliseconds
            + self._device.milliseconds(flops, traffic, _dtype((result, args[1:]))),
        )

    def summed(self, key: int) -> None:
        """The operator that ran last was autograd's sum of two gradients; the first lies in this storage."""
        if any(born == key and nbytes > 0 for born, nbytes in self._events):
            self._first, self._sum = key, len(self._events) - 1

    def made_by(self, node: int) -> None:
        """The last event was the birth of a constant: it belongs behind the operator whose node has this number."""
        event = self._events.pop()
        operator = bisect_right(self._ends, node, key=lambda end: end[0])
        place = self._ends[operator][1]
        self._events.insert(place, event)
        later = ((nodes, events + 1) for nodes, events in self._ends[operator:])
        self._ends[operator:] = later

    def work(self) -> Work:
        """Of the slot so far."""
        return self._work

    def trace(self, names: Mapping[int, Ref]) -> Trace:
        """Of the slot so far.

        Args:
            names: Of the storages that went in; all others are the slot's own.
        """
        born = {key for key, nbytes in self._events if nbytes > 0}
        inside = {key: ref for key, ref in names.items() if key not in born and ref != OUTSIDE_REF}
        return make_trace((0, inside[key]) if key in inside else (nbytes, None) for key, nbytes in self._events)


def _dtype(result: Any) -> torch.dtype:
    found = tensors_of(result)
    return found[0].dtype if found else torch.float32
