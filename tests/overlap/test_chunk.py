"""ModelChunk: copies bind to their own module, the step count travels, settings are checked."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from overlap.builder import ProgramBuilder
from overlap.chunk import ModelChunk
from overlap.contiguous import contiguous_step
from overlap.cuda_graph import GraphedStep
from overlap.engine import MicrobatchState
from overlap.errors import ScheduleError
from overlap.ir import Op, Program
from overlap.lanes import NullLanes
from overlap.lower import Issue
from overlap.orders import Order
from overlap.parallel.world import SOLO, World
from overlap.reference import reference_step
from overlap.scale import PerMicrobatch, PerToken
from overlap.step import forward_only, train_step
from recompute import ConfigError, RecomputeConfig
from recompute.config import Keep
from recompute.keep import Sharded
from tests.overlap.programs import TinyModel, differences, result_of, tiny_chunk, tiny_feeds

uniform, none = RecomputeConfig.uniform, RecomputeConfig.none


def saved_and_loaded(chunk: ModelChunk) -> ModelChunk:
    file = io.BytesIO()
    torch.save(chunk, file)
    file.seek(0)
    loaded: ModelChunk = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)), saved_and_loaded])
@pytest.mark.parametrize("trained_before", [False, True])
def test_a_copy_binds_to_its_own_module(copied, trained_before: bool) -> None:
    chunk = tiny_chunk("MD", shape={"tied": True, "dropout": 0.1}, recompute=uniform(1), delay_wgrad=True, seed=5)
    if trained_before:
        train_step(chunk, tiny_feeds(2))
    chunk.zero_grad(set_to_none=True)
    again = copied(chunk)
    assert again.program is not chunk.program
    assert again.planner is not chunk.planner
    own = {id(parameter) for parameter in again.parameters()}
    assert {id(p) for stage in again.program.stages for p in stage.parameters} <= own
    train_step(again, tiny_feeds(2))
    assert all(parameter.grad is None for parameter in chunk.parameters())
    train_step(chunk, tiny_feeds(2))
    assert differences(result_of(chunk), result_of(again)) == []
    assert again.steps_done == chunk.steps_done == 1 + trained_before


def test_the_step_count_is_in_the_state_dict() -> None:
    """R4: every draw depends on it, so a resumed run draws what the first would have drawn."""
    chunk = tiny_chunk("M", shape={"dropout": 0.3})
    train_step(chunk, tiny_feeds(1))
    fresh = tiny_chunk("M", shape={"dropout": 0.3})
    fresh.load_state_dict(copy.deepcopy(chunk.state_dict()))
    assert fresh.steps_done == 1
    results = []
    for one in (chunk, fresh):
        one.zero_grad(set_to_none=True)
        train_step(one, tiny_feeds(1))
        results.append(result_of(one))
    assert differences(*results) == []


def test_assigned_parameters_are_bound() -> None:
    """load_state_dict(assign=True) puts other parameters in place; the program trains these."""
    chunk, other = (tiny_chunk("MM", shape={"tied": True, "dropout": 0.2}, recompute=uniform(1)) for _ in range(2))
    train_step(chunk, tiny_feeds(1))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    old = list(chunk.parameters())
    chunk.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    assert {id(p) for p in old}.isdisjoint(id(p) for p in chunk.parameters())
    for one in (chunk, other):
        one.zero_grad(set_to_none=True)
        train_step(one, tiny_feeds(2))
    assert differences(result_of(chunk), result_of(other)) == []


def test_a_plain_load_keeps_the_plans() -> None:
    chunk = tiny_chunk("M")
    program = chunk.program
    chunk.load_state_dict(copy.deepcopy(chunk.state_dict()))
    assert chunk.program is program


@pytest.mark.parametrize(
    ("name", "value"),
    [("order", Order.parse("mine", "F.* B.* W.*")), ("delay_wgrad", True), ("lead", 1), ("module", TinyModel("M"))],
)
def test_what_plans_are_made_from_cannot_change(name: str, value: object) -> None:
    """Such a setting would be without effect."""
    chunk = tiny_chunk("M")
    for one in (chunk, copy.deepcopy(chunk)):
        before = getattr(one, name)
        with pytest.raises(ConfigError, match=rf"(?s){name}=.*: is read when a ModelChunk is made"):
            setattr(one, name, value)
        assert getattr(one, name) is before


class Replays:
    """Counts replayed layers per microbatch."""

    def __init__(self) -> None:
        self.count: Counter[int] = Counter()

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        if issue.slot.op is Op.REPLAY and issue.slot.stage == "attn":
            self.count[owner.number] += 1

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        pass


def test_row_39_a_config_per_microbatch_stays_in_its_microbatch() -> None:
    """Row 39: microbatch 0 eager, the others uniform 1; the same in every step, and after a step that failed."""

    class Fail(Replays):
        def before(self, issue: Issue, owner: MicrobatchState) -> None:
            if owner.number == 0 and issue.slot.op is Op.BACKWARD:
                raise RuntimeError("mine")

    configs = (none(), uniform(1), uniform(1), uniform(1))
    chunk = tiny_chunk("MMMM", recompute=list(configs))
    for fails in (False, True, False):
        if fails:
            with pytest.raises(RuntimeError, match="mine"):
                train_step(chunk, tiny_feeds(4), observers=(Fail(),))
        replays = Replays()
        train_step(chunk, tiny_feeds(4), observers=(replays,))
        assert [replays.count[number] for number in range(4)] == [0, 4, 4, 4]
        assert chunk.recompute == configs


def test_configs_match_the_step() -> None:
    assert tiny_chunk("M", recompute=uniform(1)).configs(3) == [uniform(1)] * 3
    chunk = tiny_chunk("M", recompute=[none(), uniform(1)])
    with pytest.raises(ConfigError, match="recompute='2 configs': one config per microbatch: the step has 3"):
        train_step(chunk, tiny_feeds(3))


@pytest.mark.parametrize("recompute", ["uniform", [none(), None], [1], None, 3])
def test_recompute_is_a_config(recompute) -> None:
    with pytest.raises(ConfigError, match=r"recompute=.*must be a RecomputeConfig, or one per microbatch"):
        tiny_chunk("M", recompute=recompute)
    chunk = tiny_chunk("M")
    with pytest.raises(ConfigError, match=r"recompute=.*must be a RecomputeConfig, or one per microbatch"):
        chunk.recompute = recompute
    assert chunk.recompute == none()


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        (RecomputeConfig.selective("mla_up_proj"), "modules='mla_up_proj': this model has no such module"),
        ([none(), RecomputeConfig.selective("mla_up_proj")], "modules='mla_up_proj': this model has no such module"),
        (uniform(1, keep=Keep.SHARDED), r"keep='sharded': needs ModelChunk\(shards="),
    ],
)
def test_recompute_set_later_is_checked_alike(recompute: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_chunk("M", recompute=recompute)
    chunk = tiny_chunk("M", recompute=uniform(1))
    for one in (chunk, copy.deepcopy(chunk)):
        with pytest.raises(ConfigError, match=message):
            one.recompute = recompute
        assert one.recompute == uniform(1)


def test_a_list_set_later_is_kept_as_it_was() -> None:
    chunk = tiny_chunk("M")
    configs = [none(), uniform(1)]
    chunk.recompute = configs
    configs[0] = uniform(1)
    assert chunk.recompute == (none(), uniform(1))
    replays = Replays()
    train_step(chunk, tiny_feeds(2), observers=(replays,))
    assert [replays.count[number] for number in range(2)] == [0, 1]


@pytest.mark.parametrize("value", ["false", None, 1])
def test_delay_wgrad_is_a_bool(value: Any) -> None:
    """A text would be true."""
    with pytest.raises(ConfigError, match=r"delay_wgrad=.*: must be True or False"):
        tiny_chunk("M", delay_wgrad=value)


BAD: dict[str, list[Any]] = {
    "seed": [None, "0", 1.0, True],
    "loss_scale": [PerToken, PerMicrobatch, None, 1.0],
    "lanes": [None, NullLanes, "cpu"],
    "shards": [1, Sharded],
    "world": [None, World, 0],
    "steps_done": [None, -1, 1.0, "0"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_settings_are_what_they_should_be(name: str, value: Any) -> None:
    """When the chunk is made and later; a class in place of an instance is seen too."""
    chunk = tiny_chunk("M")
    before = getattr(chunk, name)
    with pytest.raises(ConfigError, match=f"^{name}=.*: must be "):
        setattr(chunk, name, value)
    assert getattr(chunk, name) is before
    if name != "steps_done":
        with pytest.raises(ConfigError, match=f"^{name}=.*: must be "):
            ModelChunk(chunk.module, order=chunk.order, **{name: value})


class Otherwise(torch.nn.Module):
    """Its program is none."""

    def program(self) -> Any:
        return [1]


@pytest.mark.parametrize("module", [None, TinyModel, "model", torch.nn.Linear(1, 1), Otherwise()], ids=repr)
def test_the_module_is_one_with_a_program(module: Any) -> None:
    with pytest.raises(ConfigError, match=r"^module=.*: must .*program\(\)"):
        ModelChunk(module)


@pytest.mark.parametrize("step", [train_step, forward_only, reference_step, contiguous_step, GraphedStep])
def test_steps_take_a_chunk(step: Any) -> None:
    with pytest.raises(ConfigError, match=r"^chunk='TinyModel': must be a ModelChunk"):
        step(tiny_chunk("M").module, tiny_feeds(1))


def test_an_order_is_held_against_the_program_by_the_first_step() -> None:
    chunk = tiny_chunk("M", order=Order.parse("short", "F.attn B.attn"))
    with pytest.raises(ScheduleError):
        train_step(chunk, tiny_feeds(1))


@pytest.mark.parametrize(("name", "value"), [("recompute", uniform(1)), ("seed", 3), ("loss_scale", PerMicrobatch())])
def test_what_ranks_compared_is_compared_again_once_set(name: str, value: object) -> None:
    chunk = tiny_chunk("M")
    assert not chunk.agreed
    for _ in range(2):
        train_step(chunk, tiny_feeds(1))
        assert chunk.agreed
        setattr(chunk, name, value)
        assert not chunk.agreed
        assert chunk.checked


def test_float16_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"dtype=torch\.float16: float16 needs a loss scaler"):
        ModelChunk(TinyModel("M").half())


def test_orders_by_name_or_as_they_are() -> None:
    order = Order.parse("mine", "F.* B.* W.*")
    assert tiny_chunk("M", order=order).order is order
    assert tiny_chunk("M").order.name == "multi_queue"
    with pytest.raises(ScheduleError, match="order 'fast' is unknown"):
        tiny_chunk("M", order="fast")


def test_freezing_between_steps_makes_new_plans() -> None:
    """R6: what trains is looked up at every step."""
    chunk = tiny_chunk("MM", recompute=uniform(1))
    train_step(chunk, tiny_feeds(1))
    chunk.get_parameter("module.embedding").requires_grad_(False)
    for parameter in chunk.get_submodule("module.layers.0").parameters():
        parameter.requires_grad_(False)
    chunk.zero_grad(set_to_none=True)
    replays = Replays()
    train_step(chunk, tiny_feeds(1), observers=(replays,))
    assert replays.count[0] == 1
    assert [name for name, p in chunk.named_parameters() if p.grad is not None and "layers.0" in name] == []


class Bare(torch.nn.Module):
    """No parameters."""

    def program(self) -> Program:
        b = ProgramBuilder()
        (loss,) = b.compute("head", torch.sum, b.input("x", needs_grad=True), outputs=("loss",))
        b.loss(loss)
        return b.build()


def test_a_chunk_without_parameters_is_where_its_rank_is() -> None:
    """An empty pipeline stage draws from its rank's generators and takes its precision."""
    chunk = ModelChunk(Bare(), world=replace(SOLO, device=torch.device("meta")))
    assert chunk.device == torch.device("meta")
