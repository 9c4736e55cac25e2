"""Experts in 8 bits as a layer, with a stand-in for the package."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from overlap.model.experts import GroupedExperts
from overlap.model.graph_only import skips
from tests.backends.te_stand_in import install, recipe, stand_in


def test_experts_leave_their_second_product_out(monkeypatch):
    """The graph is the same, and without one the numbers are those of a recorded pass."""
    _, load = install(monkeypatch)
    products = stand_in(GroupedProduct=MagicMock, NormProduct=MagicMock, Product=MagicMock)
    monkeypatch.setitem(sys.modules, "overlap.backends.te_products", products)
    monkeypatch.setitem(sys.modules, "overlap.backends.te_layers", products)
    del sys.modules["overlap.backends.te_layers"]
    layer: Any = load("te_layers").from_torch_experts(GroupedExperts(2, 16, 8), recipe(block=True), 4, False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    assert skips(layer)
    routing = SimpleNamespace(counts=torch.tensor([3, 4]))
    rows, probs = torch.randn(7, 16, requires_grad=True), torch.rand(7, requires_grad=True)
    outputs, gradients = [], []
    for graph_only in (False, True):
        outputs.append(layer(rows * 1, probs, routing, graph_only=graph_only))
        leaves = (rows, probs, *layer.parameters())
        gradients.append(torch.autograd.grad(outputs[-1], leaves, torch.ones(7, 16)))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert outputs[1].untyped_storage().nbytes() == 4
    with torch.no_grad():
        assert torch.equal(layer(rows, probs, routing), outputs[0])
