"""Whether memory that is still needed stays as it was: an observer that compares bytes, and engines that destroy some.

Going by name is not enough: a value that nobody reads any more may share its storage with one that a graph saved, or
with another value, and one gradient may be the share of several readers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlap import ModelChunk, Op
from overlap.check import same_bits
from overlap.engine import Engine, Feeds, MicrobatchState
from overlap.lower import Issue
from overlap.pieces import Piece
from tests.cases.model import Outcome, run

FORWARDS = (Op.NO_GRAD, Op.FORWARD, Op.REPLAY)
Name = tuple[str, int, Any]
"""What was noted: its kind, the microbatch, and the stage, value or share of a gradient that it belongs to."""


class Noted(NamedTuple):
    """A tensor and what it was when it was noted."""

    tensor: Tensor
    bits: Tensor
    nbytes: int

    def intact(self) -> bool:
        """Whether its storage has its size, and the tensor its bits; what has no storage left is not looked at."""
        return self.tensor.untyped_storage().nbytes() == self.nbytes and same_bits(self.tensor, self.bits)


def noted(tensor: Tensor) -> Noted:
    """Note a tensor as it is now."""
    tensor = tensor.detach()
    return Noted(tensor, tensor.clone(), tensor.untyped_storage().nbytes())


class Untouched:
    """Observer: at its use, everything has the storage and the bits that it had when it was made.

    `pack` is for torch's saved_tensors_hooks. Kinds of what is compared: `saved` by a stage's graph, before its B;
    the `gradient` shares that a B sums, before it; what is `pending` for a W, before it; each `value` before it is
    read.

    Attributes:
        faults: What was found different, by kind and stage.
        checks: Comparisons, by kind.
    """

    def __init__(self) -> None:
        self.faults: set[tuple[str, str]] = set()
        self.checks: Counter[str] = Counter()
        self._notes: dict[Name, list[Noted]] = {}
        self._records: Name | None = None

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        op, number = issue.slot.op, owner.number
        for key in (*issue.reads, *issue.pinned):
            self._compare(("value", number, key), issue)
        if op is Op.BACKWARD:
            self._use(("saved", number, issue.stage.key), issue)
            for piece in (piece for pieces in issue.pieces for piece in pieces):
                self._use(("gradient", number, piece), issue)
        elif op is Op.WGRAD:
            self._use(("pending", number, issue.stage.key), issue)
        else:
            self._records = ("saved", number, issue.stage.key)

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        self._records = None
        number, key = owner.number, issue.stage.key
        if issue.slot.op in FORWARDS:
            for value in issue.writes:
                if value is not None:
                    self._note(("value", number, value), [owner.values[value]])
        else:
            for piece in issue.gives:
                if piece is not None:
                    self._note(("gradient", number, piece), [owner.grads.get(piece)])
        if issue.slot.op is Op.BACKWARD and key in owner.pending:
            uses = owner.pending[key][0].pending
            self._note(("pending", number, key), [tensor for use in uses for tensor in use.tensors])
        for value in issue.frees:
            self._notes.pop(("value", number, value), None)

    def pack(self, tensor: Tensor) -> Tensor:
        """Take note of what a graph saves."""
        if self._records is not None:
            self._notes.setdefault(self._records, []).append(noted(tensor))
        return tensor

    def unused(self) -> list[Name]:
        """What was noted and never used."""
        return [*self._notes]

    def _note(self, name: Name, found: Iterable[Any]) -> None:
        if notes := [noted(item) for item in found if torch.is_tensor(item)]:
            self._notes[name] = notes

    def _use(self, name: Name, issue: Issue) -> None:
        self._compare(name, issue)
        self._notes.pop(name, None)

    def _compare(self, name: Name, issue: Issue) -> None:
        notes = self._notes.get(name, ())
        self.checks[name[0]] += len(notes)
        if not all(note.intact() for note in notes):
            self.faults.add((name[0], issue.stage.label))


def watched(chunk: ModelChunk, feeds: list[Feeds], engine_type: Any = Engine) -> tuple[Untouched, Outcome]:
    """One step of a copy of `chunk`: what was compared, and what the step left."""
    seen = Untouched()
    with torch.autograd.graph.saved_tensors_hooks(seen.pack, lambda tensor: tensor):
        return seen, run(chunk, feeds, observers=(seen,), engine_type=engine_type)


def poison(item: Any) -> None:
    """Destroy what a tensor holds as its allocator's next user would: behind the back of autograd."""
    if torch.is_tensor(item) and item.is_floating_point():
        item.data.fill_(float("nan"))


class FreesReads(Engine):
    """Control: in one layer, what a graph's forward reads last goes by name, whoever else has its storage."""

    def __init__(self, *args: Any, layer: int = 1, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._layer = layer

    def issue(self, issue: Issue, owner: MicrobatchState) -> None:
        records = issue.records and issue.slot.layer == self._layer and issue.slot.stage in ("attn", "experts")
        gone = [owner.values[key] for key in issue.frees if key in issue.reads] if records else []
        super().issue(issue, owner)
        for value in gone:
            poison(value)


class FreesGradients(Engine):
    """Control: the summed gradient of what a stage wrote goes with its backward, whoever else has it."""

    def __init__(self, *args: Any, only: str | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._only = only
        self._gone: list[Tensor | None] = []

    def _gradient(self, *args: Any) -> Tensor | None:
        total = super()._gradient(*args)
        self._gone.append(total)
        return total

    def issue(self, issue: Issue, owner: MicrobatchState) -> None:
        while self._gone:
            poison(self._gone.pop())
        super().issue(issue, owner)
        if self._only not in (None, issue.slot.stage):
            self._gone.clear()


class AddsInPlace(Engine):
    """Control: the gradient of a value is summed in the memory of its first share, whoever else has it."""

    def _gradient(
        self, seed: float | None, pieces: Sequence[Piece], value: str, owner: MicrobatchState
    ) -> Tensor | None:
        shares = [owner.grads[piece] for piece in pieces if piece in owner.grads]
        total = super()._gradient(seed, pieces, value, owner)
        if total is not None and len(shares) > 1:
            shares[0].data.copy_(total)
        return total
