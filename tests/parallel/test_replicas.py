"""Averaging gradients over replicas: bitwise what the same buckets give after plain backward, and overlapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap.chunk import ModelChunk
from overlap.lower import Plan
from overlap.parallel import replicas
from overlap.parallel.attach import DataSettings, make_parallel
from overlap.parallel.buckets import Bucket, Pending, Reduction, start_reduction
from overlap.parallel.collective_log import NoLog
from overlap.parallel.data import ChunkRun
from overlap.parallel.fsdp import ParameterGroup
from overlap.parallel.moments import last_gradients
from overlap.parallel.replicas import Replicas
from overlap.parallel.world import World
from overlap.plan import PlanRequest
from overlap.reference import reference_step
from overlap.step import forward_only, train_step
from overlap.verify import compare
from recompute import RecomputeConfig
from recompute.config import Replay
from recompute.errors import ConfigError
from tests.distributed.ranks import RankPool
from tests.parallel.models import (
    GIVES_GRADIENTS,
    Order,
    feeds_of,
    gradients,
    parallel_chunk,
    small_chunk,
    verify_parallel,
    world_of,
)

pytestmark = pytest.mark.distributed
HIDDEN = RecomputeConfig.uniform(1, replay=Replay.HIDDEN)
SMALL = DataSettings(bucket_bytes=4000)
WIDE = DataSettings(bucket_bytes=4000, reduce_dtype=torch.float32)


def every_setting() -> dict[str, bool]:
    world = world_of()
    verdicts = {}
    for recompute, delayed in ((RecomputeConfig.none(), False), (HIDDEN, True)):
        chunk = small_chunk(
            {"layers": 2, "mtp": 1, "tied": True}, recompute=recompute, delay_wgrad=delayed, world=world
        )
        verdicts[f"{recompute.method}"] = verify_parallel(world, SMALL, chunk).equal
    chunk = small_chunk({"dtype": "bfloat16"}, recompute=HIDDEN, delay_wgrad=True, world=world)
    verdicts["bfloat16"] = verify_parallel(world, WIDE, chunk).equal
    return verdicts


def too_early() -> tuple[str, ...]:
    """A control: buckets are reduced before their last gradient is there."""
    world = world_of()

    def early(plan: Any) -> Any:
        return {key: max(place - 8, 0) for key, place in last_gradients(plan).items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "last_gradients", early)
        return verify_parallel(world, SMALL, small_chunk(recompute=HIDDEN, world=world)).gradients.different


def test_the_overlapped_step_is_the_reference_with_the_same_buckets(ranks: RankPool) -> None:
    for verdicts in ranks(2, every_setting):
        assert verdicts == dict.fromkeys(verdicts, True)
        assert len(verdicts) == 3


def test_a_bucket_reduced_too_early_is_seen(ranks: RankPool) -> None:
    assert all(ranks(2, too_early))


def average_of_own_gradients() -> float:
    """Largest difference to the mean over ranks of what each computes alone."""
    world = world_of()
    alone = small_chunk({"dtype": "float64"})
    reference_step(alone, feeds_of(world.rank, 2))
    together = parallel_chunk(world, DataSettings(), {"dtype": "float64"}, recompute=HIDDEN)
    train_step(together, feeds_of(world.rank, 2))
    worst = 0.0
    for own, found in zip(gradients(alone).values(), gradients(together).values(), strict=True):
        assert own is not None
        assert found is not None
        dist.all_reduce(own, group=world.data_group)
        worst = max(worst, float((own / world.size - found).abs().max()))
    return worst


def test_gradients_are_the_mean_over_ranks(ranks: RankPool) -> None:
    assert max(ranks(3, average_of_own_gradients)) < 1e-15


def when_reductions_begin() -> tuple[list[str], list[int]]:
    """The order of slots and of buckets' starts in a step; per bucket, how many of its gradients come after it."""
    world = world_of()
    chunk = parallel_chunk(world, SMALL, recompute=HIDDEN, delay_wgrad=True)
    order, late = Order(), []
    bucket_of = {}

    def start(bucket: Bucket) -> Pending:
        order.log.append("reduce")
        bucket_of[len(order.log) - 1] = bucket
        return start_reduction(bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "start_reduction", start)
        train_step(chunk, feeds_of(world.rank, 2), observers=(order,))
    stages = {stage.label: stage.key for stage in chunk.program.stages}
    for place, bucket in bucket_of.items():
        # the observer sees a slot's end behind the buckets that it completes
        after = [text.split() for text in order.log[place:] if text != "reduce"][1:]
        late.append(sum(op[0] in GIVES_GRADIENTS and stages[label] in bucket.stages for op, label in after))
    return order.log, late


def test_each_bucket_is_reduced_once_when_its_last_gradient_is_there(ranks: RankPool) -> None:
    """Rows 55 and 59: a delayed weight gradient comes in a W slot; earlier microbatches reduce nothing."""
    (log, late), (other, _) = ranks(2, when_reductions_begin)
    assert log == other
    assert set(late) == {0}
    first, last = log.index("reduce"), len(log) - 1 - log[::-1].index("reduce")
    assert log.count("reduce") == len(late) > 3
    # overlapped: most of the last backward comes after the first reduction
    assert sum(text[0] in "BWR" for text in log[first:last]) > 10
    assert not any(text.startswith(("B0", "W0")) for text in log[first:])


def accumulated() -> dict[str, tuple[str, ...]]:
    """Row 57: two calls of two microbatches against one of four; reductions before the last call."""
    world = world_of()
    found = {}
    for name, data in (("replicas", SMALL), ("sharded", DataSettings(fsdp=True))):
        feeds = feeds_of(world.rank, 4)
        once = parallel_chunk(world, data, recompute=HIDDEN)
        train_step(once, feeds)
        for step in (train_step, reference_step):
            twice = parallel_chunk(world, data, recompute=HIDDEN)
            step(twice, feeds[:2], 2, last=False)
            twice.steps_done = 0
            step(twice, feeds[2:], 2)
            found[f"{name} {step.__name__}"] = compare(gradients(once), gradients(twice)).different
    return found


def test_several_calls_accumulate_and_reduce_once(ranks: RankPool) -> None:
    for found in ranks(2, accumulated):
        assert found == dict.fromkeys(found, ())
        assert len(found) == 4


def frozen(fsdp: bool) -> dict[str, object]:
    world = world_of()
    chunk = small_chunk(recompute=HIDDEN, world=world)
    for name, parameter in chunk.module.named_parameters():
        parameter.requires_grad_(name.startswith(("layers.1.", "layers.2.attn.norm", "layers.0.attn.norm")))
    trained = [name for name, parameter in chunk.module.named_parameters() if parameter.requires_grad]
    verdict = verify_parallel(world, DataSettings(fsdp=fsdp), chunk)
    again = make_parallel(chunk, DataSettings(fsdp=fsdp))
    train_step(again, feeds_of(world.rank, 2))
    return {"equal": verdict.equal, "right": [n for n, grad in gradients(again).items() if grad is not None] == trained}


@pytest.mark.parametrize("fsdp", [False, True])
def test_frozen_parameters_take_no_part(ranks: RankPool, fsdp: bool) -> None:
    assert ranks(2, frozen, fsdp, timeout=10.0) == [{"equal": True, "right": True}] * 2


def converted() -> bool:
    """A sharded chunk gets another type, and its own again; steps before that bind nothing anew."""
    world = world_of()
    chunk = parallel_chunk(world, DataSettings(fsdp=True))
    planner = chunk.planner
    for step in (train_step, forward_only, reference_step, train_step):
        step(chunk, feeds_of(world.rank, 1))
    assert chunk.planner is planner
    with pytest.raises(ConfigError, match=r"dtype=.*float64.*: sharded parameters keep the type"):
        chunk.double()
    with pytest.raises(ConfigError, match=r"dtype=.*float64.*: sharded parameters keep the type"):
        train_step(chunk, feeds_of(world.rank, 1))
    chunk.float()
    train_step(chunk, feeds_of(world.rank, 1))
    return True


def test_sharded_parameters_keep_their_type(ranks: RankPool) -> None:
    """FSDP2 gathers into buffers of the type that it knew first."""
    assert ranks(2, converted) == [True] * 2


def replaced(fsdp: bool, ep: int) -> dict[str, tuple[str, ...]]:
    """Gradients of a chunk whose parameters are replaced between two steps, against one that began with them."""
    world = world_of(ep=ep)
    found = {}
    for how in ("assign", "inside") if fsdp else ("assign", "inside", "convert"):
        chunks = [parallel_chunk(world, DataSettings(fsdp=fsdp), {"experts": 4}) for _ in range(2)]
        train_step(chunks[0], feeds_of(world.rank, 1))
        if how == "convert":
            for chunk in chunks:
                chunk.double()
        else:
            target = chunks[0] if how == "assign" else chunks[0].module
            target.load_state_dict(map_values(target.state_dict()), assign=True)
        chunks[1].steps_done = 1
        for chunk in chunks:
            chunk.zero_grad(set_to_none=True)
            train_step(chunk, feeds_of(world.rank, 2, step=1))
        once = [gradients(chunk) for chunk in chunks]
        found[how] = compare(once[1], once[0]).different
    return found


def map_values(state: dict[str, Any]) -> dict[str, Any]:
    """Copies of tensors; anything else as it is."""
    return {name: value.clone() if torch.is_tensor(value) else value for name, value in state.items()}


@pytest.mark.parametrize(("fsdp", "ep"), [(False, 1), (False, 2), (True, 1), (True, 2)])
def test_replaced_parameters_are_reduced(ranks: RankPool, fsdp: bool, ep: int) -> None:
    """Which experts a rank holds alone, and what a bucket holds, is asked of the parameters that are there."""
    for found in ranks(2, replaced, fsdp, ep):
        assert found == dict.fromkeys(found, ())
        assert len(found) == (2 if fsdp else 3)


LOST = "layers.1.attn.norm.weight"


def lost_on_rank_0(fsdp: bool) -> tuple[Any, Any]:
    """A parameter gets a gradient on rank 1 only: its gradient over the ranks, and what this rank alone computes."""
    world = world_of()
    alone = small_chunk()
    reference_step(alone, feeds_of(world.rank, 1))
    chunk = parallel_chunk(world, DataSettings(fsdp=fsdp))
    original = ParameterGroup.backward_done

    def reduce(bucket: Bucket) -> Pending:
        lose(world, dict(chunk.module.named_parameters())[LOST])
        return start_reduction(bucket)

    def backward_done(self: Any, *args: Any, **kw: Any) -> None:
        if self.name == "layers.1":
            lose(world, dict(chunk.module.named_parameters())[LOST])
        original(self, *args, **kw)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "start_reduction", reduce)
        patch.setattr(ParameterGroup, "backward_done", backward_done)
        train_step(chunk, feeds_of(world.rank, 1))
    return gradients(chunk)[LOST], gradients(alone)[LOST]


def lose(world: World, parameter: Any) -> None:
    if world.rank == 0:
        parameter.grad = None


@pytest.mark.parametrize("fsdp", [False, True])
def test_a_gradient_missing_on_one_rank_does_not_hang(ranks: RankPool, fsdp: bool) -> None:
    """Row 59: what a rank sends follows from the plan, so it takes part with zeros."""
    (found, _), (other, own) = ranks(2, lost_on_rank_0, fsdp, timeout=10.0)
    assert torch.equal(found, own / 2)
    assert torch.equal(other, own / 2)


def test_a_parallel_chunk_is_not_copied(ranks: RankPool) -> None:
    assert ranks(2, copied) == ["cannot be copied", "cannot be copied"]


def copied() -> str:
    import copy

    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(parallel_chunk(world_of(), SMALL))
    return "cannot be copied"


def test_reductions_of_a_failed_step_are_forgotten() -> None:
    """Also where nothing begins the next one: a pipeline's plans hold their reductions."""
    chunk = small_chunk()
    alone = Replicas(lambda: lambda _: Reduction(group=None, divide=2, dtype=None), NoLog())
    (bucket,) = alone.buckets(chunk.program)
    (around,) = alone.around(chunk.program, [ChunkRun(plan=backward_of(chunk), backward=0)], reduce=True)
    ((start,),) = around.after.values()
    start()
    alone.abandon()
    for parameter in bucket.parameters:
        parameter.grad = torch.ones_like(parameter)
    alone.end()
    assert all(parameter.grad is not None and bool(parameter.grad.all()) for parameter in bucket.parameters)


def backward_of(chunk: ModelChunk) -> Plan:
    return chunk.planner.plan(PlanRequest(None, RecomputeConfig.none(), chunk.program.trained()))
