"""Pipeline: one rank's virtual stages, joined by channels, and the schedules that drive them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from overlap.chunk import ModelChunk
from overlap.lanes import Lanes
from overlap.lead import IN_PIPELINE
from overlap.model.cut import Border, Cut
from overlap.pipelining.border import StageBorder
from overlap.pipelining.channels import Channel, Handover, Wire
from overlap.pipelining.executor import Executor
from overlap.pipelining.layout import PipelineLayout
from overlap.pipelining.plans import PairPlans
from overlap.pipelining.runs import StepPlanner
from overlap.pipelining.schedules import SPLITS, OrderedSchedule, ScheduleKind, make_orders
from overlap.pipelining.shared import SharedEmbedding
from overlap.pipelining.stage import ChunkStage
from recompute.checks import check_kind
from recompute.config import check_bool, parse_choice
from recompute.errors import ConfigError

MakeChunk = Callable[[Cut, Border], ModelChunk]
"""make(cut, border) gives the chunk of a virtual stage, its module a Decoder of that cut or what looks like one."""


class Pipeline:
    """One rank's share of a pipeline.

    Args:
        layout: Stages, ranks and layers.
        kind: The schedule.
        make: Makes the chunk of each of this rank's stages; all with the same seed, lanes and settings.
        group: The pipeline's process group, rank by rank; None: the default one.
        lanes: Those of the chunks.
        dtype: Of the state between layers.
        device: Of the chunks.
        pin_activations: Where the schedule cuts backward in two: put off the weight gradients of recomputed segments
            too, at the price of their activations (R13).
        wire: Makes the channels to other ranks.
        runtime: Makes the schedules.

    Raises:
        ConfigError: The group has another size than the layout, the schedule cuts backward in two and the chunks do not
            delay weight gradients, or they have a lead.
    """

    def __init__(
        self,
        layout: PipelineLayout,
        kind: ScheduleKind,
        make: MakeChunk,
        *,
        group: dist.ProcessGroup | None,
        lanes: Lanes,
        dtype: torch.dtype,
        device: torch.device,
        pin_activations: bool = False,
        wire: Callable[..., Wire] = Wire,
        runtime: Callable[..., OrderedSchedule] = OrderedSchedule,
    ) -> None:
        check_kind("layout", layout, PipelineLayout, "a PipelineLayout")
        kind = parse_choice(ScheduleKind, "schedule", kind)
        check_bool("pin_activations", pin_activations)
        if dist.get_world_size(group) != layout.pp:
            rule = f"the pipeline's group has {dist.get_world_size(group)} ranks"
            raise ConfigError(field="pp", value=layout.pp, rule=rule)
        if device.type == "cuda" and "nccl" not in str(dist.get_backend_config(group)):
            rule = "gloo hands over CPU tensors only: stages on GPUs need NCCL, and a GPU for each process"
            raise ConfigError(field="collective_backend", value=dist.get_backend(group), rule=rule)
        self.dtype = dtype
        self.layout = layout
        self.kind = kind
        self.group = group
        self.rank = dist.get_rank(group)
        make_wire = partial(wire, group=group, lanes=lanes, dtype=dtype, device=device)
        borders = _make_borders(layout, self.rank, make_wire, Handover(dtype, device))
        chunks = {stage: make(cut_of(layout, stage), border) for stage, border in borders.items()}
        self.stages = tuple(
            ChunkStage(chunk, borders[stage], stage, layout.num_stages, group) for stage, chunk in chunks.items()
        )
        self.first = self.stages[0].chunk
        """Whose settings hold for all stages."""
        if kind in SPLITS and not self.first.delay_wgrad:
            rule = f"schedule {kind} cuts backward in two: set delay_wgrad"
            raise ConfigError(field="delay_wgrad", value=False, rule=rule)
        if self.first.lead:
            raise ConfigError(field="lead", value=self.first.lead, rule=IN_PIPELINE)
        self._pin = pin_activations
        self._bind()
        self.executor = Executor(self.stages)
        self._runtime = runtime
        self._schedules: dict[int, OrderedSchedule] = {}
        self.agreed = False
        """Whether all ranks were found to have the same settings."""
        self.torn = False
        """Whether messages of a step that failed may still be under way between ranks."""
        self.accumulating = False
        """Whether gradients of this pipeline wait for a later call to reduce them."""

    def _bind(self) -> None:
        self._planners = {stage.stage_index: stage.chunk.planner for stage in self.stages}
        self.plans = PairPlans(self._planners, self.first.order, delayed=self.first.delay_wgrad, pin=self._pin)
        self.planner = StepPlanner(self.stages, self.plans)
        self.shared = SharedEmbedding.of([stage.part for stage in self.stages])
        self.shared.join()

    def bind_replaced(self) -> None:
        """Follow chunks that are bound to their module anew; see ModelChunk.bind_replaced."""
        for stage in self.stages:
            stage.chunk.bind_replaced()
        if any(stage.chunk.planner is not self._planners[stage.stage_index] for stage in self.stages):
            self._bind()

    @property
    def chunks(self) -> tuple[ModelChunk, ...]:
        """The chunks of this rank's stages."""
        return tuple(stage.chunk for stage in self.stages)

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The channels of this rank's stages."""
        return tuple(channel for stage in self.stages for channel in stage.border.channels)

    @property
    def receive_buffers(self) -> dict[str, int]:
        """Receive buffers: most alive at once in a channel, added up over the channels, and alive now."""
        wires = [channel for channel in self.channels if isinstance(channel, Wire)]
        return {"peak": sum(wire.peak for wire in wires), "live": sum(wire.live for wire in wires)}

    def schedule(self, num_microbatches: int) -> OrderedSchedule:
        """The schedule of a step, made at the first request.

        Raises:
            ConfigError: It does not fit that many microbatches.
        """
        if num_microbatches not in self._schedules:
            orders = make_orders(self.kind, self.layout, num_microbatches)
            schedule = self._runtime(self.stages, num_microbatches, orders)
            self.executor.register(schedule)
            self._schedules[num_microbatches] = schedule
        return self._schedules[num_microbatches]

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters that this rank trains, by their names in the whole model."""
        named = {name: p for chunk in self.chunks for name, p in chunk.module.named_parameters()}
        return {name: p for name, p in named.items() if p is not self.shared.alias}

    def parameter_groups(self) -> list[dict[str, list[nn.Parameter]]]:
        """The same as an optimizer takes them: those of one layout over ranks together."""
        every = [g["params"] for chunk in self.chunks for g in chunk.parallel.parameter_groups(chunk.module)]
        trained = [[parameter for parameter in group if parameter is not self.shared.alias] for group in every]
        # an optimizer takes a group of none, and a rank with empty stages has no other
        return [{"params": group} for group in trained if group] or [{"params": []}]

    def named_buffers(self) -> Mapping[str, torch.Tensor]:
        """The buffers of this rank by their names in the whole model."""
        return {name: buffer for chunk in self.chunks for name, buffer in chunk.module.named_buffers()}


def cut_of(layout: PipelineLayout, stage: int) -> Cut:
    """The part of the model that a stage holds."""
    layers = layout.layers_of(stage)
    return Cut(first=layers.start, end=layers.stop, opens=stage == 0, closes=stage == layout.num_stages - 1)


def _make_borders(
    layout: PipelineLayout,
    rank: int,
    wire: Callable[[int], Wire],
    nobody: Handover,
) -> dict[int, StageBorder]:
    """The ends of this rank's stages; neighbours on this rank share their channels, the model's ends lead nowhere."""

    def channel(stage: int, neighbour: int) -> Channel:
        if not 0 <= neighbour < layout.num_stages:
            return nobody
        holder = layout.rank_of(neighbour)
        return nobody.another() if holder == rank else wire(holder)

    borders: dict[int, StageBorder] = {}
    for stage in layout.stages_of(rank):
        before = borders.get(stage - 1)
        borders[stage] = StageBorder(
            arrivals=channel(stage, stage - 1) if before is None else before.departures,
            returns=channel(stage, stage - 1) if before is None else before.gradients,
            departures=channel(stage, stage + 1),
            gradients=channel(stage, stage + 1),
        )
    return borders
