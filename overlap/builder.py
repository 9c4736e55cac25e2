"""ProgramBuilder: write a model chunk straight-line and get its Program.

Owns the naming of values. Knows nothing of tensors: the functions it is given run later, in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from overlap.errors import ProgramError
from overlap.ir import WEIGHTS, Effect, Input, Lane, Loss, Program, Stage, StepState, Trainable, TwoForms
from recompute.modules import RecomputeModule


@dataclass(frozen=True, slots=True)
class Value:
    """Handle of a value that a stage writes or the caller feeds."""

    name: str


class ProgramBuilder:
    """Collects stages in execution order.

    >>> b = ProgramBuilder()
    >>> hidden = b.input("hidden", needs_grad=True)
    >>> with b.layer(0):
    ...     (out,) = b.compute("attn", abs, hidden, outputs=("out",))
    >>> b.build(outputs=(out,)).stages[0].label
    '0.attn'
    """

    def __init__(self, *, first_layer: int = 0) -> None:
        self._first_layer = first_layer
        self._stages: list[Stage] = []
        self._inputs: list[Input] = []
        self._losses: list[Loss] = []
        self._shared: dict[str, Trainable] = {}
        self._registered: dict[str, Callable[[], Any]] = {}
        self._mtp: set[int] = set()
        self._feed_checks: list[Callable[[Mapping[str, Any]], None]] = []
        self._step_states: list[StepState] = []
        self._layer: int | None = None
        self._context: Callable[[], AbstractContextManager[object]] | None = None

    def input(self, name: str, *, needs_grad: bool = False) -> Value:
        """Declare a value that the caller feeds for every microbatch."""
        self._inputs.append(Input(name, needs_grad))
        return Value(name)

    def check_feeds(self, check: Callable[[Mapping[str, Any]], None]) -> None:
        """Have every microbatch's feeds checked before a step; `check` raises a ConfigError that names the feed."""
        self._feed_checks.append(check)

    def step_state(self, state: StepState) -> None:
        """Declare state that moves on once per step."""
        self._step_states.append(state)

    def parameter(self, name: str, parameter: Trainable, registered: Callable[[], Any] | None = None) -> Value:
        """Make a parameter that several stages read (a tied embedding) a value.

        Its uses are summed per microbatch in reverse program order and added to `.grad` once (R3).

        Args:
            name: Of the value, behind `weight.`.
            parameter: What decides whether it trains.
            registered: Gives what stands in its place in the module when a step runs (a sharded parameter is together
                in another object); None: the parameter itself.
        """
        value = f"weight.{name}"
        if value in self._shared or any(known is parameter for known in self._shared.values()):
            raise ProgramError(f"parameter {name!r} is made a value twice: make it one once and pass the handle on")
        self._shared[value] = parameter
        self._registered[value] = registered or (lambda: parameter)
        return Value(value)

    @contextmanager
    def layer(
        self, index: int, *, mtp: bool = False, context: Callable[[], AbstractContextManager[object]] | None = None
    ) -> Iterator[None]:
        """Stages added inside belong to layer `index` (decoder layers first, then MTP depths).

        Args:
            index: The layer.
            mtp: Whether it is an MTP depth.
            context: What its compute stages run their forward in, unless they name their own.
        """
        if self._layer is not None:
            raise ProgramError(f"layer {index} begins inside layer {self._layer}: layers do not nest")
        self._layer = index
        self._context = context
        if mtp:
            self._mtp.add(index)
        try:
            yield
        finally:
            self._layer = None
            self._context = None

    def compute(
        self,
        name: str,
        forward: Callable[..., Any],
        *reads: Value,
        outputs: Sequence[str],
        nondiff: Sequence[str] = (),
        adjoint: Callable[..., Any] | None = None,
        wgrad: bool = False,
        pins: Sequence[str] = (),
        effects: Sequence[tuple[str, Callable[[Any], None]]] = (),
        state: Iterable[Any] = (),
        draws_rng: bool = False,
        parameters: Iterable[Trainable] = (),
        context: Callable[[], AbstractContextManager[object]] | None = None,
        inner: Iterable[RecomputeModule] = (),
        sheds: Iterable[int] = (),
        graph_only: Callable[..., Any] | None = None,
    ) -> tuple[Value, ...]:
        """Add a stage of the compute lane; the arguments are the fields of ir.Stage.

        Args:
            name: Stage name; orders place stages by it.
            forward: `forward(*reads)`, returning the one value, or a tuple in the order of `outputs` then `nondiff`.
            reads: Values it reads, in argument order.
            outputs: Names of the written values that carry gradients.
            nondiff: Names of the written values that carry none.
            adjoint: Backward that needs no activation.
            wgrad: Whether its weight gradients may be delayed.
            pins: Names of `nondiff` values that a replay reuses instead of writing them again.
            effects: (name, apply) pairs, run once per microbatch when the step succeeds.
            state: Buffers that `forward` changes in place.
            draws_rng: Whether `forward` draws random numbers in training.
            parameters: Parameters that `forward` reads.
            context: Precision context to enter around `forward`; None: the layer's.
            inner: Parts that `forward` calls through recompute.inner.rebuild.
            sheds: Places of reads that its graph does not hold.
            graph_only: The second form of `forward`, see ir.TwoForms.

        Returns:
            Handles of `outputs` then `nondiff`.
        """
        names = self._names(name, outputs, nondiff, pins, [value for value, _ in effects])
        stage = Stage(
            layer=self._layer, name=name, lane=Lane.COMPUTE,
            reads=_read(name, reads),
            writes=tuple(names.values()),
            forward=forward if graph_only is None else TwoForms(forward, graph_only),
            nondiff=frozenset(names[short] for short in nondiff),
            adjoint=adjoint, wgrad=wgrad,
            pins=tuple(names[short] for short in pins),
            effects=tuple(Effect(names[short], apply) for short, apply in effects),
            state=tuple(state),
            draws_rng=draws_rng,
            parameters=tuple(parameters),
            context=self._context if context is None else context,
            inner=frozenset(inner), sheds=tuple(sheds),
        )  # fmt: skip
        self._stages.append(stage)
        return tuple(Value(value) for value in stage.writes)

    def comm(
        self,
        name: str,
        forward: Callable[..., Any],
        *reads: Value,
        outputs: Sequence[str],
        nondiff: Sequence[str] = (),
        pins: Sequence[str] = (),
        adjoint: Callable[..., Any],
        lane: Lane = Lane.COMM,
        aliases: bool = False,
    ) -> tuple[Value, ...]:
        """Add a stage of a communication lane: communication only, with a hand-written backward (R11).

        A stage without outputs hands its reads out of the program: its adjoint brings their gradients in.

        Args:
            name: Stage name; orders place stages by it.
            forward: As for compute().
            reads: Values it reads, in argument order.
            outputs: Names of the written values that carry gradients.
            nondiff: Names of the written values that carry none, as a library's handle.
            pins: Names of `nondiff` values that a replay and the adjoint get from the first pass.
            adjoint: Its backward, see ir.Stage.
            lane: Where it runs.
            aliases: Whether it passes on the memory that it is given.

        Returns:
            Handles of `outputs` then `nondiff`.
        """
        if not callable(adjoint):
            raise ProgramError(f"stage {name}: adjoint={adjoint!r} must be a function (R11)")
        names = self._names(name, outputs, nondiff, pins)
        stage = Stage(
            layer=self._layer,
            name=name,
            lane=lane,
            reads=_read(name, reads),
            writes=tuple(names.values()),
            forward=forward,
            nondiff=frozenset(names[short] for short in nondiff),
            pins=tuple(names[short] for short in pins),
            adjoint=adjoint,
            aliases=aliases,
        )
        self._stages.append(stage)
        return tuple(Value(value) for value in stage.writes)

    def loss(self, value: Value, weight: float = 1.0) -> None:
        """Start the backward pass from this scalar, scaled by `weight` and the step's loss scale."""
        (name,) = _read("loss", (value,))
        self._losses.append(Loss(name, weight))

    def build(self, outputs: Sequence[Value] = ()) -> Program:
        """Check the stages and return them as a Program.

        Raises:
            ProgramError: See declarations.check_program.
        """
        return Program(
            stages=(*self._weights(), *self._stages),
            inputs=tuple(self._inputs),
            losses=tuple(self._losses),
            outputs=_read("outputs", outputs),
            mtp_layers=frozenset(self._mtp),
            feed_checks=tuple(self._feed_checks),
            first_layer=self._first_layer,
            step_states=tuple(self._step_states),
        )

    def _weights(self) -> tuple[Stage, ...]:
        """Shared parameters are written by a first stage `weights`; its backward adds their sum to `.grad`."""
        if not self._shared:
            return ()
        parameters = tuple(self._shared.values())
        registered = tuple(self._registered.values())
        return (
            Stage(
                layer=None,
                name=WEIGHTS,
                lane=Lane.COMPUTE,
                reads=(),
                writes=tuple(self._shared),
                forward=lambda: tuple(now() for now in registered) if len(registered) > 1 else registered[0](),
                parameters=parameters,
            ),
        )

    def _names(
        self,
        stage: str,
        outputs: Sequence[str],
        nondiff: Sequence[str],
        pins: Sequence[str],
        effects: Sequence[str] = (),
    ) -> dict[str, str]:
        """Full names of what a stage writes; what it pins or has effects on must be among it."""
        if self._layer is None and stage == WEIGHTS:
            raise ProgramError(f"stage {stage} writes the parameters that parameter() shares: choose another name")
        written = _listed(stage, outputs=outputs, nondiff=nondiff)
        names = {short: self._name(short) for short in written}
        if len(names) < len(written):
            raise ProgramError(f"stage {self._name(stage)} names a written value twice: {written}")
        for short in _listed(stage, pins=pins, effects=effects):
            if short not in names:
                raise ProgramError(
                    f"stage {self._name(stage)}: {short!r} is pinned or has an effect but is not written"
                )
        return names

    def _name(self, short: str) -> str:
        return short if self._layer is None else f"{self._layer}.{short}"


def _listed(stage: str, **given: Sequence[str]) -> tuple[str, ...]:
    """Names out of several lists of names; a single text would be taken for its letters."""
    for argument, names in given.items():
        if type(names) not in (tuple, list) or not all(isinstance(name, str) for name in names):
            raise ProgramError(f"stage {stage}: {argument}={names!r} must be a tuple or list of names")
    return tuple(name for names in given.values() for name in names)


def _read(what: str, values: Iterable[Value]) -> tuple[str, ...]:
    """Names of the values behind handles."""
    values = tuple(values)
    for value in values:
        if not isinstance(value, Value):
            raise ProgramError(f"{what}: {value!r} must be a Value, as input(), compute() and comm() return")
    return tuple(value.name for value in values)
