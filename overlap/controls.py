"""Controls of verify: each breaks one thing on purpose, and verify must see it.

A control that finds nothing to break in the given run says so (NothingToBreak) instead of passing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from overlap.chunk import ModelChunk
from overlap.engine import Engine, MicrobatchState
from overlap.ir import WEIGHTS, Lane, Op, Program, Stage, StageKey
from overlap.lower import Issue, Key
from overlap.model.hyper_connections import STREAMS
from overlap.model.router import Router
from overlap.pieces import Piece
from overlap.step import step_plans
from recompute.errors import ConfigError


class NothingToBreak(ConfigError):
    """The run has nothing that this control could break."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A sabotaged engine, and what it breaks."""

    engine_type: Callable[..., Engine]
    broken: str


def make_control(name: str, chunk: ModelChunk, num_microbatches: int) -> Control:
    """Prepare a control for a run.

    Args:
        name: One of CONTROLS.
        chunk: The model of the run; `unpinned_routing` plants tied router scores in it.
        num_microbatches: Microbatches of a step.

    Raises:
        NothingToBreak: The run has nothing of the kind.
    """
    if name not in CONTROLS:
        raise ConfigError(field="control", value=name, rule=f"must be one of {', '.join(CONTROLS)}")
    return CONTROLS[name](chunk, num_microbatches)


def _issues(chunk: ModelChunk, num_microbatches: int) -> list[Issue]:
    return [issue for plan, _ in step_plans(chunk, num_microbatches) for issue in plan.issues]


def _nothing(name: str, rule: str) -> NothingToBreak:
    return NothingToBreak(field="control", value=name, rule=rule)


class NoRng(Engine):
    """Replays, and the adjoints that draw a mask again, draw from the live generator."""

    def _draws(self, issue: Issue, owner: MicrobatchState) -> AbstractContextManager[None]:
        first_pass = issue.slot.op in (Op.FORWARD, Op.NO_GRAD)
        return super()._draws(issue, owner) if first_pass else nullcontext()


def _no_rng(chunk: ModelChunk, num_microbatches: int) -> Control:
    issues = _issues(chunk, num_microbatches)
    again = [
        issue.stage.label
        for issue in issues
        if issue.stage.draws_rng
        and (issue.slot.op is Op.REPLAY or (issue.slot.op is Op.BACKWARD and issue.stage.adjoint is not None))
    ]
    if not again or not any(issue.slot.op is Op.REPLAY for issue in issues):
        raise _nothing("no_rng", "no replay draws random numbers: set a dropout and a method")
    return Control(engine_type=NoRng, broken=f"stages {_list(again)} draw anew in the replay")


class DoubleEffects(Engine):
    """A replay's effects count like the first pass's."""

    def _forward(
        self,
        issue: Issue,
        owner: MicrobatchState,
        keywords: dict[str, Any],
        contexts: Sequence[AbstractContextManager[object]],
    ) -> tuple[Any, ...]:
        outputs = super()._forward(issue, owner, keywords, contexts)
        if issue.slot.op is Op.REPLAY:
            stage = issue.stage
            owner.effects += [(effect, outputs[stage.writes.index(effect.value)]) for effect in stage.effects]
        return outputs


def _double_effects(chunk: ModelChunk, num_microbatches: int) -> Control:
    twice = [
        issue.stage.label
        for issue in _issues(chunk, num_microbatches)
        if issue.slot.op is Op.REPLAY and issue.stage.effects
    ]
    if not twice:
        raise _nothing("double_effects", "no stage with effects is replayed: set a method, and layers with experts")
    return Control(engine_type=DoubleEffects, broken=f"effects of {_list(twice)} are applied in the replay too")


class TieBreaker:
    """Selection among tied scores whose order a replay finds turned round, as a real one may."""

    def __init__(self) -> None:
        self.turned = False

    def __deepcopy__(self, memo: dict[int, Any]) -> TieBreaker:
        """Copies of the model share it: the engine turns the ties of whichever copy it runs."""
        return self

    def __call__(self, scores: Tensor, k: int) -> Tensor:
        """The k best experts of each token: [tokens, experts] -> int64 [tokens, k]."""
        order = scores.flip(-1) if self.turned else scores
        ids = torch.sort(order, dim=-1, descending=True, stable=True).indices[..., :k]
        return scores.shape[-1] - 1 - ids if self.turned else ids


class UnpinnedRouting(Engine):
    """Replays choose their experts again, and ties fall the other way."""

    def __init__(self, *args: Any, ties: TieBreaker, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._ties = ties

    def _replay(self, issue: Issue, owner: MicrobatchState) -> None:
        self._ties.turned = True
        try:
            super()._replay(issue, owner)
        finally:
            self._ties.turned = False

    def _replay_keywords(self, issue: Issue, owner: MicrobatchState) -> dict[str, Any]:
        keywords = super()._replay_keywords(issue, owner)
        # what a transport pinned is no choice
        return keywords if issue.lane is Lane.COMM else dict.fromkeys(keywords)


def _unpinned_routing(chunk: ModelChunk, num_microbatches: int) -> Control:
    issues = _issues(chunk, num_microbatches)
    pinned = [issue.stage.label for issue in issues if issue.pinned and issue.lane is not Lane.COMM]
    routers = [module for module in chunk.modules() if isinstance(module, Router)]
    if not pinned or not routers:
        raise _nothing("unpinned_routing", "no routing is pinned: set a method, and layers with experts")
    ties = TieBreaker()
    for router in routers:
        router.select = ties
        with torch.no_grad():
            router.weight.zero_()
    return Control(
        engine_type=partial(UnpinnedRouting, ties=ties),
        broken=f"stages {_list(pinned)} route again in the replay, with tied scores that fall the other way",
    )


class SwapSlots(Engine):
    """One backward slot of a microbatch trades places with the same slot of the next microbatch.

    What follows from it (backward of earlier stages, its weight gradient) moves along, so every slot still finds what
    it needs: the schedule is legal, but `.grad` adds up in another order.
    """

    def __init__(self, *args: Any, stages: frozenset[StageKey], first: int, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._stages = stages
        self._first = first
        self._held: list[tuple[Issue, MicrobatchState]] = []
        self._passed = 0

    def issue(self, issue: Issue, owner: MicrobatchState) -> None:
        """Hold the first microbatch's slots back until the second one's have run."""
        moved = issue.slot.op in (Op.BACKWARD, Op.WGRAD) and issue.stage.key in self._stages
        if moved and owner.number == self._first:
            self._held.append((issue, owner))
            return
        super().issue(issue, owner)
        if moved and owner.number == self._first + 1:
            self._passed += 1
            if self._passed == len(self._held):
                for held, its_owner in self._held:
                    super().issue(held, its_owner)


def _swap_slots(chunk: ModelChunk, num_microbatches: int) -> Control:
    trained = chunk.program.trained()
    stages = [stage for stage in chunk.program.stages if stage.key in trained]
    # Two contributions to .grad commute; a third makes their order visible.
    if not stages or num_microbatches < 3:
        raise _nothing("swap_slots", "gradients of fewer than 3 microbatches add up the same in any order")
    # The first stage of the first layer: most of its weights get a gradient from every token.
    target = next((stage for stage in stages if stage.layer is not None), stages[0])
    moved = frozenset(stage.key for stage in stages[: stages.index(target) + 1])
    first = num_microbatches - 2
    return Control(
        engine_type=partial(SwapSlots, stages=moved, first=first),
        broken=f"slots B{first}.{target.label} and B{first + 1}.{target.label} are swapped",
    )


class DropBridge(Engine):
    """Gradient pieces of values that skip stages are lost on their way."""

    def __init__(self, *args: Any, pieces: frozenset[Piece], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._pieces = pieces

    def _backward(self, issue: Issue, owner: MicrobatchState) -> None:
        super()._backward(issue, owner)
        for piece in issue.gives:
            if piece in self._pieces:
                owner.grads.pop(piece, None)


def _drop_bridge(chunk: ModelChunk, num_microbatches: int) -> Control:
    program = chunk.program
    trained = program.trained()
    bridges = [
        (value, reader)
        for value, readers in program.readers.items()
        for reader in readers
        if reader.key in trained and not program.nondiff(value) and _is_bridge(program, value, reader)
    ]
    if not bridges:
        raise _nothing("drop_bridge", "no value skips a stage: set --mtp or --mhc")
    broken = _list([f"{value} from {reader.label}" for value, reader in bridges])
    pieces = frozenset((value, program.position[reader.key]) for value, reader in bridges)
    return Control(engine_type=partial(DropBridge, pieces=pieces), broken=f"gradients of {broken} are dropped")


def _is_bridge(program: Program, value: str, reader: Stage) -> bool:
    """Whether a stage reads an MTP hand-over from another layer, or streams past the stages in between."""
    producer = program.producers.get(value)
    if producer is None or producer.key == (None, WEIGHTS):
        return False
    hand_over = reader.layer in program.mtp_layers and producer.layer != reader.layer
    past = program.position[reader.key] > program.position[producer.key] + 1
    return hand_over or (past and value.endswith(f".{STREAMS}") and producer.layer == reader.layer)


class SkipSnapshot(Engine):
    """Replays read the inputs of the microbatch that ran forward last, as if these were kept in one place."""

    def __init__(self, *args: Any, inputs: frozenset[Key], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._inputs = inputs
        self._newest: dict[Key, Any] = {}
        self._started = -1

    def issue(self, issue: Issue, owner: MicrobatchState) -> None:
        """Note the inputs of each microbatch as it starts."""
        if owner.number > self._started:
            self._started = owner.number
            self._newest = {key: owner.values[key] for key in self._inputs}
        super().issue(issue, owner)

    def _replay(self, issue: Issue, owner: MicrobatchState) -> None:
        own = {key: owner.values[key] for key in issue.reads if key in self._inputs}
        owner.values.update({key: self._newest[key] for key in own})
        try:
            super()._replay(issue, owner)
        finally:
            owner.values.update(own)


def _skip_snapshot(chunk: ModelChunk, num_microbatches: int) -> Control:
    inputs = frozenset((source.name, 0) for source in chunk.program.inputs if not source.needs_grad)
    read = {key for issue in _issues(chunk, num_microbatches) if issue.slot.op is Op.REPLAY for key in issue.reads}
    again = sorted(name for name, _ in inputs & read)
    if not again or num_microbatches < 2:
        rule = "no replay reads an input that a later microbatch could replace: set a method, --mtp, --pad or --packed"
        raise _nothing("skip_snapshot", rule)
    return Control(
        engine_type=partial(SkipSnapshot, inputs=inputs),
        broken=f"replays read {', '.join(again)} of the microbatch that ran forward last",
    )


def _list(labels: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(labels))


CONTROLS: dict[str, Callable[[ModelChunk, int], Control]] = {
    "no_rng": _no_rng,
    "unpinned_routing": _unpinned_routing,
    "double_effects": _double_effects,
    "swap_slots": _swap_slots,
    "drop_bridge": _drop_bridge,
    "skip_snapshot": _skip_snapshot,
}
"""Controls by the name that --control takes."""
