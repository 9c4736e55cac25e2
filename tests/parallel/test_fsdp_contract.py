"""What overlap/parallel/fsdp.py relies on of torch's private FSDP2: another torch version fails here first."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from overlap.ir import Lane, Stage
from overlap.parallel.attach import DataSettings, make_parallel
from overlap.parallel.collective_log import NoLog
from overlap.parallel.fsdp import ParameterGroup, _groups_of, finish_step, start
from recompute import ConfigError
from tests.distributed.ranks import RankPool
from tests.parallel.models import small_chunk, world_of

pytestmark = pytest.mark.distributed


def arguments(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_what_is_called_takes_what_is_given() -> None:
    assert arguments(FSDPParamGroup.unshard) == ["self", "async_op"]
    for method in (FSDPParamGroup.wait_for_unshard, FSDPParamGroup.reshard, FSDPParamGroup._init_mp_dtypes):
        assert arguments(method) == ["self"]
    assert arguments(FSDPParamGroup.post_backward) == ["self", "unused"]
    assert arguments(FSDPState._lazy_init) == ["self"]
    assert arguments(FSDPState._root_post_backward_final_callback) == ["self"]
    wanted = {"mesh", "mp_policy", "shard_placement_fn", "ignored_params"}
    assert wanted <= set(arguments(fully_shard))


def test_an_asynchronous_gather_runs_on_the_current_stream() -> None:
    """NOTE [ Streams of sharded parameters ], 1: in whatever state a group is."""

    class Device:
        def current_stream(self) -> str:
            return "current"

    context: Any = FSDPCommContext()
    context.device_handle = Device()
    context.all_gather_copy_in_stream = context.all_gather_stream = "another"
    for state in TrainingState:
        assert context.get_all_gather_streams(True, state) == ("current", "current")
    assert context.get_all_gather_streams(False, TrainingState.FORWARD) == ("another", "another")


class Twice(nn.Module):
    """A group of its own, and one module without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.outer = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.none = nn.Identity()


def made() -> tuple[Any, list[ParameterGroup]]:
    world = world_of()
    root: Any = Twice()
    with torch.no_grad():
        for parameter in root.parameters():
            parameter.fill_(1.0)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for part in (root.inner, root.none, root):
        sharded = fully_shard(part, mesh=world.formed.data_mesh, mp_policy=policy)
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(2.0)
    return root, start(root, NoLog())


def life_of_a_group() -> None:
    root, groups = made()
    assert [group.name for group in groups] == ["", "inner"]
    assert _groups_of(root.none) == []
    for part in (root, root.inner, root.none):
        assert not part._forward_pre_hooks
        assert not part._forward_hooks
    group, inner = groups
    torch_group: Any = group._group
    assert not group.together
    assert [tuple(p.shape) for p in group.parameters] == [(4, 4)]
    # a gather under way counts, a second one starts nothing
    group.prefetch()
    assert torch_group._all_gather_result.all_gather_work is not None
    assert group.together
    assert not torch_group.is_unsharded
    under_way = torch_group._all_gather_result
    group.prefetch()
    assert torch_group._all_gather_result is under_way
    group.gather()
    assert torch_group._all_gather_result is None
    assert torch_group.is_unsharded
    (item,) = torch_group.fsdp_params
    weight = item._unsharded_param
    assert type(weight) is nn.Parameter
    assert weight is root.outer.weight
    # without reduction a gradient is kept in the reduce type, and added to; the parameters stay
    for total in (1.0, 2.0):
        weight.grad = torch.ones_like(weight)
        group.backward_done(frozenset({0}), reduce=False)
        assert weight.grad is None
        assert item.unsharded_accumulated_grad.dtype is torch.float32
        assert torch.equal(item.unsharded_accumulated_grad, torch.full((4, 4), total))
        assert torch_group.is_unsharded
    # the other group has no gradient: it takes part with zeros
    inner.gather()
    for each in groups:
        each.backward_done(frozenset({0}), reduce=True)
        each.scatter()
        assert not each.together
    assert weight.untyped_storage().size() == 0
    finish_step(root, groups)
    for each, value in ((group, 2.0), (inner, 0.0)):
        sharded: Any = each.parameters[0]
        assert torch.equal(sharded.grad.to_local(), torch.full((2, 4), value, dtype=torch.bfloat16))
        assert each._group._training_state is TrainingState.IDLE
    # the same parameter comes back
    group.gather()
    assert root.outer.weight is weight
    assert torch.equal(weight, torch.ones_like(weight))


def given_up() -> None:
    """What a failed step leaves is dropped: a gather nobody waited for, and sums that were not reduced."""
    root, groups = made()
    group, inner = groups
    group.gather()
    root.outer.weight.grad = torch.ones(4, 4, dtype=torch.bfloat16)
    group.backward_done(frozenset({0}), reduce=False)
    inner.prefetch()
    for each in groups:
        each.forget()
        assert not each.together
        assert all(item.unsharded_accumulated_grad is None for item in each._group.fsdp_params)
    finish_step(root, groups)
    assert all(parameter.grad is None for each in groups for parameter in each.parameters)


def on_another_lane() -> str:
    chunk = small_chunk(world=world_of())
    stage = next(stage for stage in chunk.program.stages if stage.parameters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "lane", property(lambda self: Lane.COMM if self.key == stage.key else Lane.COMPUTE))
        with pytest.raises(ConfigError) as caught:
            make_parallel(chunk, DataSettings(fsdp=True))
    return str(caught.value)


def test_a_group_lives_as_the_schedule_drives_it(ranks: RankPool) -> None:
    ranks(2, life_of_a_group)


def test_a_group_can_be_given_up(ranks: RankPool) -> None:
    ranks(2, given_up)


def test_only_the_compute_lane_reads_sharded_parameters(ranks: RankPool) -> None:
    for message in ranks(2, on_another_lane):
        assert "only the compute lane" in message
