"""What must be dead, and when: intermediates, caches, the loss's inputs, reference cycles."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overlap.model.head as head_module
from overlap import ModelChunk, Op, Program, ProgramBuilder, forward_only, train_step
from overlap.engine import MicrobatchState
from overlap.lower import Issue
from overlap.model.chunked_loss import linear_cross_entropy
from recompute import RecomputeConfig
from recompute.checkpoint import LayerResult, PlainLayer, checkpoint_layers
from tests.cases.model import NONE, B, Box, U, Watcher, make_chunk, make_feeds, saved_tensors

OPS = (Op.NO_GRAD, Op.FORWARD, Op.REPLAY)


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


def live_tensors() -> list[Tensor]:
    return [item for item in gc.get_objects() if issubclass(type(item), Tensor)]


def live_bytes() -> int:
    """Bytes of all storages that a Python tensor shows."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in live_tensors()}
    return sum(storages.values())


class Graveyard:
    """Weak references to all that a step makes: values by name and generation, tensors saved for backward."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, str, int], weakref.ref[Any]] = {}
        self.saved: dict[tuple[int, int | None], list[weakref.ref[Box]]] = {}
        self.failures: list[str] = []
        self.checked = 0
        self.watcher = Watcher(self._after)

    def save(self, box: Box) -> None:
        if self.watcher.slot is not None:
            _, microbatch, layer, _ = self.watcher.slot
            self.saved.setdefault((microbatch, layer), []).append(weakref.ref(box))

    def saved_alive(self, microbatch: int, layer: int | None) -> int:
        return sum(ref() is not None for ref in self.saved.get((microbatch, layer), ()))

    def values_alive(self, microbatch: int, prefix: str) -> list[str]:
        return [
            name
            for (number, name, _), ref in self.values.items()
            if number == microbatch and name.startswith(prefix) and ref() is not None
        ]

    def _after(self, issue: Issue, owner: MicrobatchState) -> None:
        if issue.slot.op in OPS:
            for key in issue.writes:
                # Losses are handed back to the caller; they are not intermediates.
                if key is not None and torch.is_tensor(owner.values[key]) and key[0] not in owner.outputs:
                    self.values[(owner.number, *key)] = weakref.ref(owner.values[key])


class SegmentGraveyard(Graveyard):
    """Checks, at the first slot after the last backward of a layer, that nothing of it is left."""

    def __init__(self) -> None:
        super().__init__()
        self._done: tuple[int, int] | None = None
        inner = self.watcher.before

        def before(issue: Issue, owner: MicrobatchState) -> None:
            self._check()
            inner(issue, owner)
            if issue.slot.op is Op.BACKWARD and issue.stage.name == "attn" and issue.stage.layer is not None:
                self._done = (owner.number, issue.stage.layer)

        self.watcher.before = before  # type: ignore[method-assign]

    def _check(self) -> None:
        if self._done is None:
            return
        (microbatch, layer), self._done = self._done, None
        self.checked += 1
        if count := self.saved_alive(microbatch, layer):
            self.failures.append(f"{count} saved tensors of layer {layer}, microbatch {microbatch}")
        # counts are kept for the effect, which is applied when the step succeeds
        alive = [name for name in self.values_alive(microbatch, f"{layer}.") if not name.endswith(".counts")]
        self.failures += [f"{name} of microbatch {microbatch}" for name in alive]


@pytest.mark.parametrize("rule", [U(1), U(2), B(2), NONE], ids=str)
def test_intermediates_die_with_their_backward(rule: RecomputeConfig) -> None:
    """Row 50: after a layer's backward none of its intermediates lives, the garbage collector being off."""
    chunk, grave = make_chunk(rule), SegmentGraveyard()
    with saved_tensors(grave.save):
        train_step(chunk, make_feeds(2), observers=(grave.watcher,))
    assert grave.failures == []
    assert grave.checked == 2 * 4
    assert all(len(grave.saved[mb, layer]) > 20 for mb in range(2) for layer in range(4))


def test_intermediates_that_somebody_keeps_are_seen() -> None:
    """Row 50: negative control: a value and a saved tensor held from outside are found."""
    chunk, grave = make_chunk(U(1)), SegmentGraveyard()
    kept: list[object] = []

    def hold(box: Box) -> None:
        grave.save(box)
        if grave.watcher.slot == (Op.REPLAY, 0, 2, "experts"):
            kept.append(box)

    with saved_tensors(hold):
        train_step(chunk, make_feeds(1), observers=(grave.watcher,))
    assert grave.failures == [f"{len(kept)} saved tensors of layer 2, microbatch 0"]


@pytest.mark.parametrize("rule", [U(1), U(2), B(2)], ids=str)
def test_live_bytes_are_flat(rule: RecomputeConfig) -> None:
    """Row 50: live bytes after steps 2 and 3 are those after step 1."""
    chunk, feeds = make_chunk(rule), make_feeds(2)
    sizes = []
    for _ in range(3):
        train_step(chunk, feeds)
        chunk.zero_grad()
        sizes.append(live_bytes())
    assert sizes[0] == sizes[1] == sizes[2]
    leak = torch.zeros(1000)
    assert live_bytes() == sizes[0] + leak.untyped_storage().nbytes()


def containers() -> dict[str, int]:
    """Sizes of all containers at module level of the two packages, function caches included."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("recompute", "overlap"):
            for name, item in vars(module).items():
                if isinstance(item, dict | list | set) and not name.startswith("__"):
                    found[f"{module_name}.{name}"] = len(item)
                elif hasattr(item, "cache_parameters"):  # functools
                    found[f"{module_name}.{name}"] = item.cache_info().currsize
    return found


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


@pytest.mark.parametrize("rule", [NONE, U(1), U(2)], ids=str)
def test_loss_inputs_die_with_the_loss_backward(rule: RecomputeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 53: the loss's input, and what the head's graph saved, are dead right after the head's backward."""
    grave = Graveyard()
    inputs: dict[int, weakref.ref[Tensor]] = {}
    real = linear_cross_entropy
    alive_at: list[tuple[str, int, bool, bool]] = []

    def cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, ignored: int) -> Tensor:
        if grave.watcher.slot is not None:
            inputs[grave.watcher.slot[1]] = weakref.ref(hidden)
        return real(hidden, weight, labels, ignored=ignored)

    def look(issue: Issue, owner: MicrobatchState) -> None:
        grave._after(issue, owner)
        if issue.stage.name == "head":
            mb = owner.number
            alive_at.append((issue.slot.op.value, mb, inputs[mb]() is not None, grave.saved_alive(mb, None) > 1))

    grave.watcher = Watcher(look)
    monkeypatch.setattr(head_module, "linear_cross_entropy", cross_entropy)
    with saved_tensors(grave.save):
        train_step(make_chunk(rule), make_feeds(3), observers=(grave.watcher,))
    # Tensors of microbatch m outside layers: one is the embedding's ids, the others are the head's.
    assert [item for item in alive_at if item[0] == "F"] == [("F", mb, True, True) for mb in range(3)]
    assert [item for item in alive_at if item[0] == "B"] == [("B", mb, False, False) for mb in range(3)]
    assert len(inputs) == 3
    assert not any(grave.values_alive(mb, "3.hidden") for mb in range(3))


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
