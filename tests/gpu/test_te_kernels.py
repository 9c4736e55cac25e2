"""The Transformer Engine backend by kernels beside its modules, and what a step by kernels asks of the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from overlap import ProgramError, train_step
from overlap.backends import load_backend
from overlap.cuda_graph import WARM_UP, GraphedStep
from overlap.model import Decoder, ModelConfig
from overlap.verify import verify
from tests.gpu.test_te import ATTENTIONS, DEVICE, SHAPE, batches, make_chunk

# Transformer Engine's own imports warn.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


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
        train_step(chunk, data)
        found.append([parameter.grad for parameter in chunk.parameters()])
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None
        assert theirs is not None
        assert float((ours - theirs).float().norm()) <= 0.2 * float(theirs.float().norm())


@pytest.mark.parametrize("case", ["uniform1", "hidden1", "delayed-wgrad", "attention-dropout"])
def test_a_step_in_bfloat16_as_a_graph(case):
    chunk = make_chunk("bf16", case)
    verdict = verify(chunk, batches(chunk.module.config, steps=WARM_UP + 2), graph=True)
    assert verdict.equal, verdict
    assert verdict.max_live_segments <= (2 if "hidden" in case else 1)


@pytest.mark.parametrize("precision", ["block", "current", "delayed"])
def test_a_dense_step_in_8_bits_as_a_graph(precision):
    """Without experts the host need not know rows; scales move by the graph's own kernels."""
    chunk = make_chunk(precision, "uniform1", dense_layers=3)
    verdict = verify(chunk, batches(chunk.module.config, steps=WARM_UP + 2), graph=True)
    assert verdict.equal, verdict


def test_experts_in_8_bits_are_refused_as_a_graph():
    chunk = make_chunk("block", "uniform1")
    (data,) = batches(chunk.module.config, steps=1)
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
