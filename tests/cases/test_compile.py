"""Meetings with torch.compile, saved-tensor hooks and offloaders (kind COMP)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap import ModelChunk, Op, Program, ProgramBuilder, train_step
from tests.cases.model import NONE, U, Watcher, different, make_chunk, make_feeds, run, saved_tensors


class Compiled(nn.Module):
    """Two layers whose functions run under a compiler, with dropout inside."""

    def __init__(self, compiler: Callable[[Any], Any], dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.dropout = dropout
        self.run = compiler(self.layer)

    def layer(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(nn.functional.linear(x, weight, bias)), self.dropout)

    def program(self) -> Program:
        b = ProgramBuilder()
        hidden = b.input("hidden")
        for index, layer in enumerate(self.layers):
            with b.layer(index):

                def forward(x: Tensor, layer: Any = layer) -> Any:
                    return self.run(x, layer.weight, layer.bias)

                (hidden,) = b.compute(
                    "attn", forward, hidden, outputs=("hidden",), parameters=layer.parameters(), draws_rng=True
                )
        (loss,) = b.compute("head", torch.sum, hidden, outputs=("loss",))
        b.loss(loss)
        return b.build()


def gradients(rule: Any, compiler: Callable[[Any], Any], dropout: float) -> list[Tensor]:
    torch.manual_seed(3)
    chunk = ModelChunk(Compiled(compiler, dropout), recompute=rule)
    train_step(chunk, [{"hidden": torch.randn(4, 16)} for _ in range(2)])
    return [p.grad for p in chunk.module.parameters() if p.grad is not None]


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_compiled_layers(dropout) -> None:
    """Row 71: the replay of a compiled layer draws the first pass's mask; nothing here sets the activation budget."""
    kept, redone = (gradients(rule, compiled, dropout) for rule in (NONE, U(1)))
    assert len(kept) == 4
    assert all(torch.equal(a, b) for a, b in zip(kept, redone, strict=True))
    eager = gradients(U(1), lambda function: function, dropout)
    assert all(torch.allclose(a, b) for a, b in zip(eager, redone, strict=True))
    assert torch._functorch.config.activation_memory_budget == 1.0


def test_ambient_hooks() -> None:
    """Row 72: offloading hooks around a step change nothing, and see nothing of a recomputed layer's first pass."""
    chunk, feeds = make_chunk(U(1), layers=2), make_feeds(2)
    expected = run(chunk, feeds)
    with torch.autograd.graph.save_on_cpu():
        assert different(expected, run(chunk, feeds)) == []
    watcher = Watcher()
    packed: dict[Any, int] = defaultdict(int)
    unpacked: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed[watcher.slot and (watcher.slot[0], watcher.slot[2])] += 1
        return tensor.detach().clone()

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert different(expected, run(chunk, feeds, observers=(watcher,))) == []
    inside = {slot: count for slot, count in packed.items() if slot is not None}
    assert {op for op, layer in inside if layer is not None} == {Op.REPLAY}
    assert len(unpacked) == sum(inside.values())


def test_stack_offloader() -> None:
    """Row 73: an offloader that pushes what a layer saves and pops it in backward ends empty, and changes nothing."""
    chunk, feeds = make_chunk(U(1), layers=2), make_feeds(3)
    expected = run(chunk, feeds)
    watcher = Watcher()
    stacks: dict[Any, list[Any]] = defaultdict(list)
    order: list[Any] = []

    def push(tensor: Tensor) -> tuple[Any, int]:
        group = watcher.slot and (watcher.slot[1], watcher.slot[2], watcher.slot[3])
        stacks[group].append(tensor.detach().clone())
        return group, len(stacks[group]) - 1

    def pop(handle: tuple[Any, int]) -> Tensor:
        group, place = handle
        if not order or order[-1] != group:
            order.append(group)
        tensor: Tensor = stacks[group][place]
        stacks[group][place] = None
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(push, pop):
        found = run(chunk, feeds, observers=(watcher,))
    assert different(expected, found) == []
    used = {group: stack for group, stack in stacks.items() if group is not None}
    assert used
    assert all(tensor is None for stack in used.values() for tensor in stack)
    # Groups come back last layer first, one microbatch after another.
    layers = [group[:2] for group in order if group is not None and group[1] is not None]
    assert list(dict.fromkeys(layers)) == [(number, layer) for number in range(3) for layer in (1, 0)]


def test_saved_tensors_are_seen() -> None:
    """Negative control of row 72: without recompute the first pass saves."""
    watcher, seen = Watcher(), set()
    chunk = make_chunk(NONE, layers=2)
    with saved_tensors(lambda box: seen.add(watcher.slot and watcher.slot[0])):
        train_step(chunk, make_feeds(1), observers=(watcher,))
    assert Op.FORWARD in seen
