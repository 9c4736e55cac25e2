"""Kernels of our own compute what the composition of torch's operations computes."""

import copy
from importlib import import_module

import pytest
import torch
from torch import Tensor

from overlap.model import ModelConfig
from overlap.model.attention import LatentAttention
from overlap.model.fused import fused
from overlap.model.latent_heads import turned
from overlap.model.logits import wide_logits
from overlap.model.rope import Rotary
from overlap.model.router import Router

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
swiglu = import_module("overlap.model.swiglu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype).requires_grad_()


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 4)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(5, 96), (4097, 1408), (0, 32)])
def test_swiglu(rows, width, weighted, dtype, monkeypatch):
    x = leaf(rows, 2 * width, dtype=dtype)
    probs = leaf(rows, dtype=torch.float32) if weighted else None
    leaves = [x] if probs is None else [x, probs]
    grad = torch.randn(rows, width, device=DEVICE, dtype=dtype) / width**0.5
    assert fused(x.detach())
    out = swiglu.swiglu(x, probs)
    results = [out, *torch.autograd.grad(out, leaves, grad)]
    monkeypatch.setattr(swiglu, "fused", lambda x: False)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out = swiglu.swiglu(*wide)
    for found, expected in zip(results, [out, *torch.autograd.grad(out, wide, grad.double())], strict=True):
        close(found, expected.to(found.dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("packed", [False, True])
def test_latent_heads(packed, dtype):
    config = ModelConfig(hidden=64, heads=3, kv_rank=32, nope_dim=24, rope_dim=16, value_dim=40, max_seq=64)
    rotary = Rotary(config).to(DEVICE)
    attention = LatentAttention(config, rotary)
    queries, expanded = leaf(66, 3 * 40, dtype=dtype), leaf(66, 3 * 64, dtype=dtype)
    latent = leaf(66, 48, dtype=dtype)
    positions = torch.randint(64, (2, 33), device=DEVICE) if packed else None
    results = []
    for make in (turned, attention._turned):
        outputs = make(rotary, positions, queries, expanded, latent[..., 32:], (2, 33, 3))
        grads = [torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out).to(dtype) for out in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, (queries, expanded, latent), grads)])
    for found, expected in zip(*results, strict=True):
        close(found, expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"score": "softmax", "topk": 3},
        {"topk": 1},
        {"route_scale": 2.5},
        {"per_token_loss": True, "aux_coefficient": 0.5, "z_coefficient": 0.25},
        {"aux_coefficient": 0.0, "z_coefficient": 0.25},
    ],
)
def test_router(settings, padded, monkeypatch):
    """Against float64 at the same choice; a gradient's small elements are differences of large ones."""
    config = ModelConfig(**{"hidden": 64, "experts": 12, "topk": 4, **settings})
    router = Router(config).to(DEVICE)
    router.weight.data = leaf(12, 64, dtype=torch.float32).detach()
    x = leaf(50, 64, dtype=torch.float32)
    padding = torch.arange(50, device=DEVICE) % 3 == 1 if padded else None
    assert fused(x.detach())
    routed = router(x, padding=padding)
    exact, wide = copy.deepcopy(router).double(), x.detach().double().requires_grad_()
    results = []
    for arm, leaves in (
        (routed, (x, router.weight)),
        (exact(wide, routed.routing, padding=padding), (wide, exact.weight)),
    ):
        outputs = [arm.probs, *arm.losses]
        results.append([*outputs, *torch.autograd.grad([out.square().sum() for out in outputs], leaves)])
    for found, expected in zip(*results, strict=True):
        assert (found.dtype, expected.dtype) == (torch.float32, torch.float64)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-4 * expected.abs().max().item())
    monkeypatch.setattr("overlap.model.router.fused", lambda x: False)
    assert torch.equal(routed.routing.source, router(x, padding=padding).routing.source)


def test_logits_of_narrow_tensors():
    """One product of bfloat16 factors is as good as a product of their casts."""
    x, weight = leaf(50, 64, dtype=torch.bfloat16), leaf(12, 64, dtype=torch.bfloat16)
    found = wide_logits(x, weight)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, x.float() @ weight.float().t(), rtol=1e-5, atol=1e-5)
    assert torch.equal(found, wide_logits(x.detach(), weight.detach())), "with and without a graph"
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(found, wide_logits(x, weight))
    grad = torch.linspace(-1, 1, found.numel(), device=DEVICE).view_as(found)
    grads = torch.autograd.grad(found, (x, weight), grad)
    for one, expected in zip(grads, (grad @ weight.float(), grad.t() @ x.float()), strict=True):
        assert torch.equal(one, expected.bfloat16())
