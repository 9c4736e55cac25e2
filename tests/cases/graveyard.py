"""What lives, and what must not: tensors and their bytes, containers, weak references to all that a step makes.

References go to storages: another tensor than the one that was seen may show the same memory.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from overlap import ModelChunk, Op
from overlap.engine import Engine, Feeds, MicrobatchState
from overlap.lower import Issue
from recompute.tape import Tape
from tests.cases.model import Box, Watcher, saved_tensors

FORWARDS = (Op.NO_GRAD, Op.FORWARD, Op.REPLAY)
LAST = {"attn", "head"}
"""Stages whose backward is their layer's last, or the head's."""
Place = int | str
"""A layer, or the name of a stage outside layers."""


def live_tensors() -> list[Tensor]:
    """All that Python knows, but for what was frozen."""
    return [item for item in gc.get_objects() if issubclass(type(item), Tensor)]


def live_bytes() -> int:
    """Bytes of all storages that a Python tensor shows."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in live_tensors()}
    return sum(storages.values())


def containers() -> dict[str, int]:
    """Sizes of all containers at module level of the two packages, function caches included."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("recompute", "overlap"):
            for name, item in vars(module).items():
                if isinstance(item, dict | list | set) and not name.startswith("__"):
                    found[f"{module_name}.{name}"] = len(item)
                elif hasattr(item, "cache_parameters"):  # functools
                    found[f"{module_name}.{name}"] = item.cache_info().currsize
    return found


class Graveyard(Watcher):
    """Observer: nothing of a layer, or of the head, lives at the first slot after its last backward.

    Args:
        chunk: What runs; its parameters and buffers may be saved and live on.
        feeds: The same.

    Attributes:
        values: Storages of values, by microbatch, name and generation.
        boxes: Of tensors that graphs saved, by microbatch and place; all are dead when the graphs are.
        saved: Storages of these.
        failures: What lived: microbatch, place and what it is.
        checked: Microbatches and places that were looked at.
    """

    def __init__(self, chunk: ModelChunk, feeds: Sequence[Feeds]) -> None:
        super().__init__(self._note)
        lasting = (*chunk.parameters(), *chunk.buffers(), *(value for feed in feeds for value in feed.values()))
        self._lasting = {tensor.untyped_storage().data_ptr() for tensor in lasting}
        self._done: tuple[int, Place] | None = None
        self.values: dict[tuple[int, str, int], weakref.ref[UntypedStorage]] = {}
        self.boxes: dict[tuple[int, Place], list[weakref.ref[Box]]] = {}
        self.saved: dict[tuple[int, Place], list[weakref.ref[UntypedStorage]]] = {}
        self.failures: list[tuple[int, Place, str]] = []
        self.checked: list[tuple[int, Place]] = []

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        if self._done is not None:
            self._check(*self._done)
            self._done = None
        super().before(issue, owner)
        if issue.slot.op is Op.BACKWARD and issue.stage.name in LAST:
            self._done = (owner.number, place_of(issue.stage.layer, issue.stage.name))

    def save(self, box: Box) -> None:
        """Take note of what a graph saves."""
        if self.slot is not None:
            _, microbatch, layer, name = self.slot
            place = microbatch, place_of(layer, name)
            self.boxes.setdefault(place, []).append(weakref.ref(box))
            storage = box.tensor.untyped_storage()
            if storage.data_ptr() not in self._lasting:
                self.saved.setdefault(place, []).append(weakref.ref(storage))

    def _note(self, issue: Issue, owner: MicrobatchState) -> None:
        if issue.slot.op in FORWARDS:
            for key in issue.writes:
                # Losses are handed back to the caller; they are not intermediates.
                if key is not None and torch.is_tensor(owner.values[key]) and key[0] not in owner.outputs:
                    self.values[(owner.number, *key)] = weakref.ref(owner.values[key].untyped_storage())

    def _check(self, microbatch: int, place: Place) -> None:
        self.checked.append((microbatch, place))
        at = microbatch, place
        for what, refs in (("saved tensors", self.boxes.get(at, ())), ("saved storages", self.saved.get(at, ()))):
            if count := sum(ref() is not None for ref in refs):
                self.failures.append((*at, f"{count} {what}"))
        prefix = "3.hidden" if place == "head" else f"{place}."
        for (number, name, _), ref in self.values.items():
            # counts are kept for the effect, which is applied when the step succeeds
            counts = name.endswith(".counts")
            if number == microbatch and name.startswith(prefix) and not counts and ref() is not None:
                self.failures.append((microbatch, place, name))


def place_of(layer: int | None, name: str) -> Place:
    """Where a stage is."""
    return name if layer is None else layer


def buried(
    step: Callable[..., object], chunk: ModelChunk, feeds: Sequence[Feeds], engine_type: Callable[..., Engine] = Engine
) -> Graveyard:
    """One step, watched."""
    grave = Graveyard(chunk, feeds)
    with saved_tensors(grave.save):
        step(chunk, feeds, observers=(grave,), engine_type=engine_type)
    return grave


class Keeps(Engine):
    """Control: something of every backward lives until the next step.

    Args:
        kept: Where it is kept.
        what: What is kept of a tape.
    """

    def __init__(self, kept: list[Any], what: Callable[[Tape], list[Any]], *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        kept.clear()
        self._kept = kept
        self._what = what

    def _backward(self, issue: Issue, owner: MicrobatchState) -> None:
        if issue.stage.key in owner.tapes:
            self._kept += self._what(owner.tapes[issue.stage.key])
        super()._backward(issue, owner)


def reads_of(tape: Tape) -> list[Tensor]:
    """What a graph read, in tensors of their own that show the same storages."""
    return [leaf.detach() for leaf in tape.leaves if torch.is_tensor(leaf)]
