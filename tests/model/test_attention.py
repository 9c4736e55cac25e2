"""Attention against a plain softmax, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap.model import DType, ModelConfig, init_weights
from overlap.model.attention import ATTENTIONS, GroupedQueryAttention, LatentAttention
from overlap.model.precision import default_dtype
from overlap.model.rope import Rotary
from recompute.inner import rebuilding
from recompute.modules import RecomputeModule

SHAPES: dict[str, dict[str, Any]] = {
    "mla": {"kv_rank": 6, "nope_dim": 3, "rope_dim": 4, "value_dim": 5},
    "gqa": {"kv_heads": 2, "head_dim": 4},
}
KINDS = [{"attention": "mla"}, {"attention": "mla", "q_rank": 5}, {"attention": "gqa"}]


def make(**settings: Any) -> Any:
    shape = SHAPES[settings["attention"]]
    config = ModelConfig(hidden=12, heads=4, dtype=DType.FLOAT64, **shape, **settings)
    with default_dtype(torch.float64):
        module = ATTENTIONS[config.attention](config, Rotary(config))
    init_weights(module, 0)
    return module


def softmax_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[B, H, S, d] each -> [B, S, H*d]."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ value
    return mixed.transpose(1, 2).flatten(-2)


def rotate(x: Tensor) -> Tensor:
    """Turn dimension pairs (i, i + d/2) of [..., S, d] by position / 10000^(2i/d), as complex numbers."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] / 10000.0 ** (torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


def heads(x: Tensor, count: int) -> Tensor:
    return torch.stack(x.chunk(count, -1), 1)


def explicit_latent(module: LatentAttention, x: Tensor) -> Tensor:
    query = heads(module.query(x), 4)
    down = x @ module.latent.weight.T
    latent, k_rope = down[..., :6], rotate(down[..., 6:])
    latent = latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expanded = heads(latent @ module.key_value.weight.T, 4)
    key = torch.cat((expanded[..., :3], torch.stack([k_rope] * 4, 1)), -1)
    query = torch.cat((query[..., :3], rotate(query[..., 3:])), -1)
    return softmax_attention(query, key, expanded[..., 3:]) @ module.output.weight.T


def explicit_grouped(module: GroupedQueryAttention, x: Tensor) -> Tensor:
    query = rotate(heads(x @ module.query.weight.T, 4))
    key = rotate(heads(x @ module.key.weight.T, 2)).repeat_interleave(2, 1)
    value = heads(x @ module.value.weight.T, 2).repeat_interleave(2, 1)
    return softmax_attention(query, key, value) @ module.output.weight.T


@pytest.mark.parametrize("settings", KINDS)
def test_equals_explicit_softmax(settings: dict[str, Any]) -> None:
    module = make(**settings)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    explicit = explicit_latent if isinstance(module, LatentAttention) else explicit_grouped
    torch.testing.assert_close(module(x), explicit(module, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("settings", KINDS)
def test_gradients(settings: dict[str, Any]) -> None:
    module = make(**settings)
    names = [name for name, _ in module.named_parameters()]
    x = torch.randn(1, 3, 12, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,))
        return result

    assert torch.autograd.gradcheck(call, (x, *module.parameters()), fast_mode=True)


@pytest.mark.parametrize("settings", KINDS)
def test_with_and_without_graph_the_same_bits(settings: dict[str, Any]) -> None:
    """A first pass without graph and its replay with one must agree."""
    module = make(**settings).float()
    x = torch.randn(2, 7, 12)
    with torch.no_grad():
        first = module(x)
    assert torch.equal(first, module(x.requires_grad_()))


@pytest.mark.parametrize("rebuilt", [False, True])
@pytest.mark.parametrize("q_rank", [0, 5])
def test_the_query_is_rebuilt_with_what_it_is_part_of(q_rank: int, rebuilt: bool) -> None:
    """It would be the largest tensor kept. What comes before it runs once."""
    module = make(attention="mla", q_rank=q_rank)
    calls: dict[str, int] = {"query": 0, "latent": 0}

    def count(name: str) -> None:
        calls[name] += 1

    query = module.query[2] if q_rank else module.query
    for name, layer in (("query", query), ("latent", module.latent)):
        layer.register_forward_pre_hook(lambda *_, name=name: count(name))
    with rebuilding({RecomputeModule.MLA_UP_PROJ} if rebuilt else set()):
        y = module(torch.randn(1, 3, 12, dtype=torch.float64, requires_grad=True))
    y.sum().backward()
    assert calls == {"query": 1 + rebuilt, "latent": 1}


@pytest.mark.parametrize("settings", KINDS)
def test_the_past_does_not_see_the_future(settings: dict[str, Any]) -> None:
    module = make(**settings)
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    changed = x.clone()
    changed[:, 4:] += 1
    torch.testing.assert_close(module(x)[:, :4], module(changed)[:, :4])


@pytest.mark.parametrize("settings", KINDS)
def test_dropout_only_in_training(settings: dict[str, Any]) -> None:
    module = make(**settings, attention_dropout=0.5)
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_rotary_depends_on_distance_only() -> None:
    rotary = Rotary(ModelConfig(hidden=12, heads=4, dtype=DType.FLOAT64, **SHAPES["mla"]))
    query, key = torch.randn(2, 4, dtype=torch.float64)
    dots = rotary(query.expand(10, 4)) @ rotary(key.expand(10, 4)).T
    torch.testing.assert_close(dots[3, 1], dots[9, 7])
    assert rotary(query.expand(10, 4))[0].equal(query)


def test_rotary_tables_stay_wide() -> None:
    rotary = Rotary(ModelConfig())
    cos = rotary.cos.clone()
    rotary.to(torch.bfloat16)
    assert torch.equal(rotary.cos, cos)
