"""What must be dead, and when: intermediates, caches, the loss's inputs, reference cycles."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap import ModelChunk, Op, Program, ProgramBuilder, forward_only, train_step
from overlap.check import check_stages
from overlap.engine import Engine, Feeds, MicrobatchState
from overlap.lower import Issue
from recompute import RecomputeConfig
from recompute.checkpoint import LayerResult, PlainLayer, checkpoint_layers
from recompute.tape import Tape
from tests.cases.graveyard import Graveyard, Keeps, buried, containers, live_bytes, live_tensors, reads_of
from tests.cases.model import NONE, B, Box, U, make_chunk, make_feeds, saved_tensors


@pytest.fixture(scope="module", autouse=True)
def _thawed() -> Iterator[None]:
    """What tests froze is the collector's again; until then a collection walks what is new."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_gc() -> Iterator[None]:
    """Nothing here may rely on the garbage collector; what was there before a test is frozen, so not counted."""
    gc.collect()
    gc.disable()
    gc.freeze()
    yield
    gc.enable()


@pytest.mark.parametrize("rule", [U(1), U(2), B(2), NONE], ids=str)
def test_intermediates_die_with_their_backward(rule: RecomputeConfig) -> None:
    """Row 50: after a layer's backward none of its intermediates lives, the garbage collector being off."""
    grave = buried(train_step, make_chunk(rule), make_feeds(2))
    assert grave.failures == []
    assert grave.checked == [(mb, place) for mb in range(2) for place in ("head", 3, 2, 1, 0)]
    assert all(len(grave.saved[mb, layer]) > 40 for mb in range(2) for layer in range(4))
    assert {(mb, f"{layer}.hidden", 0) for mb in range(2) for layer in range(4)} <= grave.values.keys()


def test_graphs_that_somebody_keeps_are_seen() -> None:
    """Row 50: negative control: saved tensors held from outside are found."""
    chunk, feeds = make_chunk(U(1)), make_feeds(1)
    grave = Graveyard(chunk, feeds)
    kept: list[Box] = []

    def hold(box: Box) -> None:
        grave.save(box)
        if grave.slot == (Op.REPLAY, 0, 2, "experts"):
            kept.append(box)

    with saved_tensors(hold):
        train_step(chunk, feeds, observers=(grave,))
    assert grave.failures[0] == (0, 2, f"{len(kept)} saved tensors")
    assert (0, 2, "2.dispatched") in grave.failures
    assert {failure[:2] for failure in grave.failures} == {(0, 2)}


def test_storages_that_an_engine_keeps_are_seen() -> None:
    """Row 50: negative control: every graph and every tensor of the step is dead, but others show their storages."""
    grave = buried(train_step, make_chunk(U(1)), make_feeds(2), partial(Keeps, [], reads_of))
    found = {(mb, layer, f"{layer}.tokens") for mb in range(2) for layer in range(4)}
    assert found <= set(grave.failures)
    assert not any(what.endswith("saved tensors") for _, _, what in grave.failures)


def bytes_of_steps(rule: RecomputeConfig, engine_type: Callable[..., Engine]) -> tuple[int, list[int]]:
    """Live bytes before the first step, the stages having been checked, and after each of three."""
    chunk, feeds = make_chunk(rule), make_feeds(2)
    check_stages(chunk, feeds[0])
    chunk.checked = True
    before = live_bytes()
    sizes = []
    for _ in range(3):
        train_step(chunk, feeds, engine_type=engine_type)
        chunk.zero_grad()
        sizes.append(live_bytes())
    return before, sizes


@pytest.mark.parametrize("rule", [U(1), U(2), B(2)], ids=str)
def test_live_bytes_are_flat(rule: RecomputeConfig) -> None:
    """Row 50: live bytes after each of three steps are those before the first."""
    before, sizes = bytes_of_steps(rule, Engine)
    assert sizes == [before] * 3


def test_bytes_that_live_until_the_next_step_are_seen() -> None:
    """Row 50: negative control: they are the same after every step, but more than before the first."""
    kept: list[Tensor] = []
    before, sizes = bytes_of_steps(U(1), partial(Keeps, kept, reads_of))
    assert len(set(sizes)) == 1
    assert sizes[0] > before


def planner_sizes(chunk: ModelChunk) -> dict[str, int]:
    return {name: len(item) for name, item in vars(chunk.planner).items() if isinstance(item, dict)}


def test_caches_return_to_their_size() -> None:
    """Row 52: forward-only runs, training steps and a forward without backward leave every cache as it was."""
    chunk, feeds = make_chunk(U(1)), make_feeds(2)
    start = containers()
    assert "recompute.wgrad._collectors" in start
    assert start["recompute.wgrad._collectors"] == 0
    for _ in range(10):
        with torch.no_grad():
            forward_only(chunk, feeds[:1])
    assert containers() == start
    plans = []
    for _ in range(3):
        train_step(chunk, feeds)
        plans.append(planner_sizes(chunk))
    assert containers() == start
    assert plans[0] == plans[1] == plans[2], "plans are made once"
    layers = [PlainLayer(module=nn.Linear(8, 8)) for _ in range(3)]
    inputs = torch.randn(4, 8)
    abandoned, _ = checkpoint_layers(layers, inputs * 1, U(1))
    assert abandoned.requires_grad
    count = len(live_tensors())
    del abandoned
    assert containers() == start
    assert len(live_tensors()) < count


def test_a_forward_without_backward_is_forgotten() -> None:
    """Row 52: the inputs that checkpoint_layers() keeps die with the output that nobody differentiated."""
    kept: list[weakref.ref[Box]] = []
    layers = [PlainLayer(module=nn.Linear(8, 8)) for _ in range(3)]
    with saved_tensors(lambda box: kept.append(weakref.ref(box))):
        output, _ = checkpoint_layers(layers, torch.randn(4, 8), U(1))
    assert [ref() is not None for ref in kept] == [True] * 3
    del output
    assert [ref() is not None for ref in kept] == [False] * 3


def footprint() -> tuple[int, int, dict[str, int]]:
    """Live bytes, live tensors, sizes of containers."""
    return live_bytes(), len(live_tensors()), containers()


def growth(run: Callable[[], object]) -> tuple[bool, int]:
    """Whether the footprint is the same after eleven runs as after one, and how many objects there are more."""
    run()
    before = footprint()
    objects = len(gc.get_objects())
    for _ in range(10):
        run()
    grown = len(gc.get_objects()) - objects
    return footprint() == before, grown


class Stopped(Exception):
    """What an abandoned step ends with."""


class Stops(Engine):
    """Runs a step's forwards up to the first backward."""

    def _backward(self, issue: Issue, owner: MicrobatchState) -> None:
        raise Stopped


def abandon(chunk: ModelChunk, feeds: list[Feeds]) -> None:
    """A forward whose backward never comes."""
    with suppress(Stopped):
        train_step(chunk, feeds, engine_type=Stops)


def abandon_layers(layers: Sequence[PlainLayer]) -> None:
    """The same without an engine."""
    output, _ = checkpoint_layers(layers, torch.randn(4, 8), U(1))
    assert output.requires_grad


def test_runs_without_backward_leave_nothing() -> None:
    """Row 52: neither forward-only runs nor forwards whose backward never comes make anything grow."""
    chunk, feeds = make_chunk(U(1)), make_feeds(2)
    layers = [PlainLayer(module=nn.Linear(8, 8)) for _ in range(3)]
    runs: list[Callable[[], object]] = [
        torch.no_grad()(partial(forward_only, chunk, feeds)),
        partial(abandon, chunk, feeds),
        partial(abandon_layers, layers),
    ]
    for run in runs:
        same, grown = growth(run)
        assert same
        assert grown < 10


@pytest.mark.parametrize(("keep", "seen"), [(list, "tensors"), (len, "nothing"), (lambda outputs: [0], "objects")])
def test_a_cache_on_a_chunk_is_seen(keep: Callable[[Any], object], seen: str) -> None:
    """Row 52: negative control: a list on the chunk takes each run's outputs, or a handle that shows no tensor."""
    chunk, feeds = make_chunk(U(1)), make_feeds(2)
    taken: list[object] = []
    chunk.taken = taken

    same, grown = growth(lambda: taken.append(keep(forward_only(chunk, feeds))))
    assert same == (seen != "tensors")
    assert (grown >= 10) == (seen != "nothing")


@pytest.mark.parametrize("rule", [NONE, U(1), U(2)], ids=str)
def test_loss_inputs_die_with_the_loss_backward(rule: RecomputeConfig) -> None:
    """Row 53: at the slot after the head's backward what it read, and what its graph saved, are dead."""
    grave = buried(train_step, make_chunk(rule), make_feeds(3))
    assert grave.failures == []
    assert {(mb, "head") for mb in range(3)} <= set(grave.checked)
    assert {(mb, "3.hidden", 0) for mb in range(3)} <= grave.values.keys()
    assert all(len(grave.saved[mb, "head"]) > 5 for mb in range(3))


@pytest.mark.parametrize("what", [reads_of, lambda tape: [tape]], ids=["reads", "tape"])
def test_loss_inputs_that_an_engine_keeps_are_seen(what: Callable[[Tape], list[Any]]) -> None:
    """Row 53: negative control: an engine keeps what the head read, or its tape."""
    grave = buried(train_step, make_chunk(U(1)), make_feeds(3), partial(Keeps, [], what))
    assert {(mb, "head", "3.hidden") for mb in range(3)} <= set(grave.failures)


class Holder:
    """A layer that writes its output into a state it also reads: the makings of a cycle."""

    draws_rng = False
    state = ()

    def __init__(self) -> None:
        self.linear = nn.Linear(64, 64)
        self.chunk_state: dict[str, Any] = {"layer": self}

    def parameters(self) -> list[nn.Parameter]:
        return list(self.linear.parameters())

    def __call__(self, hidden: Tensor, pinned: Any) -> LayerResult:
        self.chunk_state["input"] = hidden
        self.chunk_state["output"] = torch.tanh(self.linear(hidden))
        return LayerResult(hidden=self.chunk_state["output"], pinned=self.chunk_state)


def test_a_layer_that_holds_its_own_output() -> None:
    """Row 54: five steps over layers that hold their output: live bytes stay flat, no cycle holds a tensor."""
    layers = [Holder() for _ in range(3)]
    sizes = []
    for _ in range(5):
        output, _ = checkpoint_layers(layers, torch.randn(16, 64), U(2))
        output.sum().backward()
        del output
        sizes.append(live_bytes())
    assert len(set(sizes[1:])) == 1
    assert collected_tensors() == 0


class HolderModel(nn.Module):
    """The same for the engine: each stage's closure holds a state with the stage's output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.chunk_state: dict[str, Any] = {}

    def program(self) -> Program:
        b = ProgramBuilder()
        hidden = b.input("hidden")
        for index, layer in enumerate(self.layers):
            with b.layer(index):

                def forward(x: Tensor, index: int = index, layer: nn.Module = layer) -> Any:
                    self.chunk_state[f"out {index}"] = torch.tanh(layer(x))
                    return self.chunk_state[f"out {index}"]

                (hidden,) = b.compute("attn", forward, hidden, outputs=("hidden",), parameters=layer.parameters())
        (loss,) = b.compute("head", torch.sum, hidden, outputs=("loss",))
        b.loss(loss)
        return b.build()


@pytest.mark.parametrize("rule", [U(1), U(2), B(1)], ids=str)
def test_a_stage_that_holds_its_own_output(rule: RecomputeConfig) -> None:
    """Row 54: the same under overlap."""
    chunk = ModelChunk(HolderModel(), recompute=rule)
    sizes = []
    for _ in range(5):
        train_step(chunk, [{"hidden": torch.randn(16, 64)} for _ in range(2)])
        sizes.append(live_bytes())
    assert len(set(sizes[1:])) == 1
    assert collected_tensors() == 0


def collected_tensors() -> int:
    """Tensors that only the garbage collector can free."""
    before = len(live_tensors())
    gc.collect()
    return before - len(live_tensors())


def test_a_cycle_is_seen() -> None:
    """Row 54: negative control: a cycle through a container raises live bytes, and the collector finds it."""
    before = live_bytes()
    box: dict[str, Any] = {"tensor": torch.zeros(1000)}
    box["self"] = box
    del box
    assert live_bytes() == before + 4000
    assert collected_tensors() == 1
    assert live_bytes() == before
