"""The Transformer Engine backend by kernels beside its modules, and what a step by kernels asks of the host."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from overlap import ProgramError, train_step
from overlap.backends import load_backend
from overlap.cuda_graph import WARM_UP, GraphedStep
from overlap.model import Decoder, ModelConfig
from overlap.model.attention import LatentAttention
from overlap.model.fp8 import Fp8Config
from overlap.model.linear import LinearPair
from overlap.model.norm import NormThenLinear
from overlap.verify import verify
from recompute import ConfigError
from tests.gpu.test_te import ATTENTIONS, DEVICE, SHAPE, batches, make_chunk

# Transformer Engine's own imports warn.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


TILE = 128
"""Positions that sequences are a multiple of in a graph."""


@pytest.fixture(autouse=True)
def _transformer_engine() -> None:
    pytest.importorskip("transformer_engine")


@pytest.mark.parametrize("shape", ATTENTIONS)
def test_attention_by_kernels_is_the_modules(shape):
    """To the bit, with and without dropout: they are the same kernels."""
    config = replace(ATTENTIONS[shape], attention_dropout=0.1)
    model = load_backend("te").convert(Decoder(config).to(DEVICE))
    kernels: Any = model.get_submodule("layers.0.attn.attention.core")
    modules = type(kernels)(config, True)
    widths = (96, 96, 64) if shape == "mla" else (64,) * 3
    heads = (config.heads, *(config.heads if shape == "mla" else config.kv_heads,) * 2)
    inputs = [
        torch.randn(2, number, 128, width, device=DEVICE, dtype=torch.bfloat16)
        for number, width in zip(heads, widths, strict=True)
    ]
    found = []
    for core in (kernels, modules):
        torch.cuda.manual_seed(0)
        leaves = [x.detach().requires_grad_() for x in inputs]
        y = core(*leaves, 0.1, None)
        found.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaves), torch.cuda.get_rng_state()))
    assert kernels._fused(*(x.transpose(1, 2).contiguous() for x in inputs), 0.1) is not None
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("precision", ["block", "current", "delayed"])
def test_products_by_kernels_are_the_modules(precision):
    """Gradients of a step differ by rounding only: kernels may be chosen for another workspace."""
    data = batches(ModelConfig(**SHAPE), steps=1)[0]
    found = []
    for backend in ("te", "te-modules"):
        chunk = make_chunk(precision, "uniform1", backend)
        for module in chunk.modules():
            # A module that holds the norm too rounds what lies between them only once.
            if isinstance(module, LatentAttention):
                module.normed = NormThenLinear()
        train_step(chunk, data)
        found.append([parameter.grad for parameter in chunk.parameters()])
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None
        assert theirs is not None
        assert float((ours - theirs).float().norm()) <= 0.2 * float(theirs.float().norm())


@pytest.mark.parametrize("case", ["uniform1", "latent-query", "selective-latent-query", "selective-attention"])
@pytest.mark.parametrize("precision", ["block", "current", "delayed"])
def test_one_cast_of_what_two_products_read_changes_no_bit(precision, case):
    """Of a step, beside one whose products cast for themselves."""
    kind: Any = import_module("overlap.backends.te_linear_pair").TELinearPair
    found = []
    for apart in (False, True):
        chunk = make_chunk(precision, case)
        attentions = [module for module in chunk.modules() if isinstance(module, LatentAttention)]
        assert {type(attention.both) for attention in attentions} == {kind}
        for attention in attentions if apart else ():
            attention.both = LinearPair()
        train_step(chunk, batches(chunk.module.config, steps=1)[0])
        found.append([parameter.grad for parameter in chunk.parameters()])
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


def test_casts_of_several_experts_are_those_of_each():
    """Rows and columns, numbers and scales; what pads scales is nobody's."""
    te_casts, together = (import_module(f"overlap.backends.{name}") for name in ("te_casts", "te_together"))
    recipe = import_module("overlap.backends.te_scaling").make_recipe(Fp8Config(recipe="block"))
    casts = te_casts.make_casts(recipe, torch.nn.ModuleList(), 4, DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    weights, x = (
        torch.randn(shape, device=DEVICE, generator=generator).to(torch.bfloat16)
        for shape in ((4, 256, 640), (112, 640))
    )
    assert casts.blocks
    for columns, name, shape in ((False, "rowwise", (2, 5)), (True, "columnwise", (5, 2))):
        found = together.cast_weights(weights, casts, slice(1, 4), (0, 2), columns=columns)
        for one, place in zip(found, (1, 3), strict=True):
            want = te_casts.cast(weights[place], casts.weights[place], rows=True, columns=True, from_rows=False)
            compare(one.get_metadata(), want.get_metadata(), name, shape)
    splits = (16, 64, 32)
    found = together.cast_rows(x, splits, casts.inputs[:3], casts)
    for one, part in zip(found, x.split(splits), strict=True):
        want = te_casts.cast(part.contiguous(), casts.inputs[0], rows=True, columns=False, from_rows=False)
        compare(one.get_metadata(), want.get_metadata(), "rowwise", (5, len(part)))


def compare(found: dict[str, Any], want: dict[str, Any], name: str, scales: tuple[int, int]) -> None:
    assert torch.equal(found[f"{name}_data"], want[f"{name}_data"])
    ours, theirs = (made[f"{name}_scale_inv"] for made in (found, want))
    assert ours.shape == theirs.shape
    assert torch.equal(ours[: scales[0], : scales[1]], theirs[: scales[0], : scales[1]])
    others = {"fp8_dtype", "is_2D_scaled"}
    assert {key: found[key] for key in others} == {key: want[key] for key in others}


@pytest.mark.parametrize("case", ["uniform1", "hidden1", "delayed-wgrad", "attention-dropout"])
def test_a_step_in_bfloat16_as_a_graph(case):
    chunk = make_chunk("bf16", case)
    verdict = verify(chunk, batches(chunk.module.config, steps=WARM_UP + 2, length=TILE), graph=True)
    assert verdict.equal, verdict
    assert verdict.max_live_segments <= (2 if "hidden" in case else 1)


@pytest.mark.parametrize("precision", ["block", "current", "delayed"])
def test_a_dense_step_in_8_bits_as_a_graph(precision):
    """Without experts the host need not know rows; scales move by the graph's own kernels."""
    chunk = make_chunk(precision, "uniform1", dense_layers=3)
    verdict = verify(chunk, batches(chunk.module.config, steps=WARM_UP + 2, length=TILE), graph=True)
    assert verdict.equal, verdict


def test_a_part_of_a_tile_is_refused_as_a_graph():
    """The backward of cuDNN would read memory that is gone when the graph is launched."""
    chunk = make_chunk("bf16", "uniform1")
    (data,) = batches(chunk.module.config, steps=1, length=TILE // 2)
    with pytest.raises(ConfigError, match="multiples of 128 tokens"):
        GraphedStep(chunk)(data)
    train_step(chunk, data)


def test_a_part_of_a_tile_is_refused_in_a_capture_of_the_callers():
    attention: Any = make_chunk("bf16", "uniform1").module.get_submodule("layers.0.attn.attention")
    x = torch.randn(1, TILE // 2, attention.config.hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.backward(attention(x).sum())
    torch.cuda.synchronize()
    with pytest.raises(ConfigError, match="multiples of 128 tokens"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        attention(x)
    torch.autograd.backward(attention(x).sum())


def test_experts_in_8_bits_are_refused_as_a_graph():
    chunk = make_chunk("block", "uniform1")
    (data,) = batches(chunk.module.config, steps=1, length=TILE)
    step = GraphedStep(chunk)
    for _ in range(WARM_UP):
        step(data)
    with pytest.raises(ProgramError, match="needs the host"):
        step(data)


def test_a_step_in_bfloat16_does_not_wait_for_the_device():
    """So that a graph can capture it; in 8 bits the host reads rows per expert."""
    chunk = make_chunk("bf16", "uniform1")
    (data,) = batches(chunk.module.config, steps=1)
    train_step(chunk, data)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(chunk, data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
