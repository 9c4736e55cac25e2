"""Weights: stage functions that read shared parameters as arguments, and modules that are afterwards as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from overlap.builder import ProgramBuilder
from overlap.chunk import ModelChunk
from overlap.model import Decoder, ModelConfig
from overlap.model.weights import Weights
from recompute.errors import ConfigError


def double(x: Tensor, module: nn.Linear) -> Tensor:
    if x.isnan().any():
        raise RuntimeError("nan")
    out: Tensor = module(x) + module(2 * x)
    return out


def test_a_shared_parameter_is_an_argument() -> None:
    b = ProgramBuilder()
    x = b.input("x")
    module = nn.Linear(2, 3)
    weights = Weights(b, {"w": module.get_parameter("weight")}, module)
    bound = weights.bind(lambda x: double(x, module), (x,), (module,))
    assert [value.name for value in bound.reads] == ["x", "weight.w"]
    assert [id(p) for p in bound.parameters] == [id(module.bias)]
    value, leaf = torch.randn(4, 2), torch.randn(3, 2, requires_grad=True)
    before = dict(module.named_parameters())
    out = bound.forward(value, leaf)
    torch.testing.assert_close(out, 3 * value @ leaf.T + 2 * module.bias)
    out.sum().backward()
    assert leaf.grad is not None
    assert module.weight.grad is None
    assert module.bias.grad is not None
    with pytest.raises(RuntimeError, match="nan"):
        bound.forward(value * float("nan"), leaf)
    after = dict(module.named_parameters())
    assert all(after[name] is before[name] for name in before)


def test_a_module_that_is_the_function_itself() -> None:
    """It is then in the stage twice, and must still be put back right."""
    b = ProgramBuilder()
    module = nn.Linear(2, 3)
    bound = Weights(b, {"w": module.get_parameter("weight")}, module).bind(module, (b.input("x"),), (module,))
    weight = module.weight
    for _ in range(2):
        bound.forward(torch.randn(4, 2), torch.randn(3, 2))
        assert module.weight is weight


def test_without_shared_parameters_the_function_is_called_directly() -> None:
    b = ProgramBuilder()
    module = nn.Linear(2, 3)
    bound = Weights(b, {}, module).bind(module, (b.input("x"),), (module,))
    assert bound.forward is module
    assert bound.parameters == (module.weight, module.bias)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


@pytest.mark.parametrize(
    ("settings", "path", "field"),
    [
        ({"tied": True}, "", "embedding"),
        ({"mtp": 1}, "", "embedding"),
        ({"mtp": 1}, "head.norm", "final_norm"),
    ],
)
def test_a_shared_parameter_with_a_parametrisation_is_refused(settings: dict[str, Any], path: str, field: str) -> None:
    """R3: what is computed anew wherever it is read has no gradient that the readers could share."""
    model = Decoder(ModelConfig(**settings))
    ModelChunk(model)
    register_parametrization(model.get_submodule(path), "weight" if path else "embedding", Doubled())
    with pytest.raises(ConfigError, match=f"{field}='Tensor': several stages read it as a value") as raised:
        ModelChunk(model)
    assert raised.value.field == field
