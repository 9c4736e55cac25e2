"""Parts of backend te-modules by themselves, on a GPU; its steps are in test_te.py."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from overlap import ModelChunk, train_step
from overlap.dispatch import make_routing
from overlap.model import ModelConfig, Router, init_weights
from overlap.model.permute import Permutation
from recompute.wgrad import WeightGradients, collect_weight_gradients, weights_left_out
from tests.gpu.test_te import CORE_PRECISIONS, DEVICE, batches, make_chunk

# Transformer Engine's own imports warn.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def _transformer_engine() -> None:
    pytest.importorskip("transformer_engine")


def latent_attention(chunk: ModelChunk) -> Any:
    return chunk.module.get_submodule("layers.0.attn.attention")


def test_modules_are_in_place():
    """Norm and product of both projections run as one module of Transformer Engine, in every precision."""
    te: Any = import_module("transformer_engine.pytorch")
    for precision in ("bf16", "block"):
        chunk = make_chunk(precision, "latent-query", "te-modules")
        train_step(chunk, batches(chunk.module.config)[0])
        attention = latent_attention(chunk)
        for linear in (attention.query[2], attention.key_value):
            assert [type(product._module) for product in linear._normed.values()] == [te.LayerNormLinear]
        for linear in (attention.query[0], attention.latent, attention.output):
            assert linear._normed == {}
            assert type(linear._product._module) is te.Linear
        permutation = chunk.module.get_submodule("layers.0.permutation")
        assert type(permutation) is import_module("overlap.backends.te_permute").TEPermutation
        router = chunk.module.get_submodule("layers.0.router")
        assert type(router) is import_module("overlap.backends.te_router").TERouter


def test_a_norm_and_its_product_are_torchs():
    attentions = [latent_attention(make_chunk("bf16", "latent-query", name)) for name in ("torch", "te-modules")]
    generator = torch.Generator(DEVICE).manual_seed(0)
    scale = torch.rand(64, device=DEVICE, generator=generator) + 0.5
    x, seed = (torch.randn(96, width, device=DEVICE, generator=generator).bfloat16() for width in (64, 384))
    made = []
    for attention in attentions:
        norm, linear = attention.query[1], attention.query[2]
        with torch.no_grad():
            norm.weight.copy_(scale)
        leaf = x.clone().requires_grad_()
        y = attention.normed(norm, linear, leaf)
        made.append((y.detach(), *torch.autograd.grad(y, (leaf, norm.weight, linear.weight), seed)))
    for theirs, ours in zip(*made, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert float((ours - theirs).float().norm() / theirs.float().norm()) < 0.02


@pytest.mark.parametrize("precision", CORE_PRECISIONS)
def test_weight_gradients_of_modules_drain_in_any_order(precision):
    """Not first in, first out, as their own queues are (delay_wgrad_compute): with a norm in front, and without one."""
    chunk = make_chunk(precision, "latent-query", "te-modules")
    module: Any = chunk.module
    attention, context = latent_attention(chunk), module.backend.context(0, module.config.layers)
    down, norm, linear = attention.query
    for weight, call in ((down.weight, down), (linear.weight, partial(attention.normed, norm, linear))):
        inputs = [torch.randn(64, weight.shape[1], device=DEVICE).bfloat16().requires_grad_() for _ in range(3)]
        seed = torch.randn(64, weight.shape[0], device=DEVICE).bfloat16()
        pending = [WeightGradients() for _ in inputs]
        with nullcontext() if context is None else context():
            outputs = [call(x) for x in inputs]
            with weights_left_out():
                late = [call(x) for x in inputs]
        want = [torch.autograd.grad(output, weight, seed)[0] for output in outputs]
        for output, collector in zip(late, pending, strict=True):
            with collect_weight_gradients(collector):
                output.backward(seed)
        assert weight.grad is None
        for turn, number in enumerate((2, 0, 1)):
            ((found, gradient),) = pending[number].drain()
            assert found is weight
            assert torch.equal(gradient, want[number])
            assert not torch.equal(gradient, want[turn]), "control: first in, first out"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("tokens", "topk", "width"), [(1, 1, 96), (130, 1, 256), (257, 8, 1000)])
def test_permutation_is_the_models(tokens, topk, width, padded, dtype):
    """Rows are copies; sums are taken in the same order, in float32."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    experts = 16
    ids = torch.rand(tokens, experts, device=DEVICE, generator=generator).topk(topk).indices
    routing = make_routing(ids, experts, torch.arange(tokens, device=DEVICE) % 3 == 1 if padded else None)
    x, y = (
        torch.randn(count, width, device=DEVICE, generator=generator).to(dtype) for count in (tokens, tokens * topk)
    )
    made = []
    for permutation in (Permutation(), import_module("overlap.backends.te_permute").TEPermutation()):
        there_in, back_in = x.clone().requires_grad_(), y.clone().requires_grad_()
        there, back = permutation.permute(there_in, routing), permutation.unpermute(back_in, routing)
        gradients = (*torch.autograd.grad(there, there_in, y), *torch.autograd.grad(back, back_in, x))
        made.append((there.detach(), back.detach(), permutation.unpermute_adjoint(x, routing), *gradients))
    for theirs, ours in zip(*made, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"expert_bias": False},
        {"score": "softmax", "expert_bias": False},
        {"topk": 1},
        {"expert_groups": 8, "topk_groups": 4},
        {"experts": 256, "expert_groups": 8, "topk_groups": 4},
    ],
)
def test_router_chooses_the_models_experts(settings):
    """But for scores that lie within rounding of each other; and the same ones, in the same order, every time."""
    module: Any = import_module("overlap.backends.te_router")
    router = Router(ModelConfig(**{"hidden": 64, "experts": 64, "topk": 8, **settings}))
    init_weights(router, 3)
    router = router.to(DEVICE)
    router.expert_bias.copy_(torch.linspace(0.2, -0.2, len(router.expert_bias)))
    assert module.offers(router.config)
    made = module.TERouter(router)
    logits = torch.randn(512, len(router.expert_bias), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    found, want = made._pick(logits), router._pick(logits)
    assert found.dtype == want.dtype
    assert float((found.sort().values == want.sort().values).all(-1).float().mean()) > 0.99
    assert all(torch.equal(made._pick(logits), found) for _ in range(20))
