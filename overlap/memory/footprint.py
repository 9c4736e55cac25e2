"""take_footprint: one dry run of a program on fake tensors, slot by slot, each in a state of its own.

The engine itself runs every slot, on inputs that are copies with storages of their own; what lives afterwards, and
what dies when the tables are dropped one after the other, says who holds what. No data is computed (R18).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from overlap.chunk import ModelChunk, check_chunk
from overlap.engine import Engine, Feeds
from overlap.ir import Op, Program, StageKey
from overlap.lanes import NullLanes
from overlap.lower import Issue, lower
from overlap.memory.constants import SeenGenerator
from overlap.memory.device_model import DeviceModel
from overlap.memory.dry import DrySlots
from overlap.memory.facts import Facts, Footprint, Kind, Spans
from overlap.memory.inside import ON_CPU, Inside
from overlap.memory.layout import Layout
from overlap.memory.refs import Source
from overlap.memory.slot_log import SlotLog
from overlap.memory.tracker import StorageTracker
from overlap.orders import get_order
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE, make_schedule, segments_of
from overlap.selective import rebuilt_parts
from overlap.side import Side
from overlap.step_feeds import check_names
from recompute import state
from recompute.config import RecomputeConfig
from recompute.keep import span
from recompute.modules import RecomputeModule
from recompute.precision import capture_precision, no_autocast
from recompute.wgrad import adding_in_place

RebuiltParts = Mapping[StageKey, Iterable[frozenset[RecomputeModule]]]
"""Per stage, each choice of parts that a config rebuilds."""
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


def rounded_bytes(granule: int, func: Callable[..., Any], args: Sequence[Any], storage: torch.UntypedStorage) -> int:
    """The same, rounded up to a multiple of `granule`."""
    return -(-real_bytes(func, args, storage) // granule) * granule


def take_footprint(
    chunk: ModelChunk,
    feeds: Feeds,
    delayed: Iterable[bool] = (False, True),
    *,
    rules: Iterable[RecomputeConfig] | None = None,
    device: DeviceModel | None = None,
    constants: bool = False,
    granule: int = 1,
    inside: Inside = ON_CPU,
) -> Footprint:
    """Find out what each kind of slot allocates and holds, for microbatches shaped like `feeds`.

    Args:
        chunk: From `fake_chunk`, inside its context. Its configs and order do not matter if `rules` are given.
        feeds: One microbatch; only shapes and types are used.
        delayed: With which settings of `delay_wgrad` backward is examined.
        rules: The footprint serves these, and all that rebuild no part of a stage; None: those of the chunk.
        device: Turns the work of each slot into time; None: no work is counted.
        constants: Whether constants in graphs and states of generators count, as they do for the CPU allocator.
        granule: Bytes that the allocator rounds a request up to.
        inside: What operators allocate and free within themselves.

    Raises:
        ConfigError: There is no chunk, or the microbatch does not feed it.
        ProgramError: A stage keeps a tensor that no table of the engine holds, or writes an object whose tensors
            cannot be seen (anything but tensors, tuples, lists and dicts of them).
    """
    check_chunk(chunk)
    program = chunk.program
    check_names([feeds], {source.name for source in program.inputs})
    where = chunk.device.type
    precision = capture_precision(where)
    facts: dict[bool, dict[Kind, Facts]] = {}
    log = SlotLog(device, inside)
    tracking = StorageTracker(partial(rounded_bytes, granule), log)
    with torch.autograd.set_multithreading_enabled(False), no_autocast(where), tracking as tracker, adding_in_place():
        values = {name: Layout.of(value) for name, value in feeds.items()}
        layouts = dict(values)
        rebuilt = _rebuilt_parts(program, configs_of(chunk) if rules is None else rules)
        # Never the real ones: fake tensors are not drawn, and those stay as they are.
        live = (SeenGenerator(),) if constants else ()
        for delay in delayed:
            engine = Engine(NullLanes(), run_seed=0, step=0, generators=live, precision=precision, delay_wgrad=delay)
            # A first pass without a graph is the same for both settings.
            bare = {kind: fact for found in facts.values() for kind, fact in found.items() if _is_bare(kind)}
            facts[delay] = dict(bare)
            dry = DrySlots(engine, tracker, layouts, facts[delay], log=log, constants=constants)
            _run_slots(program, dry, rebuilt, delayed=delay, bare=not bare)
        return Footprint(
            facts=facts,
            feeds={name: _feed_copies(value, tracker) for name, value in values.items()},
            spans={stage.key: tuple(_spans(layouts[name]) for name in stage.writes) for stage in program.stages},
            granule=granule,
            snapshots={stage.key: _copied(stage.state, tracker) for stage in program.stages if stage.state},
        )


def _is_bare(kind: Kind) -> bool:
    return kind.source is Source.FORWARD and not kind.graph and not kind.pinned


def _run_slots(program: Program, dry: DrySlots, rebuilt: RebuiltParts, *, delayed: bool, bare: bool) -> None:
    """Every stage: forward without graph (if `bare`) and with it, first pass and replay; then each graph's backward."""
    keep = Side(program, (), program.trained())
    replay = Side(program, segments_of(program, RecomputeConfig.uniform(1)), program.trained())
    replays = {issue.stage.key: issue for issue in _issues(None, replay, delayed) if issue.slot.op is Op.REPLAY}
    for issue in _issues(keep, None, delayed) if bare else ():
        dry.forward_without_graph(issue)
    for issue in _issues(keep, None, delayed):
        if issue.records:
            dry.forward(issue)
            for parts in rebuilt.get(issue.stage.key, ()):
                dry.forward(replace(issue, parts=parts))
        replayed = replays.get(issue.stage.key)
        if replayed is not None and issue.stage.pins:
            dry.forward(replayed)
        if replayed is not None and replayed.records and issue.stage.graph_only is not None:
            dry.forward(replace(replayed, graph_only=True))
    backward = _issues(None, keep, delayed)
    wgrads = {issue.stage.key: issue for issue in backward if issue.slot.op is Op.WGRAD}
    for issue in backward:
        if issue.slot.op is Op.BACKWARD:
            dry.backward(issue, [wgrads[issue.stage.key]] if issue.delays else [])


def configs_of(chunk: ModelChunk) -> Iterable[RecomputeConfig]:
    """The configs of a chunk's microbatches."""
    return (chunk.recompute,) if isinstance(chunk.recompute, RecomputeConfig) else chunk.recompute


def _rebuilt_parts(program: Program, rules: Iterable[RecomputeConfig]) -> RebuiltParts:
    """In every layer: which of them a segment covers differs where a layer stands for others."""
    found: dict[StageKey, dict[frozenset[RecomputeModule], None]] = {}
    for config in rules:
        for key, parts in rebuilt_parts(program, config, ()).items():
            found.setdefault(key, {})[parts] = None
    return found


def _issues(forward: Side | None, backward: Side | None, delayed: bool) -> tuple[Issue, ...]:
    schedule = make_schedule(get_order("plain"), forward, backward, delayed=delayed, elide=False)
    sides = {number: side for number, side in ((FORWARD_SIDE, forward), (BACKWARD_SIDE, backward)) if side is not None}
    return lower(schedule, sides, {}).issues


def _spans(value: Any) -> Spans:
    return tuple(
        (leaf.skip + span(leaf.shape, leaf.stride), leaf.dtype.itemsize) if type(leaf) is Layout else (0, 0)
        for leaf in tree_leaves(value)
    )


def _copied(tensors: Sequence[Tensor], tracker: StorageTracker) -> tuple[int, ...]:
    """Bytes of copies as the step makes them, of in-place state."""
    copies = state.take(tensors)
    return tuple(tracker.live[key].nbytes for key in tracker.ids_of(copies))


def _feed_copies(value: Any, tracker: StorageTracker) -> tuple[int, ...]:
    """The same of feeds that a replay reads."""
    copies = [leaf.copied() for leaf in tree_leaves(value) if type(leaf) is Layout]
    return tuple(tracker.live[key].nbytes for key in tracker.ids_of(copies))
