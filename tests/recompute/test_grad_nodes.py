"""AccumulateGrad nodes: who holds one is found out without running it; a run calls the hooks and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recompute import wgrad
from recompute.grad_nodes import node_is_held, run_node
from recompute.wgrad import WeightGradients, adding_in_place, collect_weight_gradients, weight_gradient


def node_of(weight: Tensor) -> Any:
    """As a bucketed reducer asks for it."""
    function = weight.expand_as(weight).grad_fn
    assert function is not None
    return function.next_functions[0][0]


def test_a_node_is_held_while_somebody_holds_it() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    assert not node_is_held(weight)
    node = node_of(weight)
    assert node_is_held(weight)
    assert node.metadata == {}, "no mark stays"
    del node
    assert not node_is_held(weight)
    graph = weight * 2
    assert node_is_held(weight)
    del graph
    with torch.no_grad():
        assert not node_is_held(weight)


def test_a_node_held_outside_python_is_seen(tmp_path: Path) -> None:
    """DistributedDataParallel of torch keeps its nodes in C++."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        module = nn.Linear(2, 2)
        assert not node_is_held(module.weight)
        replica = nn.parallel.DistributedDataParallel(module)
        assert node_is_held(module.weight)
        del replica
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("grad", [None, torch.ones(3)])
def test_a_run_calls_the_hooks_and_adds_nothing(grad: Tensor | None) -> None:
    weight, calls = nn.Parameter(torch.zeros(3)), []
    weight.grad = grad
    node = node_of(weight)
    node.register_hook(lambda inputs, outputs: calls.append((inputs, outputs)))
    with torch.no_grad():
        run_node(weight)
    assert calls == [((), (None,))]
    assert weight.grad is grad
    assert grad is None or grad.tolist() == [1.0] * 3


@pytest.mark.parametrize("late", [False, True])
def test_hooks_of_nodes_are_called_for_gradients_added_in_place(late: bool) -> None:
    """Row 55: once per backward, after the gradient is in `.grad`; with two uses after both."""
    weight, seen = nn.Parameter(torch.zeros(3)), []
    weight.grad = torch.zeros(3)
    node = node_of(weight)
    node.register_hook(lambda *_: seen.append(weight.grad.tolist()))

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, used: Tensor) -> Tensor:
            return used.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            for _ in range(2):
                put = weight_gradient(weight, torch.clone, gradients[0], add=lambda into, g: into.add_(g))
                assert put is None

    for _ in range(2):
        collector = WeightGradients()
        with adding_in_place():
            if late:
                with collect_weight_gradients(collector):
                    Twice.apply(weight.detach().requires_grad_()).sum().backward()
                assert collector.drain() == []
            else:
                Twice.apply(weight).sum().backward()
        assert wgrad._held == {}
    assert seen == [[2.0] * 3, [4.0] * 3]


def test_weights_without_holders_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look is one per weight and block, and nothing more where nobody holds the node."""
    looks: list[Tensor] = []
    runs: list[Tensor] = []

    def nobody(weight: Tensor) -> bool:
        looks.append(weight)
        return False

    monkeypatch.setattr(wgrad, "node_is_held", nobody)
    monkeypatch.setattr(wgrad, "run_node", runs.append)
    weights = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    collector = WeightGradients()
    with adding_in_place():
        for _ in range(3):
            with collect_weight_gradients(collector):
                for weight in weights:
                    weight.grad = torch.zeros(3)
                    weight_gradient(weight, torch.clone, torch.ones(3), add=lambda into, g: into.add_(g))
            assert collector.drain() == []
    assert [id(weight) for weight in looks] == [id(weight) for weight in weights]
    assert runs == []
