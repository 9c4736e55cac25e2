"""train_step and forward_only: exact, clean after failure, and nothing retained."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from overlap.builder import ProgramBuilder
from overlap.chunk import ModelChunk
from overlap.engine import Engine, MicrobatchState
from overlap.ir import Program, Stage
from overlap.lower import Issue
from overlap.orders import ORDER_NAMES
from overlap.recording import RecordingLanes
from overlap.reference import reference_step
from overlap.step import forward_only, step_plans, train_step
from recompute import ConfigError, RecomputeConfig
from recompute.wgrad import weight_gradient
from tests.overlap.programs import Own, TinyModel, differences, result_of, tiny_chunk, tiny_feeds

uniform, block, none = RecomputeConfig.uniform, RecomputeConfig.block, RecomputeConfig.none
CONFIGS = [none(), uniform(1), uniform(2), uniform(8), block(1), block(2)]
EVERYTHING = {"tied": True, "shared": True, "dropout": 0.2, "stateful": True}


@settings(max_examples=40)
@given(
    st.text("MD", max_size=4),
    st.integers(1, 3),
    st.sampled_from(ORDER_NAMES),
    st.lists(st.sampled_from(CONFIGS), min_size=3, max_size=3),
    st.booleans(),
    st.fixed_dictionaries(
        {
            "tied": st.booleans(),
            "shared": st.booleans(),
            "plain_post": st.booleans(),
            "stateful": st.booleans(),
            "dropout": st.sampled_from([0.0, 0.3]),
        }
    ),
)
def test_a_step_is_the_reference_step(
    kinds: str, count: int, order: str, configs: list[RecomputeConfig], delayed: bool, shape: dict[str, Any]
) -> None:
    """R3, rows 37 and 39: any layers, microbatches, order, config per microbatch, two steps."""
    reference = tiny_chunk(kinds, shape=shape)
    chunk = tiny_chunk(kinds, shape=shape, order=order, recompute=configs[:count], delay_wgrad=delayed)
    for _ in range(2):
        results = []
        for one, step in ((reference, reference_step), (chunk, train_step)):
            torch.manual_seed(1)
            losses = step(one, tiny_feeds(count))
            results.append({**result_of(one), **{f"loss {n}": loss["loss"] for n, loss in enumerate(losses)}})
        assert differences(*results) == []
        assert all(torch.isfinite(loss["loss"]) for loss in losses)


def test_row_35_a_ragged_last_group_trains() -> None:
    """Row 35: five layers in groups of two."""
    results = []
    for step, config in ((reference_step, none()), (train_step, uniform(2))):
        chunk = tiny_chunk("MMMMM", recompute=config)
        step(chunk, tiny_feeds(2))
        results.append(result_of(chunk))
    assert differences(*results) == []


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_row_57_two_calls_are_one_call_of_twice_the_size(config: RecomputeConfig) -> None:
    """Row 57: losses are scaled, never stored gradients."""
    once, twice = (tiny_chunk("MM", shape={"tied": True}, recompute=config) for _ in range(2))
    feeds = tiny_feeds(4)
    train_step(once, feeds)
    train_step(twice, feeds[:2], accumulate=2)
    train_step(twice, feeds[2:], accumulate=2)
    assert differences(result_of(once), result_of(twice)) == []


def test_steps_add_to_the_gradients_that_are_there() -> None:
    chunk = tiny_chunk("M")
    train_step(chunk, tiny_feeds(1))
    once = result_of(chunk)["grad module.embedding"].clone()
    train_step(chunk, tiny_feeds(1))
    assert torch.equal(result_of(chunk)["grad module.embedding"], once + once)


class Tripped(Exception):
    """What the tests below raise."""


class Trip:
    """Raises at its n-th step; counts them."""

    def __init__(self) -> None:
        self.at: int | None = None
        self.count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1
        if self.count == self.at:
            raise Tripped(f"at {self.count}")

    def arm(self, at: int | None) -> None:
        self.at, self.count = at, 0


class TripAround:
    """Observer that trips before and after every slot."""

    def __init__(self, trip: Trip) -> None:
        self.before: Callable[[Issue, MicrobatchState], None] = trip
        self.after: Callable[[Issue, MicrobatchState], None] = trip


class TrippingModel(TinyModel):
    """A tiny model whose stages trip inside forward, adjoint and autograd's backward."""

    trip: Trip

    def program(self) -> Program:
        program = super().program()
        return replace(program, stages=tuple(self._wrapped(stage) for stage in program.stages))

    def _wrapped(self, stage: Stage) -> Stage:
        def forward(*values: Any, **keywords: Any) -> Any:
            result = stage.forward(*values, **keywords)
            self.trip()
            for output in result if isinstance(result, tuple) else (result,):
                if torch.is_tensor(output) and output.grad_fn is not None:
                    output.register_hook(self.trip)
            return result

        def adjoint(*arguments: Any) -> Any:
            self.trip()
            return stage.adjoint(*arguments) if stage.adjoint is not None else None

        return replace(stage, forward=forward, adjoint=None if stage.adjoint is None else adjoint)


def tripping_chunk() -> tuple[ModelChunk, Trip]:
    torch.manual_seed(7)
    model = TrippingModel("MD", **EVERYTHING)
    model.trip = Trip()
    chunk = ModelChunk(model, recompute=uniform(1), delay_wgrad=True, lanes=RecordingLanes())
    return chunk, model.trip


def surroundings(chunk: ModelChunk) -> list[Any]:
    """What a failed step must leave as it was."""
    return [
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        chunk.steps_done,
        {name: buffer.tolist() for name, buffer in chunk.named_buffers()},
    ]


def fail_and_retry(chunk: ModelChunk, trip: Trip, observers: tuple[Any, ...]) -> Iterator[tuple[int, list[str]]]:
    """Trip a step of two microbatches at every place in turn; gives the place and what its retry got wrong."""
    start = {name: value.clone() for name, value in chunk.named_buffers()}
    feeds = tiny_feeds(2)

    def restart() -> None:
        chunk.zero_grad(set_to_none=True)
        chunk.steps_done = 0
        with torch.no_grad():
            for name, buffer in chunk.named_buffers():
                buffer.copy_(start[name])

    def step(at: int | None) -> None:
        trip.arm(at)
        train_step(chunk, feeds, observers=observers)

    restart()
    step(None)
    wanted, places = result_of(chunk), trip.count
    for at in range(1, places + 1):
        restart()
        before = surroundings(chunk)
        with pytest.raises(Tripped) as caught:
            step(at)
        assert re.fullmatch(r"in slot \S+ of the plan, microbatch [01] of the step", caught.value.__notes__[0])
        assert surroundings(chunk) == before
        lanes = chunk.lanes
        assert isinstance(lanes, RecordingLanes)
        assert (lanes.alive(), lanes.log[-1]) == ([], "join")
        assert weight_gradient(nn.Parameter(torch.ones(1)), torch.neg, torch.ones(1)) is not None, (
            "a collector is still active"
        )
        chunk.zero_grad(set_to_none=True)
        step(None)
        yield at, differences(wanted, result_of(chunk))


@pytest.mark.parametrize("inside", [False, True])
def test_a_failure_at_any_slot_leaves_nothing_and_a_retry_is_exact(inside: bool) -> None:
    """R16, row 62: before and after each slot, and inside each forward, adjoint and autograd backward."""
    chunk, trip = tripping_chunk()
    train_step(chunk, tiny_feeds(2))
    silent = Trip()
    if inside:
        results = dict(fail_and_retry(chunk, trip, ()))
    else:
        results = dict(fail_and_retry(chunk, silent, (TripAround(silent),)))
        slots = sum(len(plan.issues) for plan, _ in step_plans(chunk, 2))
        assert len(results) == 2 * slots
    assert len(results) > 50
    assert {at: names for at, names in results.items() if names} == {}


def test_a_failed_first_step_is_checked_again() -> None:
    """The check of the stages itself may fail in a stage; nothing has started then."""
    chunk, trip = tripping_chunk()
    before = surroundings(chunk)
    trip.arm(3)
    with pytest.raises(Tripped):
        train_step(chunk, tiny_feeds(1))
    assert surroundings(chunk) == before
    assert not chunk.checked


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ([], r"microbatches=\[\]: a step needs at least one"),
        (iter(()), "microbatches=.*: a step needs at least one, in a list"),
        ([{"ids": 1}], r"microbatches\[0\]=\['ids'\]: must feed exactly \['ids', 'target'\]"),
        ([*tiny_feeds(1), {}], r"microbatches\[1\]=\[\]: must feed exactly"),
        ([{**tiny_feeds(1)[0], "mask": 1}], r"microbatches\[0\]=\['ids', 'mask', 'target'\]: must feed exactly"),
    ],
)
@pytest.mark.parametrize("step", [train_step, forward_only, reference_step])
def test_feeds_fit_the_program(step, feeds: list, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        step(tiny_chunk("M"), feeds)


@pytest.mark.parametrize("accumulate", [0, -1, True, 1.5, "2", None])
def test_accumulate_is_a_count(accumulate) -> None:
    with pytest.raises(ConfigError, match=r"accumulate=.*: must be an integer of at least 1"):
        train_step(tiny_chunk("M"), tiny_feeds(1), accumulate)


def test_float16_autocast_is_refused_by_name() -> None:
    with (
        pytest.raises(ConfigError, match=r"autocast dtype=torch\.float16: .* use bfloat16"),
        torch.autocast("cpu", torch.float16),
    ):
        train_step(tiny_chunk("M"), tiny_feeds(1))


def test_forward_only_retains_nothing() -> None:
    """R17, rows 64 and 66: no graph, no replay, no segment input, no effect; the training steps around are exact."""
    plain, mixed = (tiny_chunk("MM", shape=EVERYTHING, recompute=uniform(1)) for _ in range(2))
    gc.collect()
    for _ in range(2):
        for _ in range(3):
            before = surroundings(mixed)
            lanes = mixed.lanes = RecordingLanes()
            outputs = forward_only(mixed, tiny_feeds(2))
            assert surroundings(mixed) == before
            assert not any(output["loss"].requires_grad for output in outputs)
            assert lanes.log[-1] == "join"
            assert not any(" R" in line or " B" in line for line in lanes.log)
        wanted, found = train_step(plain, tiny_feeds(2)), train_step(mixed, tiny_feeds(2))
        assert all(torch.equal(w["loss"], f["loss"]) for w, f in zip(wanted, found, strict=True))
    assert differences(result_of(plain), result_of(mixed)) == []


def test_forward_only_releases_every_value_in_its_plan() -> None:
    states: list[MicrobatchState] = []

    class Keep(Engine):
        def issue(self, issue: Issue, owner: MicrobatchState) -> None:
            super().issue(issue, owner)
            states.append(owner)

    forward_only(tiny_chunk("MD", recompute=uniform(1)), tiny_feeds(1), engine_type=Keep)
    assert states[-1].leftovers() == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_a_step_is_a_forward(mode) -> None:
    """Row 66: under no_grad nothing is replayed, whatever the config."""
    chunk = tiny_chunk("M", recompute=uniform(1))
    with mode():
        losses = train_step(chunk, tiny_feeds(2))
    assert chunk.steps_done == 0
    assert torch.equal(losses[0]["loss"], forward_only(chunk, tiny_feeds(2))[0]["loss"])
    assert all(parameter.grad is None for parameter in chunk.parameters())


def test_effects_come_once_in_microbatch_order() -> None:
    """R5: in microbatch order, then program order, with the first pass's values."""
    seen: list[tuple[str, float]] = []

    def note(index: int) -> Callable[[Tensor], None]:
        return lambda value: seen.append((f"layer {index}", value.item()))

    def scaled(scale: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        return lambda h: (h * scale, (h * scale).detach().sum())

    def build(module: Any, b: ProgramBuilder) -> None:
        h = b.input("x")
        for index, scale in enumerate(module.scales):
            with b.layer(index):
                (h, _) = b.compute(
                    "mix", scaled(scale), h, outputs=("h",), nondiff=("sum",), parameters=(scale,),
                    effects=(("sum", note(index)),),
                )  # fmt: skip
        b.loss(b.compute("head", lambda h: h.sum(), h, outputs=("loss",))[0])

    scales = nn.ParameterList(nn.Parameter(torch.tensor(2.0)) for _ in range(2))
    chunk = ModelChunk(Own(build, scales=scales), recompute=uniform(1), order="plain")
    train_step(chunk, [{"x": torch.tensor([1.0])}, {"x": torch.tensor([10.0])}])
    assert seen == [("layer 0", 2.0), ("layer 1", 4.0), ("layer 0", 20.0), ("layer 1", 40.0)]


def branching(module: Any, b: ProgramBuilder) -> None:
    x = b.input("x", needs_grad=True)
    with b.layer(0):
        (left,) = b.compute("left", lambda x: torch.tanh(x * module.w), x, outputs=("l",), parameters=(module.w,))
        (right,) = b.compute("right", lambda x: x.square() * 0.3, x, outputs=("r",))
        (out,) = b.compute("post", lambda x, right, left: x * right + left, x, right, left, outputs=("out",))
    b.loss(b.compute("head", lambda out: out.sum(), out, outputs=("loss",))[0])


@pytest.mark.parametrize("config", [none(), uniform(1)], ids=str)
def test_gradients_of_fed_values_go_back_to_them(config: RecomputeConfig) -> None:
    """A feed that needs a gradient gets it, as autograd would give it: a leaf, and a result of the caller's graph."""
    results = []
    for step in (reference_step, train_step):
        torch.manual_seed(0)
        leaf, weight, base = torch.randn(9), nn.Parameter(torch.randn(9)), torch.randn(9)
        fed = [leaf.requires_grad_(), base.requires_grad_() * 2, torch.randn(9)]
        chunk = ModelChunk(Own(branching, w=weight), recompute=config, order="plain")
        step(chunk, [{"x": x} for x in fed])
        results.append({"leaf": leaf.grad, "base": base.grad, "weight": weight.grad, "none": fed[2].grad})
    assert differences(*results) == []
    assert results[0]["leaf"] is not None
    assert results[0]["none"] is None


def test_what_an_engine_leaves_behind_is_an_error() -> None:
    class Hoard(Engine):
        def issue(self, issue: Issue, owner: MicrobatchState) -> None:
            super().issue(replace(issue, frees=()), owner)

    with pytest.raises(RuntimeError, match=r"do not consume what they make: \['values of microbatch 0"):
        train_step(tiny_chunk("M"), tiny_feeds(1), engine_type=Hoard)


def test_a_model_without_trainable_parameters_steps() -> None:
    chunk = tiny_chunk("MM", recompute=uniform(1))
    for parameter in chunk.parameters():
        parameter.requires_grad_(False)
    assert len(train_step(chunk, tiny_feeds(2))) == 2
    assert len(reference_step(chunk, tiny_feeds(2))) == 2
    assert all(parameter.grad is None for parameter in chunk.parameters())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_frozen_prefix_and_adapters_train(config: RecomputeConfig) -> None:
    """Row 20 (R6): with a frozen embedding, what trains in layer 0 still gets its gradient."""
    results = []
    for step in (reference_step, train_step):
        chunk = tiny_chunk("MM", recompute=config, delay_wgrad=True)
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(name.endswith("layers.0.mix"))
        step(chunk, tiny_feeds(2))
        results.append(result_of(chunk))
    assert differences(*results) == []
    assert [name for name, value in results[1].items() if name.startswith("grad") and value is not None] == [
        "grad module.layers.0.mix"
    ]
    assert results[1]["grad module.layers.0.mix"].abs().sum() > 0
