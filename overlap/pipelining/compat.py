"""Every private name of torch.distributed.pipelining that this package uses, in one place.

tests/pipelining/test_compat.py pins what they do; torch 2.11 to 2.13 are supported. What differs between them:
1. 2.12 replaced shape inference by a vote at start-up; stages here say their shapes themselves, so both do nothing.
2. 2.11's start-up handshake sends to the own rank between two stages of one rank, which gloo cannot do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _get_1f1b_rank_ops,
    _get_warmup_ops,
    _PipelineContext,
    _PipelineScheduleRuntime,
    _validate_schedule,
)

Action = _Action
Context = _PipelineContext
Runtime = _PipelineScheduleRuntime
Handler = Callable[[Action, Context], None]
RankActions = Mapping[int, Sequence[Action | None]]
"""Actions of each rank, in order."""

get_1f1b_rank_ops: Callable[..., list[Action | None]] = _get_1f1b_rank_ops
get_warmup_ops: Callable[..., int] = _get_warmup_ops

__all__ = [
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "FORWARD",
    "FULL_BACKWARD",
    "OVERLAP_F_B",
    "RECV_B",
    "RECV_F",
    "REDUCE_GRAD",
    "SEND_B",
    "SEND_F",
    "Action",
    "Context",
    "DrySchedule",
    "DryStage",
    "Handler",
    "PipelineStage",
    "RankActions",
    "Runtime",
    "ScheduleDualPipeV",
    "ScheduleInterleaved1F1B",
    "ScheduleZBVZeroBubble",
    "StaticStage",
    "forget_receives",
    "get_1f1b_rank_ops",
    "get_warmup_ops",
    "lower_actions",
    "microbatch_of",
    "parts_of",
    "sub_actions",
    "take_receive",
]


class DryStage:
    """What a schedule's constructor asks of a stage, without a process group: its orders hold for all ranks."""

    def __init__(self, stage_index: int, num_stages: int, group_size: int) -> None:
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.group_size = group_size
        self.group_rank = 0
        self.is_first = stage_index == 0
        self.is_last = stage_index == num_stages - 1
        self.submod = nn.Module()
        self.stage_index_to_group_rank: dict[int, int] = {}


class StaticStage(PipelineStage):
    """A PipelineStage that infers nothing, holds no receive buffers and runs nothing itself.

    torch's own would keep a receive buffer per microbatch for good, and tell shapes by running the module on garbage.
    """

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **keywords: Any) -> None:
        self.chunks = num_microbatches
        self.args_recv_info = {microbatch: () for microbatch in range(num_microbatches)}
        self.act_send_info = {}

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **keywords: Any) -> None:
        self.grad_recv_info = {microbatch: () for microbatch in range(num_microbatches)}

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing was run, so gradients stay; torch would drop them when training follows an evaluation."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        ops: list[Any] = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Nothing is left to send: the plan did."""
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Nothing is left to send: the plan did."""
        return []


def lower_actions(orders: RankActions, num_stages: int, num_microbatches: int) -> dict[int, list[Action]]:
    """Check a compute-only order and add sends and receives, as the runtime does; no process group is needed.

    Raises:
        AssertionError: torch rejects the order; says why.
    """
    rank_of = _validate_schedule(dict(orders), len(orders), num_stages, num_microbatches)  # type: ignore[arg-type]
    sharded = {
        rank: _add_reduce_grad(list(_add_unshard_reshard(list(actions))), num_microbatches)
        for rank, actions in orders.items()
    }
    return _add_send_recv(sharded, lambda stage: rank_of[stage], num_stages)  # type: ignore[arg-type]


def sub_actions(action: Action) -> tuple[Action, Action]:
    """The forward and the backward of an OVERLAP_F_B."""
    parts = {part.computation_type: part for part in action.sub_actions or ()}
    return parts[FORWARD], parts[FULL_BACKWARD]


def microbatch_of(action: Action) -> int:
    """The microbatch of a compute action."""
    if action.microbatch_index is None:
        raise AssertionError(f"{action} has no microbatch")
    return int(action.microbatch_index)


def parts_of(action: Action) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Stage and microbatch that run forward in a compute action, and those that run backward."""
    parts = action.sub_actions or (action,)
    ahead = [(part.stage_index, microbatch_of(part)) for part in parts if part.computation_type is FORWARD]
    behind = [(part.stage_index, microbatch_of(part)) for part in parts if part.computation_type is not FORWARD]
    return next(iter(ahead), None), next(iter(behind), None)


def _runtime(context: Context) -> Runtime:
    if not isinstance(context.schedule_ref, Runtime):
        raise AssertionError(f"{context.schedule_ref} is not the runtime that the handlers were made for")
    return context.schedule_ref


def take_receive(context: Context, action: Action) -> None:
    """Tell the runtime that a posted receive is used now; there is none within a rank or at the model's ends."""
    runtime = _runtime(context)
    table = runtime.fwd_recv_ops if action.computation_type == FORWARD else runtime.bwd_recv_ops
    table.pop((action.stage_index, microbatch_of(action)), None)


def forget_receives(runtime: Runtime) -> None:
    """After a step that failed: nothing is posted."""
    runtime.fwd_recv_ops.clear()
    runtime.bwd_recv_ops.clear()


class DrySchedule(Runtime):
    """Mixed into a schedule that runs in a process group which only pretends: the start-up vote asks neighbours."""

    def _warmup_p2p(self, *args: Any, **keywords: Any) -> None:
        """Nobody is there."""
