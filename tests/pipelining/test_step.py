"""Steps of pipelines in one process: all virtual stages on one rank, handed over without a copy."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap.engine import Engine, MicrobatchState
from overlap.errors import ProgramError
from overlap.ir import Op
from overlap.lower import Issue
from overlap.model.router import Router
from overlap.pipelining import ScheduleKind, evaluate_pipeline, train_pipeline
from overlap.pipelining.channels import Handover
from overlap.pipelining.verify import merge_embedding
from overlap.reference import reference_step
from overlap.step import forward_only
from recompute.config import Method, RecomputeConfig, Replay
from recompute.errors import ConfigError
from tests.pipelining.models import LostGradient, alone, batch, different, make_pipeline, make_reference, small, uniform

NONE = RecomputeConfig.none()


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with alone():
        yield


def compared(
    kind: ScheduleKind,
    rule: RecomputeConfig,
    *,
    stages: int = 2,
    engine_type: Any = Engine,
    steps: int = 1,
    **more: Any,
) -> list[str]:
    """Train both; names of what differs."""
    fields = {
        name: more.pop(name) for name in ("layers", "mtp", "tied", "mhc", "mtp_detach", "cut_attention") if name in more
    }
    config = small(**{"layers": 2, "mtp": 1, **fields})
    count = more.pop("microbatches", 3)
    common = {name: more[name] for name in ("order",) if name in more}
    pipeline = make_pipeline(kind, config, rule, vpp=stages, **more)
    reference = make_reference(kind, config, rule, stages=stages, **common)
    found: list[str] = []
    for step in range(steps):
        feeds = batch(config, count, step)
        expected = reference_step(reference, feeds)
        merge_embedding(reference)
        found += different(pipeline, reference, train_pipeline(pipeline, feeds, engine_type=engine_type), expected)
        for module in (reference, *pipeline.chunks):
            module.zero_grad()
    return found


@pytest.mark.parametrize("kind", ScheduleKind)
def test_every_schedule_equals_autograd(kind: ScheduleKind) -> None:
    stages = 1 if kind is ScheduleKind.ONE_F_ONE_B else 2
    assert compared(kind, uniform(), stages=stages, mtp=1, steps=2) == []


@pytest.mark.parametrize(
    "more",
    [
        {"rule": uniform(1, Replay.HIDDEN), "mhc": 2, "order": "multi_queue"},
        {"rule": NONE, "tied": True, "order": "single_queue"},
        {"rule": uniform(2, Replay.JUST_IN_TIME, Method.BLOCK), "tied": True, "mtp": 0, "layers": 3},
        {"rule": NONE, "mtp_detach": True, "delay_wgrad": True},
        {"rule": uniform(1, Replay.HIDDEN), "cut_attention": True, "mhc": 2, "order": "single_queue"},
    ],
)
def test_rules_and_models(more: dict[str, Any]) -> None:
    assert compared(ScheduleKind.INTERLEAVED, **more) == []


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("rule", [NONE, uniform(1), uniform(1, Replay.JUST_IN_TIME, Method.BLOCK)])
def test_backward_cut_in_two(pin: bool, rule: RecomputeConfig) -> None:
    assert compared(ScheduleKind.ZBV, rule, pin=pin, microbatches=4, layers=3, cut_attention=pin) == []


@pytest.mark.parametrize("per_stage", [(2, 0), (0, 2), (3, 2), (1, 4), (0, 0), (0, 2, 0, 1)])
def test_ragged_and_empty_stages(per_stage: tuple[int, ...]) -> None:
    """Row 37: empty and uneven stages, one of them with the MTP depth and the head alone."""
    layers = sum(per_stage)
    stages = len(per_stage)
    assert compared(ScheduleKind.INTERLEAVED, uniform(), stages=stages, per_stage=per_stage, layers=layers) == []


def test_an_empty_stage_has_no_segment() -> None:
    """Row 37."""
    pipeline = make_pipeline(ScheduleKind.INTERLEAVED, small(layers=2), uniform(), vpp=3, per_stage=(0, 2, 0))
    first, middle, last = pipeline.chunks
    assert [chunk.program.layers for chunk in (first, middle, last)] == [(), (0, 1), ()]
    trained = last.program.trained()
    assert last.planner.side(uniform(), trained).segments == ()
    names = [name for name in pipeline.named_parameters() if name.startswith("head.norm")]
    assert names == ["head.norm.weight"]


def test_replaced_parameters_are_trained() -> None:
    """Plans hold them, and the copies of a tied embedding on one rank share memory anew; evaluation follows too."""
    config = small(layers=2, mtp=1, tied=True)
    pipeline = make_pipeline(ScheduleKind.INTERLEAVED, config, uniform())
    reference = make_reference(ScheduleKind.INTERLEAVED, config, uniform())
    for step in range(2):
        feeds = batch(config, 3, step)
        expected = reference_step(reference, feeds)
        merge_embedding(reference)
        found = train_pipeline(pipeline, feeds)
        assert different(pipeline, reference, found, expected) == []
        for chunk in (reference, *pipeline.chunks):
            chunk.module.load_state_dict(copy.deepcopy(chunk.module.state_dict()), assign=True)
            chunk.zero_grad()
    evaluate_pipeline(pipeline, batch(config, 1))
    first, last = pipeline.shared.first, pipeline.shared.last
    assert first is not None
    assert last is not None
    assert first is dict(pipeline.chunks[0].module.named_parameters())["embedding"]
    assert last.data_ptr() == first.data_ptr()


def test_a_lost_gradient_is_seen() -> None:
    """Negative control of every comparison here."""
    found = compared(ScheduleKind.INTERLEAVED, uniform(), engine_type=LostGradient)
    assert "layers.0.router.weight" in found
    assert not any(name.startswith("layers.1") for name in found)


def test_calls_accumulate_as_one() -> None:
    """Rows 57 and 64's kin: two calls of two microbatches, an evaluation between them, equal the reference's two."""
    config = small(layers=2, mtp=1)
    pipeline = make_pipeline(ScheduleKind.DUALPIPEV, config, uniform())
    reference = make_reference(ScheduleKind.DUALPIPEV, config, uniform())
    for step in range(2):
        feeds = batch(config, 2, step)
        earlier = {name: p.grad for name, p in reference.module.named_parameters() if "embedding" in name}
        for name in earlier:
            reference.module.get_parameter(name).grad = None
        expected = reference_step(reference, feeds, 2)
        merge_embedding(reference)
        for name, gradient in earlier.items():
            parameter = reference.module.get_parameter(name)
            parameter.grad = parameter.grad if gradient is None or parameter.grad is None else gradient + parameter.grad
        found = train_pipeline(pipeline, feeds, 2)
        evaluate_pipeline(pipeline, feeds)
        assert different(pipeline, reference, found, expected) == []


def test_calls_of_unequal_lengths_are_refused() -> None:
    """Row 57: before anything runs, and the calls can go on with as many as before."""
    config = small(layers=2)
    pipeline, feeds = make_pipeline(ScheduleKind.INTERLEAVED, config, uniform()), batch(config, 3)
    train_pipeline(pipeline, feeds, 2, last=False)
    with pytest.raises(ConfigError, match=r"microbatches=2: the calls before had 3"):
        train_pipeline(pipeline, feeds[:2], 2)
    train_pipeline(pipeline, feeds, 2)
    train_pipeline(pipeline, feeds[:2])


def test_evaluation_between_steps_leaves_nothing() -> None:
    """Row 64: evaluations in a row, between training steps, retain and count nothing and give the plain losses."""
    config = small(layers=2, mtp=1, dropout=0.0)
    pipeline = make_pipeline(ScheduleKind.ZBV, config, uniform())
    reference = make_reference(ScheduleKind.ZBV, config, uniform())
    feeds = batch(config, 3)
    buffers = {name: buffer.clone() for name, buffer in pipeline.named_buffers().items()}
    expected = forward_only(reference, feeds)
    for _ in range(3):
        for theirs, ours in zip(expected, evaluate_pipeline(pipeline, feeds), strict=True):
            assert all(torch.equal(theirs[name], ours[name]) for name in theirs.keys() | ours.keys())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in pipeline.named_buffers().items())
    assert all(not stage.states for stage in pipeline.stages)
    for step in range(2):
        data = batch(config, 3, step)
        expected = reference_step(reference, data)
        merge_embedding(reference)
        found = train_pipeline(pipeline, data)
        assert different(pipeline, reference, found, expected) == []
        with torch.no_grad():
            train_pipeline(pipeline, data)
        for module in (reference, *pipeline.chunks):
            module.zero_grad()


class FailsOnce(Engine):
    """Raises in one slot of the backward half of a pair."""

    armed = True

    def _backward(self, issue: Issue, owner: MicrobatchState) -> None:
        if FailsOnce.armed and issue.slot.layer == 0:
            FailsOnce.armed = False
            raise ArithmeticError("planted")
        super()._backward(issue, owner)


def test_a_step_that_failed_leaves_nothing_and_the_next_one_works() -> None:
    """Row 62: a forward chunk of one layer beside a backward chunk of three, and the reverse; one side raises."""
    config = small(layers=4)
    for per_stage in ((1, 3), (3, 1)):
        FailsOnce.armed = True
        pipeline = make_pipeline(ScheduleKind.INTERLEAVED, config, uniform(), per_stage=per_stage)
        reference = make_reference(ScheduleKind.INTERLEAVED, config, uniform())
        feeds = batch(config, 4)
        state = torch.get_rng_state()
        schedule = pipeline.schedule(len(feeds))
        schedule.fwd_recv_ops[9, 9] = schedule.bwd_recv_ops[9, 9] = []
        with pytest.raises(ArithmeticError, match="planted") as caught:
            train_pipeline(pipeline, feeds, engine_type=FailsOnce)
        assert any("B" in note and "of the plan" in note for note in caught.value.__notes__)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(not stage.states for stage in pipeline.stages)
        assert not schedule.fwd_recv_ops
        assert not schedule.bwd_recv_ops
        assert not any(channel._tensors for channel in pipeline.channels if isinstance(channel, Handover))
        for chunk in pipeline.chunks:
            chunk.zero_grad()
        expected = reference_step(reference, feeds)
        assert different(pipeline, reference, train_pipeline(pipeline, feeds), expected) == []


class WatchHead:
    """Observer: notes when the state that the head read is dead."""

    def __init__(self) -> None:
        self.dead_after: list[str] = []
        self._watched: dict[int, Any] = {}
        self._last = ""

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        if issue.slot.op is Op.FORWARD and issue.stage.name == "head":
            state = owner.values[issue.reads[0]]
            name = f"state of {owner.number}"
            self._watched[owner.number] = weakref.finalize(
                state.untyped_storage(), lambda: self.dead_after.append(f"{name} after {self._last}")
            )
        self._last = f"{issue.slot.op.value}{owner.number}.{issue.stage.label}"

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        pass


def test_what_the_head_read_dies_with_its_backward() -> None:
    """Row 53, B30 of reference/megatron.md: the loss stage keeps nothing through a combined forward and backward."""
    config = small(layers=2)
    pipeline = make_pipeline(ScheduleKind.INTERLEAVED, config, uniform())
    watch = WatchHead()
    train_pipeline(pipeline, batch(config, 4), observers=(watch,))
    # The head's backward, or the slot after it, which reads nothing of the head's.
    assert [text.split(" after ")[0] for text in watch.dead_after] == [f"state of {number}" for number in range(4)]
    assert all(text.split(" after ")[1] == f"B{number}.head" for number, text in enumerate(watch.dead_after))


def test_hand_over_makes_no_copy() -> None:
    """The state that one stage sends is the very memory that the next one receives."""
    pipeline = make_pipeline(ScheduleKind.DUALPIPEV, small(layers=2), uniform())
    seen: dict[str, list[int]] = {"send": [], "recv": []}

    class Watch:
        def before(self, issue: Issue, owner: MicrobatchState) -> None:
            if issue.stage.name in seen and issue.slot.op in (Op.FORWARD, Op.NO_GRAD):
                seen[issue.stage.name].append(owner.values[issue.reads[0]].data_ptr())

        def after(self, issue: Issue, owner: MicrobatchState) -> None:
            pass

    train_pipeline(pipeline, batch(small(layers=2), 3), observers=(Watch(),))
    assert len(seen["send"]) == 3
    assert sorted(seen["send"]) == sorted(seen["recv"])


def test_frozen_stages() -> None:
    """A stage that trains nothing still passes the gradient on; one before all training discards it (R6)."""
    config = small(layers=3)
    for frozen in ("layers.2", "layers.0", "embedding"):
        pipeline = make_pipeline(ScheduleKind.INTERLEAVED, config, uniform(), vpp=3)
        reference = make_reference(ScheduleKind.INTERLEAVED, config, uniform())
        for module in (reference.module, *(chunk.module for chunk in pipeline.chunks)):
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(not name.startswith((frozen, "embedding")))
        feeds = batch(config, 3)
        expected = reference_step(reference, feeds)
        assert different(pipeline, reference, train_pipeline(pipeline, feeds), expected) == []


@pytest.mark.parametrize(
    ("feeds", "accumulate", "field"),
    [([], 1, "microbatches"), ([{"ids": torch.zeros(1, 4, dtype=torch.int64)}], 1, r"microbatches\[0\]")],
)
def test_bad_feeds_are_refused(feeds: Any, accumulate: int, field: str) -> None:
    pipeline = make_pipeline(ScheduleKind.INTERLEAVED, small(layers=2), uniform())
    with pytest.raises(ConfigError, match=field):
        train_pipeline(pipeline, feeds, accumulate)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="delay_wgrad"):
        make_pipeline(ScheduleKind.ZBV, small(layers=2), uniform(), delay_wgrad=False)
    with pytest.raises(ConfigError, match="lead=1: has no place in a pipeline"):
        make_pipeline(ScheduleKind.INTERLEAVED, small(layers=2), uniform(), lead=1)
    pipeline = make_pipeline(ScheduleKind.DUALPIPEV, small(layers=2), uniform())
    with pytest.raises(ConfigError, match="at least as many microbatches as stages"):
        train_pipeline(pipeline, batch(small(layers=2), 1))
    with pytest.raises(ConfigError, match="accumulate"):
        train_pipeline(pipeline, batch(small(layers=2), 3), 0)
    assert dist.get_world_size() == 1


def test_stages_are_checked_once_before_the_first_step() -> None:
    """R16: a stage of a later virtual stage that changes a buffer behind the program's back is named."""
    config = small(layers=2)
    pipeline = make_pipeline(ScheduleKind.INTERLEAVED, config, uniform())
    norm: Any = pipeline.chunks[1].module.get_submodule("head.norm")
    norm.register_buffer("calls", torch.zeros(()))

    def count(module: Any, inputs: Any, output: Any) -> None:
        module.calls.add_(1)

    norm.register_forward_hook(count)
    with pytest.raises(ProgramError, match=r"stage head changes buffer 'head\.norm\.calls'"):
        train_pipeline(pipeline, batch(config, 3))
    assert [chunk.checked for chunk in pipeline.chunks] == [True, False]
    assert all(not stage.states for stage in pipeline.stages)


def test_an_effect_that_raises_undoes_those_of_all_stages() -> None:
    """R16: buffers are as before the step, nothing of it stays, and the next step works."""
    pipeline = make_pipeline(ScheduleKind.INTERLEAVED, small(), uniform())
    feeds = batch(small(), 4)
    train_pipeline(pipeline, feeds)
    before = {id(b): b.clone() for chunk in pipeline.chunks for b in chunk.buffers()}
    last = next(m for m in reversed([m for c in pipeline.chunks for m in c.modules()]) if isinstance(m, Router))
    counted = last.tokens_per_expert
    last.tokens_per_expert = torch.zeros(1, dtype=torch.int64)  # adding [E] counts to it raises
    with pytest.raises(RuntimeError, match="shape"):
        train_pipeline(pipeline, feeds)
    last.tokens_per_expert = counted
    after = [(before[id(b)], b) for chunk in pipeline.chunks for b in chunk.buffers() if id(b) in before]
    assert len(after) == len(before)
    assert all(torch.equal(old, new) for old, new in after)
    assert [chunk.steps_done for chunk in pipeline.chunks] == [1] * len(pipeline.chunks)
    train_pipeline(pipeline, feeds)
