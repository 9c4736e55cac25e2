"""take_footprint: one dry run of a program on fake tensors, slot by slot, each in a state of its own.

The engine itself runs every slot, on inputs that are copies with storages of their own; what lives afterwards, and
what dies when the tables are dropped one after the other, says who holds what. No data is computed (R18).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from overlap.chunk import ModelChunk
from overlap.engine import Engine, Feeds
from overlap.ir import Op, StageKey
from overlap.lanes import NullLanes
from overlap.lower import Issue, lower
from overlap.memory.dry import DrySlots
from overlap.memory.facts import Facts, Footprint, Kind
from overlap.memory.layout import Layout, fresh
from overlap.memory.tracker import StorageTracker, tensors_of
from overlap.orders import get_order
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE, make_schedule, segments_of
from overlap.selective import rebuilt_parts
from overlap.side import Side
from recompute import state
from recompute.config import RecomputeConfig
from recompute.keep import span
from recompute.modules import RecomputeModule
from recompute.precision import capture_precision, no_autocast

_FULL_SIZE_REDUCTIONS = frozenset(
    {
        torch.ops.aten.mse_loss.default,
        torch.ops.aten.smooth_l1_loss.default,
        torch.ops.aten.soft_margin_loss.default,
        torch.ops.aten.binary_cross_entropy.default,
    }
)
"""Losses whose CPU kernel reduces within a buffer of the input's size and returns that; fake kernels do not know."""


def real_bytes(func: Callable[..., Any], args: Sequence[Any], storage: torch.UntypedStorage) -> int:
    """Size of a fake result as the real kernel would allocate it."""
    if func in _FULL_SIZE_REDUCTIONS and args[0].device.type == "cpu":
        full: Tensor = torch.broadcast_tensors(args[0], args[1])[0]  # type: ignore[no-untyped-call]
        return max(storage.nbytes(), full.numel() * full.element_size())
    return storage.nbytes()


def take_footprint(chunk: ModelChunk, feeds: Feeds, delayed: Iterable[bool] = (False, True)) -> Footprint:
    """Find out what each kind of slot allocates and holds, for microbatches shaped like `feeds`.

    Args:
        chunk: From `fake_chunk`, inside its context. Of its configs only their modules matter.
        feeds: One microbatch; only shapes and types are used.
        delayed: With which settings of `delay_wgrad` backward is examined.

    Raises:
        ProgramError: A stage keeps a tensor that no table of the engine holds, or writes an object whose tensors
            cannot be seen (anything but tensors, tuples, lists and dicts of them).
    """
    program = chunk.program
    device = chunk.device.type
    precision = capture_precision(device)
    facts: dict[bool, dict[Kind, Facts]] = {}
    with torch.autograd.set_multithreading_enabled(False), no_autocast(device), StorageTracker(real_bytes) as tracker:
        values = {name: Layout.of(value) for name, value in feeds.items()}
        written = dict(values)
        for delay in delayed:
            # No generators: fake tensors are not drawn, and the live ones stay as they are.
            engine = Engine(NullLanes(), run_seed=0, step=0, generators=(), precision=precision, delay_wgrad=delay)
            dry = DrySlots(engine, tracker, written, facts.setdefault(delay, {}))
            _run_slots(chunk, dry, delayed=delay)
        return Footprint(
            facts=facts,
            feeds={name: _copied(tensors_of(fresh(value)), tracker) for name, value in values.items()},
            spans={name: tuple(map(_span, tree_leaves(written[name]))) for name in program.producers},
            snapshots={stage.key: _copied(stage.state, tracker) for stage in program.stages if stage.state},
        )


def _run_slots(chunk: ModelChunk, dry: DrySlots, *, delayed: bool) -> None:
    """Every stage: forward without and with graph, first pass and replay; then backward of each graph."""
    program = chunk.program
    keep = Side(program, (), program.trained())
    replay = Side(program, segments_of(program, RecomputeConfig.uniform(1)), program.trained())
    replays = {issue.stage.key: issue for issue in _issues(None, replay, delayed) if issue.slot.op is Op.REPLAY}
    rebuilt = _rebuilt_parts(chunk)
    for issue in _issues(keep, None, delayed):
        dry.forward_without_graph(issue)
    for issue in _issues(keep, None, delayed):
        if issue.records:
            dry.forward(issue)
            for parts in rebuilt.get(issue.stage.key, ()):
                dry.forward(replace(issue, parts=parts))
        if issue.stage.pins and issue.stage.key in replays:
            dry.forward(replays[issue.stage.key])
    backward = _issues(None, keep, delayed)
    wgrads = {issue.stage.key: issue for issue in backward if issue.slot.op is Op.WGRAD}
    for issue in backward:
        if issue.slot.op is Op.BACKWARD:
            dry.backward(issue, [wgrads[issue.stage.key]] if issue.delays else [])


def _rebuilt_parts(chunk: ModelChunk) -> dict[StageKey, set[frozenset[RecomputeModule]]]:
    """Per stage, each choice of parts that a config of the chunk rebuilds."""
    found: dict[StageKey, set[frozenset[RecomputeModule]]] = {}
    for config in (chunk.recompute,) if isinstance(chunk.recompute, RecomputeConfig) else chunk.recompute:
        for key, parts in rebuilt_parts(chunk.program, config, segments_of(chunk.program, config)).items():
            found.setdefault(key, set()).add(parts)
    return found


def _issues(forward: Side | None, backward: Side | None, delayed: bool) -> tuple[Issue, ...]:
    schedule = make_schedule(get_order("plain"), forward, backward, delayed=delayed, elide=False)
    sides = {number: side for number, side in ((FORWARD_SIDE, forward), (BACKWARD_SIDE, backward)) if side is not None}
    return lower(schedule, sides, {}).issues


def _span(leaf: Any) -> tuple[int, int]:
    """Elements and bytes of one; nothing for what is no tensor."""
    return (span(leaf.shape, leaf.stride), leaf.dtype.itemsize) if type(leaf) is Layout else (0, 0)


def _copied(tensors: Sequence[Tensor], tracker: StorageTracker) -> tuple[int, ...]:
    """Bytes of copies as the step makes them, of in-place state and of feeds that a replay reads."""
    copies = state.take(tensors)
    return tuple(tracker.live[key].nbytes for key in tracker.ids_of(copies))
