"""The vocabulary of a schedule: lanes, operations, slots, stages and the immutable program of one model chunk.

Owns data only. What order slots come in is orders/expand, what they need and free is lower, what runs is engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from overlap.declarations import NAME, check_program
from overlap.declared_kinds import check_fields
from overlap.errors import ScheduleError
from recompute.checks import check_kind
from recompute.modules import RecomputeModule

StageKey = tuple[int | None, str]
"""(layer, stage name); layer None: a stage of the chunk outside any layer, as `embed` and `head`."""

WEIGHTS = "weights"
"""The chunk's first stage, which writes the parameters that several stages read; its backward sums their uses."""


class Lane(Enum):
    """Where a stage's kernels run, one stream each on a GPU; COPY: segment inputs on their way out and back."""

    COMPUTE = "compute"
    COMM = "comm"
    P2P = "p2p"
    COPY = "copy"


SETTLING = (Lane.COMM, Lane.COPY)
"""Lanes that may wait for the compute lane between two plans: what they run next follows compute of its own plan, or is
the first input to return, which as any other follows what was computed before (keeping.py, NOTE, 3)."""


class Op(StrEnum):
    """What a slot does with its stage."""

    FORWARD = "F"
    """Forward that keeps its graph."""
    NO_GRAD = "N"
    """Forward without a graph: the first pass of a recomputed segment."""
    REPLAY = "R"
    """Forward again, with a graph, just before backward."""
    BACKWARD = "B"
    """Gradients of the inputs and, unless delayed, of the weights."""
    WGRAD = "W"
    """The delayed weight gradients."""
    STORE = "S"
    LOAD = "L"
    """Segment inputs that the stage wrote leave the device (S), and return before the replay that reads them (L)."""
    CALL = "X"
    """A call outside the model (a hook of the driver)."""


_SLOT = re.compile(rf"([FNRBWSLX])(\d+)(?:\.(\d+))?\.({NAME.pattern})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Slot:
    """One issue of one stage: `F0.3.dispatch`, or `B1.head` for a stage outside any layer."""

    op: Op
    microbatch: int
    layer: int | None
    stage: str

    @property
    def key(self) -> StageKey:
        """The stage this slot issues."""
        return (self.layer, self.stage)

    def __str__(self) -> str:
        layer = "" if self.layer is None else f".{self.layer}"
        return f"{self.op.value}{self.microbatch}{layer}.{self.stage}"

    @classmethod
    def parse(cls, text: str) -> Slot:
        """Read what `str(slot)` prints.

        Raises:
            ScheduleError: The text is no slot.
        """
        check_kind("text", text, str, "text")
        match = _SLOT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"{text!r} is no slot: write op, microbatch, layer, stage, as F0.3.dispatch")
        op, microbatch, layer, stage = match.groups()
        return cls(Op(op), int(microbatch), None if layer is None else int(layer), stage)


Schedule = tuple[Slot, ...]


def format_schedule(schedule: Iterable[Slot]) -> str:
    """Print a schedule, slots separated by blanks; `parse_schedule` reads it back."""
    return " ".join(str(slot) for slot in schedule)


def parse_schedule(text: str) -> Schedule:
    """Read slots separated by white space.

    Raises:
        ScheduleError: A word is no slot.
    """
    check_kind("text", text, str, "text")
    return tuple(Slot.parse(word) for word in text.split())


@runtime_checkable
class Trainable(Protocol):
    """What the planner needs of a parameter: whether it trains (R6)."""

    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Effect:
    """Something that happens once per microbatch when a step succeeds (R5): a counter, a logged loss.

    `apply(value)` receives what the first pass wrote; in microbatch order, then program order, however issued.
    """

    value: str
    apply: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class TwoForms:
    """A stage function that need not compute what nobody reads. One object: what wraps it has the one form again."""

    whole: Callable[..., Any]
    graph_only: Callable[..., Any]
    """Called alike, leaves the same graph, and returns tensors of the outputs' shapes and types without numbers."""

    def __post_init__(self) -> None:
        check_fields("two forms of a stage function", self, {})

    def __call__(self, *reads: Any, **keywords: Any) -> Any:
        """Call it whole."""
        return self.whole(*reads, **keywords)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One schedulable piece of a layer."""

    layer: int | None
    name: str
    lane: Lane
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    forward: Callable[..., Any]
    """`forward(*reads)` returns the value if there is one write, else a tuple, one per write. A stage with pins
    also receives `pinned=`: None in the first pass, in a replay the tuple of values that it pinned then. TwoForms: a
    replay whose outputs nobody reads calls the other one."""
    nondiff: frozenset[str] = frozenset()
    """Writes that carry no gradient (ids, splits, counts); they may be any Python object."""
    adjoint: Callable[..., Any] | None = None
    """`adjoint(grads, pinned)` gives a tuple, one gradient (or None) per read, without any activation (R8): `grads`
    holds one per write, `pinned` the pinned values among its reads, then those that the stage pinned itself. A stage
    that draws finds its generator as its forward found it."""
    wgrad: bool = False
    """The stage's weight gradients go through recompute.wgrad and may be delayed to a W slot."""
    pins: tuple[str, ...] = ()
    """Writes kept from the first pass and handed to the replay (R7)."""
    effects: tuple[Effect, ...] = ()
    state: tuple[Any, ...] = ()
    """Buffers that `forward` changes in place (running statistics, scales); a replay sees what the first pass saw."""
    draws_rng: bool = False
    parameters: tuple[Trainable, ...] = ()
    context: Callable[[], AbstractContextManager[object]] | None = None
    """Entered around `forward` in the first pass and in the replay alike (precision, R15)."""
    inner: frozenset[RecomputeModule] = frozenset()
    """Parts that `forward` can rebuild in its backward: it calls them through recompute.inner.rebuild."""
    sheds: tuple[int, ...] = ()
    """Places of reads that `forward`'s graph does not hold, since it keeps them otherwise (in 8 bits, R15): what was
    read is let go before backward. Never a weight. The gradients of its writes go as soon as they are used."""
    aliases: bool = False
    """What it writes that carries gradients, and what its adjoint gives, is memory that the compute lane allocated
    and it was given (R14). Each such write has one reader at most, on the compute lane: a sum would be its own."""

    @property
    def key(self) -> StageKey:
        """(layer, name)."""
        return (self.layer, self.name)

    @property
    def graph_only(self) -> Callable[..., Any] | None:
        """The other form of `forward`, if it has one."""
        return self.forward.graph_only if isinstance(self.forward, TwoForms) else None

    @property
    def allocates(self) -> Lane:
        """The lane whose memory the gradients are that it gives, and what it writes that carries some."""
        return Lane.COMPUTE if self.aliases else self.lane

    def owner(self, value: str) -> Lane:
        """The lane whose memory a value is that it writes: one without gradient is never passed on."""
        return self.lane if value in self.nondiff else self.allocates

    @property
    def label(self) -> str:
        """The stage as messages name it: `3.dispatch`."""
        return self.name if self.layer is None else f"{self.layer}.{self.name}"


@dataclass(frozen=True, slots=True)
class Input:
    """A value the caller feeds for every microbatch."""

    name: str
    needs_grad: bool = False


@dataclass(frozen=True, slots=True)
class Loss:
    """A scalar output that starts the backward pass with `weight` times the step's loss scale."""

    value: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """State that a step's slots add to in any order, and that moves on once, when the step succeeds (R5).

    It is at rest between steps. Slots may repeat what they do to it, in any order (a running maximum): no copy needed.
    """

    buffers: tuple[Any, ...]
    """What slots change: put back when a step fails, and after a run without backward."""
    advance: Callable[[], None]
    """Called once after a step that succeeded; brings `buffers` to rest."""


@dataclass(frozen=True, eq=False)
class Program:
    """The stages of one model chunk for one microbatch, in execution order. Immutable; checked at construction.

    Raises:
        ProgramError: A value is read before it is written, written twice, or a declaration names no value.
    """

    stages: tuple[Stage, ...]
    inputs: tuple[Input, ...]
    losses: tuple[Loss, ...] = ()
    outputs: tuple[str, ...] = ()
    """Values handed back to the caller for each microbatch, beside the losses."""
    mtp_layers: frozenset[int] = field(default=frozenset())
    first_layer: int = 0
    """Number of its first layer: a part of a pipeline keeps the whole model's numbers, which seed draws (R4)."""
    feed_checks: tuple[Callable[[Mapping[str, Any]], None], ...] = ()
    """Called with each microbatch's feeds before anything runs; they raise a ConfigError that names the feed."""
    step_states: tuple[StepState, ...] = ()
    _trained: dict[tuple[bool, ...], frozenset[StageKey]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        check_fields("program", self, _KINDS)
        for stage in self.stages:
            check_fields(f"stage {stage.label}", stage, _KINDS)
        effects = [effect for stage in self.stages for effect in stage.effects]
        for declared in (*self.inputs, *self.losses, *self.step_states, *effects):
            check_fields(type(declared).__name__.lower(), declared, _KINDS)
        check_program(self)

    @cached_property
    def by_key(self) -> dict[StageKey, Stage]:
        """Stages by (layer, name)."""
        return {stage.key: stage for stage in self.stages}

    @cached_property
    def position(self) -> dict[StageKey, int]:
        """Place of each stage in execution order."""
        return {stage.key: place for place, stage in enumerate(self.stages)}

    @cached_property
    def producers(self) -> dict[str, Stage]:
        """The stage that writes each value; inputs have none."""
        return {value: stage for stage in self.stages for value in stage.writes}

    @cached_property
    def readers(self) -> dict[str, tuple[Stage, ...]]:
        """The stages that read each value, in execution order."""
        readers: dict[str, list[Stage]] = {value: [] for value in self.producers}
        readers.update({source.name: [] for source in self.inputs})
        for stage in self.stages:
            for value in stage.reads:
                readers[value].append(stage)
        return {value: tuple(stages) for value, stages in readers.items()}

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layer numbers in execution order."""
        return tuple(dict.fromkeys(stage.layer for stage in self.stages if stage.layer is not None))

    @cached_property
    def layer_stages(self) -> dict[int, tuple[Stage, ...]]:
        """The stages of each layer, in execution order."""
        return {layer: tuple(s for s in self.stages if s.layer == layer) for layer in self.layers}

    @cached_property
    def prologue(self) -> tuple[Stage, ...]:
        """Stages of the chunk before its first layer (all of them when it has no layer)."""
        first = next((place for place, s in enumerate(self.stages) if s.layer is not None), len(self.stages))
        return self.stages[:first]

    @cached_property
    def epilogue(self) -> tuple[Stage, ...]:
        """Stages of the chunk after its last layer."""
        return tuple(stage for stage in self.stages[len(self.prologue) :] if stage.layer is None)

    def nondiff(self, value: str) -> bool:
        """Whether a value never carries a gradient."""
        stage = self.producers.get(value)
        return value in stage.nondiff if stage is not None else not self._input_grads[value]

    @cached_property
    def _input_grads(self) -> dict[str, bool]:
        return {source.name: source.needs_grad for source in self.inputs}

    def gradient_key(self, value: str) -> StageKey:
        """What trained() holds if gradients pass a written value: its stage, or (None, value) of a shared parameter."""
        key = self.producers[value].key
        return (None, value) if key == (None, WEIGHTS) else key

    def trained(self) -> frozenset[StageKey]:
        """Stages that take part in backward (R6): a trainable parameter, or an input that needs a gradient.

        With them the shared parameters that train, each by itself (gradient_key). Looked up at every call, since
        parameters may be frozen between steps; equal answers are one object.
        """
        flags = tuple([parameter.requires_grad for stage in self.stages for parameter in stage.parameters])
        if flags not in self._trained:
            self._trained[flags] = self._find_trained()
        return self._trained[flags]

    def _find_trained(self) -> frozenset[StageKey]:
        alive = {source.name for source in self.inputs if source.needs_grad}
        stages: set[StageKey] = set()
        for stage in self.stages:
            if any(p.requires_grad for p in stage.parameters) or any(value in alive for value in stage.reads):
                passed = _with_gradient(stage)
                stages.update((stage.key, *map(self.gradient_key, passed)))
                alive.update(passed)
        return frozenset(stages)

    def live_ins(self, layers: Iterable[int]) -> tuple[str, ...]:
        """Values that the stages of `layers` read and none of them writes, in order of first use."""
        stages = [stage for layer in layers for stage in self.layer_stages[layer]]
        written = {value for stage in stages for value in stage.writes}
        return tuple(dict.fromkeys(v for stage in stages for v in stage.reads if v not in written))


_KINDS = {
    kind.__name__: kind for kind in (Effect, Input, Lane, Loss, RecomputeModule, Stage, StepState, Trainable)
}  # fmt: skip
"""Classes that the fields of a Program and of what it holds name."""


def _with_gradient(stage: Stage) -> list[str]:
    """What a stage that trains writes with a gradient; of shared parameters those that train."""
    if stage.key == (None, WEIGHTS):
        return [value for value, p in zip(stage.writes, stage.parameters, strict=True) if p.requires_grad]
    return [value for value in stage.writes if value not in stage.nondiff]
