"""Kernels of our own compute what the composition of torch's operations computes."""

import copy
from importlib import import_module

import pytest
import torch
from torch import Tensor

from overlap.dispatch import make_routing
from overlap.model import ModelConfig
from overlap.model.attention import LatentAttention
from overlap.model.fused import fused
from overlap.model.latent_heads import turned
from overlap.model.logits import wide_logits
from overlap.model.rope import Rotary
from overlap.model.router import Router

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
permute = import_module("overlap.model.permute")
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
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(4097, 1408), (5000, 7), (0, 32), (3, 16384)])
def test_swiglus_gradient_goes_over_its_input(rows, width, weighted, dtype):
    """To the bit what it is in memory of its own; narrow rows, which several warps load, too."""
    found = []
    for consumes in (False, True, True):
        x, probs = leaf(rows, 2 * width, dtype=dtype), leaf(rows, dtype=torch.float32)
        inner = x * 1
        grads: list[Tensor] = []
        inner.register_hook(grads.append)
        out = swiglu.swiglu(inner, probs if weighted else None, consumes=consumes)
        out.backward(torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out).to(dtype))
        assert not rows or (inner.data_ptr() == grads[0].data_ptr()) == consumes
        found.append([grads[0], *([probs.grad] if weighted else [])])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("packed", [False, True])
def test_latent_heads(packed, dtype):
    config = ModelConfig(hidden=64, heads=3, kv_rank=32, nope_dim=24, rope_dim=16, value_dim=40, max_seq=64)
    rotary = Rotary(config).to(DEVICE)
    attention = LatentAttention(config, rotary)
    queries, expanded = leaf(66, 3 * 40, dtype=dtype), leaf(66, 3 * 64, dtype=dtype)
    latent = leaf(66, 48, dtype=dtype)
    positions = torch.randint(64, (2, 34), device=DEVICE)[:, :-1] if packed else None
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
    padding = (torch.arange(100, device=DEVICE) % 3 == 1)[::2] if padded else None
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


def choice(tokens, topk, *, capacity=None, padded=False):
    scores = torch.rand(tokens, 12, generator=torch.Generator().manual_seed(tokens))
    padding = torch.arange(tokens, device=DEVICE) % 3 == 1 if padded else None
    return make_routing(scores.topk(topk, dim=-1).indices.to(DEVICE), 12, padding, capacity)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.dtype is torch.bfloat16 else torch.int32)


def summed(rows: Tensor, routing) -> Tensor:
    """From the first slot to the last, in float32; dropped copies read zeros."""
    padded = torch.cat([rows, torch.zeros_like(rows[:1])])
    first, *rest = padded[routing.inverse.long()].view(-1, routing.topk, *rows.shape[1:]).unbind(1)
    total = first.float() if rest else first
    for other in rest:
        total = total + other.float()
    return total.to(rows.dtype)


def special(x: Tensor) -> Tensor:
    """Its first row negative zeros, its second all of a NaN with a payload."""
    x = x.detach().clone()
    x[:1] = -0.0
    bits(x)[1:2] = 0x7FC1 if x.dtype is torch.bfloat16 else 0x7FC00001
    return x


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("settings", [{}, {"capacity": 3}, {"padded": True}, {"capacity": 30, "padded": True}], ids=str)
@pytest.mark.parametrize("topk", [1, 2, 6])
@pytest.mark.parametrize(("tokens", "width"), [(50, 64), (7, 2049), (257, 5000)])
def test_permute_has_the_bits_of_torchs_gathers(tokens, width, topk, settings, dtype, monkeypatch):
    routing = choice(tokens, topk, **settings)
    x, weights = special(leaf(tokens, width, dtype=dtype)), special(leaf(tokens, topk, dtype=dtype))
    gaps = routing.capacity is not None
    assert fused(x)
    found = [
        permute.permute(x, routing),
        permute.permute(x.t().contiguous().t(), routing),
        permute.permute(x[:1].expand_as(x), routing),
        permute.reorder(weights, routing),
        permute.unpermute_adjoint(x, routing),
    ]
    monkeypatch.setattr(permute, "fused", lambda x: False)
    expected = [
        permute.permute(x, routing),
        permute.permute(x, routing),
        permute.permute(x[:1].expand_as(x), routing),
        permute.reorder(weights, routing),
        permute._select(x, routing.token, gaps),
    ]
    for one, other in zip(found, expected, strict=True):
        assert one.is_contiguous()
        assert one.dtype is other.dtype
        assert torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("settings", [{}, {"capacity": 3}, {"padded": True}], ids=str)
@pytest.mark.parametrize("topk", [1, 2, 6])
@pytest.mark.parametrize(("tokens", "width"), [(50, 64), (7, 2049), (257, 5000)])
def test_unpermute_adds_in_slot_order(tokens, width, topk, settings, dtype, monkeypatch):
    routing = choice(tokens, topk, **settings)
    rows = leaf(routing.source.numel(), width, dtype=dtype)
    found = permute.unpermute(rows, routing)
    assert torch.equal(bits(found), bits(summed(rows.detach(), routing)))
    (grad,) = torch.autograd.grad(found, rows, leaf(width, dtype=dtype).detach().expand_as(found))
    assert torch.equal(bits(grad), bits(permute.permute(leaf(width, dtype=dtype).detach().expand_as(found), routing)))
    x, weights = leaf(tokens, width, dtype=dtype), leaf(tokens, topk, dtype=dtype)
    (grad,) = torch.autograd.grad(permute.permute(x, routing), x, rows.detach())
    assert torch.equal(bits(grad), bits(found))
    (grad,) = torch.autograd.grad(permute.reorder(weights, routing), weights, rows.detach()[:, 0])
    wanted = torch.cat([rows.detach()[:, 0], rows.detach().new_zeros(1)])[routing.inverse.long()]
    assert torch.equal(bits(grad.flatten()), bits(wanted))
    monkeypatch.setattr(permute, "fused", lambda x: False)
    close(found, permute.unpermute(rows, routing))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sums_keep_negative_zeros_and_nans(dtype):
    routing = choice(4, 2)
    rows = leaf(8, 32, dtype=dtype).detach()
    rows[routing.inverse[:2].long()] = -0.0
    rows[routing.inverse[3].long()] = float("nan")
    found = permute.unpermute(rows, routing)
    assert torch.equal(bits(found[0]), bits(torch.full_like(found[0], -0.0)))
    assert found[1].isnan().all()
    assert not found[2:].isnan().any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(513, 96), (513,), (0, 96)])
def test_take_rows(shape, dtype):
    order = torch.randperm(shape[0], device=DEVICE)
    rows, grad = leaf(*shape, dtype=dtype), leaf(*shape, dtype=dtype).detach()
    taken = permute.take_rows(rows, order, order.argsort())
    assert torch.equal(taken, rows[order])
    (found,) = torch.autograd.grad(taken, rows, grad)
    assert torch.equal(found[order], grad)


@pytest.mark.parametrize("capacity", [None, 2])
def test_permute_without_tokens(capacity):
    """With a capacity there are rows all the same: zeros."""
    routing = choice(0, 2, capacity=capacity)
    x = leaf(0, 64, dtype=torch.bfloat16)
    rows = permute.permute(x, routing)
    assert rows.shape == (0 if capacity is None else 24, 64)
    assert not rows.any()
    assert permute.unpermute(rows, routing).shape == (0, 64)


def test_unpermute_allocates_its_result_alone():
    routing = choice(512, 6)
    rows = leaf(512 * 6, 1024, dtype=torch.bfloat16).detach()
    permute.unpermute(rows, routing)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = permute.unpermute(rows, routing)
    assert torch.cuda.max_memory_allocated() - before == found.nbytes


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
