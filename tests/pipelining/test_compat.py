"""What torch.distributed.pipelining's private parts do; a torch that does otherwise fails here first."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap.pipelining import compat
from overlap.pipelining.schedules import no_loss
from tests.pipelining.models import alone


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with alone():
        yield


def make_stages() -> list[compat.StaticStage]:
    state = torch.empty(1, device="meta")
    return [
        compat.StaticStage(torch.nn.Linear(1, 1), index, 2, torch.device("cpu"), input_args=state, output_args=state)
        for index in range(2)
    ]


class Schedule(compat.Runtime):
    def __init__(self, stages: Any, microbatches: int, pairs: bool) -> None:
        super().__init__(stages, microbatches, loss_fn=no_loss, scale_grads=False)
        forward = [compat.Action(stage, compat.FORWARD, 0) for stage in range(2)]
        backward = [compat.Action(stage, compat.FULL_BACKWARD, 0) for stage in (1, 0)]
        second = compat.Action(0, compat.FORWARD, 1)
        pair = compat.Action(-1, compat.OVERLAP_F_B, None, (second, backward[0]))
        middle = [pair] if pairs else [second, backward[0]]
        rest = [
            backward[1], compat.Action(1, compat.FORWARD, 1), compat.Action(1, compat.BACKWARD_INPUT, 1),
            compat.Action(1, compat.BACKWARD_WEIGHT, 1), compat.Action(0, compat.FULL_BACKWARD, 1),
        ]  # fmt: skip
        self.pipeline_order = {0: [*forward, *middle, *rest]}
        self._prepare_schedule_with_comms(self.pipeline_order)


@pytest.mark.parametrize("pairs", [False, True])
def test_handlers_get_every_compute_action(pairs: bool) -> None:
    """With a handler for each kind the runtime calls no module, no autograd and no loss function."""
    seen: list[str] = []
    schedule = Schedule(make_stages(), 2, pairs)
    kinds = (
        compat.FORWARD, compat.FULL_BACKWARD, compat.BACKWARD_INPUT, compat.BACKWARD_WEIGHT, compat.OVERLAP_F_B,
    )  # fmt: skip

    def handler(action: Any, ctx: Any) -> None:
        assert ctx.schedule_ref is schedule
        compat.take_receive(ctx, (action.sub_actions or (action,))[0])
        seen.append(str(action))

    for kind in kinds:
        schedule.register_custom_function(kind, handler)
    schedule.step(return_outputs=False)
    middle = ["(0F1;1B0)OVERLAP_F_B"] if pairs else ["0F1", "1B0"]
    assert seen == ["0F0", "1F0", *middle, "0B0", "1F1", "1I1", "1W1", "0B1"]
    seen.clear()
    schedule.eval(return_outputs=False)
    assert len(seen) == 8 + (not pairs)


def test_stages_hold_no_buffers_and_infer_nothing() -> None:
    stages = make_stages()
    schedule = Schedule(stages, 2, False)
    for kind in (compat.FORWARD, compat.FULL_BACKWARD, compat.BACKWARD_INPUT, compat.BACKWARD_WEIGHT):
        schedule.register_custom_function(kind, lambda action, ctx: None)
    for stage in stages:
        stage.submod.weight.grad = torch.ones(1, 1)
    schedule.step(return_outputs=False)
    schedule.eval(return_outputs=False)
    for stage in stages:
        assert set(stage.args_recv_info.values()) | set(stage.grad_recv_info.values()) == {()}
        assert torch.equal(stage.submod.weight.grad, torch.ones(1, 1))
        assert stage.get_fwd_send_ops(0) == stage.get_bwd_send_ops(0) == []
        assert [op.group_peer for op in stage._get_init_p2p_neighbors_ops() if op.group_peer == 0] == []


def test_private_names_and_their_arguments() -> None:
    """What 2.11 to 2.13 have in common, by name and by the arguments used here."""
    assert compat.Action._fields == ("stage_index", "computation_type", "microbatch_index", "sub_actions")
    for function, names in (
        (compat.get_1f1b_rank_ops, ["n_local_stages", "pp_group_size", "warmup_ops", "fwd_bwd_ops", "cooldown_ops"]),
        (compat.get_warmup_ops, ["rank", "n_local_stages", "microbatches_per_round", "pp_group_size"]),
        (compat.Runtime.register_custom_function, ["self", "computation_type", "custom_function"]),
    ):
        assert list(inspect.signature(function).parameters)[: len(names)] == names
    for name in ("_prepare_forward_infra", "_prepare_backward_infra", "_get_init_p2p_neighbors_ops"):
        assert callable(getattr(compat.PipelineStage, name))
    for name in ("get_fwd_recv_ops", "get_bwd_recv_ops", "get_fwd_send_ops", "get_bwd_send_ops"):
        assert callable(getattr(compat.PipelineStage, name))


def test_sends_follow_their_action_forward_first() -> None:
    """A pair's sends stand right behind it, in the order of its parts: so a plan may issue them within."""
    first, second = compat.Action(0, compat.FORWARD, 0), compat.Action(1, compat.FORWARD, 0)
    pair = compat.Action(-1, compat.OVERLAP_F_B, None, (compat.Action(2, compat.FORWARD, 0), back(3)))
    orders = {
        0: [first, pair_free(2), back(2), back(0)],
        1: [second, compat.Action(3, compat.FORWARD, 0), back(3), back(1)],
    }
    lowered = compat.lower_actions(orders, 4, 1)
    for actions in lowered.values():
        for place, action in enumerate(actions):
            if action.computation_type in (compat.SEND_F, compat.SEND_B):
                made = actions[place - 1]
                assert (made.stage_index, made.microbatch_index) == (action.stage_index, action.microbatch_index)
    assert compat.sub_actions(pair) == (compat.Action(2, compat.FORWARD, 0), back(3))
    assert dist.get_world_size() == 1


def back(stage: int) -> compat.Action:
    return compat.Action(stage, compat.FULL_BACKWARD, 0)


def pair_free(stage: int) -> compat.Action:
    return compat.Action(stage, compat.FORWARD, 0)


def test_malformed_orders_are_rejected() -> None:
    with pytest.raises(AssertionError):
        compat.lower_actions({0: [back(0), compat.Action(0, compat.FORWARD, 0)]}, 1, 1)
