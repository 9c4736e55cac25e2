"""Storage facts of one stage: what each kind of slot allocates, aliases and holds. Data only; never imports torch.

A storage is named relative to the slot (`Ref`), so facts hold in every schedule that contains such a slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from overlap.ir import Op, StageKey
from overlap.lower import Issue
from overlap.memory.refs import Ref, Refs, Source
from overlap.memory.trace import NOTHING, Trace
from recompute.modules import RecomputeModule


@dataclass(frozen=True, slots=True)
class Kind:
    """What the facts of a slot depend on."""

    key: StageKey
    source: Source
    """FORWARD, BACKWARD or WGRAD."""
    graph: bool
    """FORWARD: whether a graph is kept. Else: whether the backward runs through one (and not by adjoint)."""
    pinned: bool
    """Whether the forward (for B and W: the one that made the graph) received pinned values."""
    parts: frozenset[RecomputeModule] = frozenset()
    """The parts of the stage that are rebuilt in its backward."""
    graph_only: bool = False
    """Whether the forward (for B and W: the one that made the graph) leaves out what it returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a slot computes, as its operators' shapes say."""

    flops: float
    """Floating-point operations of its matrix products."""
    traffic: float
    """Bytes that its operators read and write."""
    milliseconds: float
    """Sum over the operators of the longer of arithmetic and traffic, on a device model; 0 without one."""


NO_WORK = Work(flops=0.0, traffic=0.0, milliseconds=0.0)


Spans = tuple[tuple[int, int], ...]
"""Per tensor of a value, the elements that a copy of it elsewhere holds, and the bytes of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one slot leaves behind. Sizes in bytes."""

    born: tuple[int, ...]
    """Storages born here that outlive the slot."""
    writes: tuple[Refs, ...] = ()
    """FORWARD: per write."""
    tape: frozenset[Ref] = frozenset()
    """FORWARD with graph: what the tape holds."""
    gives: tuple[Refs | None, ...] = ()
    """BACKWARD, WGRAD: per read of the stage, the gradient piece that the table then has; None: no piece."""
    pending: frozenset[Ref] = frozenset()
    """BACKWARD with delayed weight gradients: the tensors that they wait with."""
    hidden: frozenset[Ref] = frozenset()
    """The same: what only their code holds (a tensor in a closure)."""
    trace: Trace = NOTHING
    """How live bytes move while the slot runs."""
    work: Work = NO_WORK
    """What the slot computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Storage facts of a whole program, for microbatches of one shape."""

    facts: Mapping[bool, Mapping[Kind, Facts]]
    """By the setting of `delay_wgrad`, under which graphs leave the weights out."""
    feeds: Mapping[str, tuple[int, ...]]
    """Bytes of a copy of each tensor in each feed."""
    spans: Mapping[StageKey, tuple[Spans, ...]]
    """Of what each stage writes."""
    snapshots: Mapping[StageKey, tuple[int, ...]]
    """Bytes of the copies of each stage's in-place state."""
    granule: int = 1
    """Bytes that the allocator rounds a request up to; all sizes here are rounded, those of `spans` are not."""


def forward_kind(issue: Issue) -> Kind:
    """The kind of an F, N or R slot."""
    return Kind(issue.stage.key, Source.FORWARD, issue.records, bool(issue.pinned), issue.parts, issue.graph_only)


def backward_kind(issue: Issue, made: Kind) -> Kind:
    """The kind of a B or W slot whose graph (if any) a forward of kind `made` recorded."""
    source = Source.WGRAD if issue.slot.op is Op.WGRAD else Source.BACKWARD
    return Kind(issue.stage.key, source, made.graph, made.pinned, made.parts, made.graph_only)
