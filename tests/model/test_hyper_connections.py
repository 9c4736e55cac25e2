"""Hyper-connections against loops over streams, in float64; the Sinkhorn projection and its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from overlap.model import Decoder, ModelConfig
from overlap.model.hyper_connections import Contraction, HyperConnection, expand_streams, sinkhorn
from overlap.model.init import init_weights
from overlap.model.precision import default_dtype

HIDDEN = 6


def config_of(**changes: Any) -> ModelConfig:
    return ModelConfig(**{"hidden": HIDDEN, "mhc": 3, "dtype": "float64", **changes})


def make(kind: Any, streams: int = 3, **changes: Any) -> Any:
    with default_dtype(torch.float64):
        module = kind(config_of(mhc=streams, **changes), streams)
    init_weights(module, 0)
    with torch.no_grad():
        # away from the even start, where mistakes hide
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    return module


def slow_sinkhorn(logits: Tensor, iterations: int, epsilon: float) -> Tensor:
    matrix: Tensor = logits.softmax(-1) + epsilon
    matrix = matrix / (matrix.sum(-2, keepdim=True) + epsilon)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + epsilon)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + epsilon)
    return matrix


@pytest.mark.parametrize("n", [1, 2, 4])
def test_columns_sum_to_one_and_rows_nearly(n: int) -> None:
    """The projection ends on columns, so that each new stream is a convex combination of the old ones."""
    matrix = sinkhorn(torch.randn(5, 7, n, n, dtype=torch.float64) * 3, 20, 1e-6)
    assert matrix.min() > 0
    torch.testing.assert_close(matrix.sum(-2), torch.ones(5, 7, n, dtype=torch.float64), atol=3e-6, rtol=0)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(5, 7, n, dtype=torch.float64), atol=0.05, rtol=0)


def test_more_iterations_come_closer_to_doubly_stochastic() -> None:
    logits = torch.randn(50, 4, 4, dtype=torch.float64) * 2
    errors = [(sinkhorn(logits, count, 1e-9).sum(-1) - 1).abs().max().item() for count in (1, 3, 10, 50)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3


@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-2])
def test_sinkhorn_and_its_gradient(iterations: int, epsilon: float) -> None:
    """The gradient is exact through the iterations: equal to autograd's and to finite differences."""
    logits = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    slow = slow_sinkhorn(logits, iterations, epsilon)
    found = sinkhorn(logits, iterations, epsilon)
    torch.testing.assert_close(found, slow)
    grad = torch.randn_like(slow)
    torch.testing.assert_close(
        torch.autograd.grad(found, logits, grad)[0], torch.autograd.grad(slow, logits, grad)[0], rtol=1e-9, atol=1e-12
    )
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, iterations, epsilon), (logits,))


def test_sinkhorn_keeps_its_input_alone() -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    logits = torch.randn(4, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        sinkhorn(logits, 20, 1e-6)
    assert [tensor.data_ptr() for tensor in saved] == [logits.data_ptr()]


def test_sinkhorn_repeats_its_bits() -> None:
    logits = torch.randn(8, 4, 4, requires_grad=True)
    grads = []
    for _ in range(2):
        (grad,) = torch.autograd.grad(sinkhorn(logits, 20, 1e-6).square().sum(), logits)
        grads.append(grad)
    assert torch.equal(*grads)


def mappings_of_one_token(module: HyperConnection, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """X [n, C]: the formulas of the paper, token by token."""
    n = x.shape[0]
    flat = x.flatten()
    raw = module.weight @ flat / (flat.norm() / len(flat) ** 0.5 + 1e-6)
    pre, post, res = module.gains
    h_pre = torch.sigmoid(raw[:n] * pre + module.bias[:n]) + 1e-6
    h_post = 2 * torch.sigmoid(raw[n : 2 * n] * post + module.bias[n : 2 * n])
    mix = slow_sinkhorn((raw[2 * n :] * res + module.bias[2 * n :]).view(n, n), 20, 1e-6)
    return h_pre, h_post, mix


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_split_and_merge_equal_loops(streams: int) -> None:
    module = make(HyperConnection, streams)
    x = torch.randn(2, 3, streams, HIDDEN, dtype=torch.float64)
    update = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    aggregate, carried = module.split(x)
    merged = module.merge(update, *carried)
    assert carried[0] is x
    for b in range(2):
        for s in range(3):
            h_pre, h_post, mix = mappings_of_one_token(module, x[b, s])
            torch.testing.assert_close(aggregate[b, s], sum(h_pre[j] * x[b, s, j] for j in range(streams)))
            for i in range(streams):
                mixed = sum(mix[j, i] * x[b, s, j] for j in range(streams))
                torch.testing.assert_close(merged[b, s, i], mixed + h_post[i] * update[b, s])


def test_contraction_equals_loops() -> None:
    module = make(Contraction)
    x = torch.randn(2, 3, 3, HIDDEN, dtype=torch.float64)
    out = module(x)
    for b in range(2):
        for s in range(3):
            flat = x[b, s].flatten()
            scale = (flat.square().mean() + module.eps).rsqrt()
            g = torch.sigmoid(module.weight @ flat * scale * module.gain + module.bias) + module.eps
            torch.testing.assert_close(out[b, s], sum(g[i] * x[b, s, i] for i in range(3)))


def test_gradients() -> None:
    """Finite differences, float64, of every parameter and both inputs."""
    module, contraction = make(HyperConnection, 2, mhc_iterations=5), make(Contraction, 2)
    x = torch.randn(1, 2, 2, HIDDEN, dtype=torch.float64, requires_grad=True)
    update = torch.randn(1, 2, HIDDEN, dtype=torch.float64, requires_grad=True)

    def forward(x: Tensor, update: Tensor, *parameters: Tensor) -> Tensor:
        aggregate, carried = module.split(x)
        out: Tensor = contraction(module.merge(update + aggregate.tanh(), *carried))
        return out

    assert torch.autograd.gradcheck(forward, (x, update, *module.parameters(), *contraction.parameters()))


def test_mappings_are_computed_wide() -> None:
    """float32 in a bfloat16 model, also under autocast; results have the streams' type."""
    config = ModelConfig(hidden=HIDDEN, mhc=2, dtype="bfloat16")
    with default_dtype(torch.bfloat16):
        module = HyperConnection(config, 2)
    init_weights(module, 0)
    x = torch.randn(1, 2, 2, HIDDEN).bfloat16()
    narrow = module.mappings(x)
    assert {part.dtype for part in narrow} == {torch.bfloat16}
    wide = module.float().mappings(x.float())
    for part, exact in zip(narrow, wide, strict=True):
        assert torch.equal(part, exact.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(module.mappings(x.float()), wide, strict=True))


def test_a_new_model_mixes_evenly() -> None:
    """Small gain, no bias: every stream starts as the plain residual stream would, scaled."""
    model = Decoder(ModelConfig(layers=1, mhc=4))
    module = model.get_submodule("layers.0.attn.residual")
    assert isinstance(module, HyperConnection)
    h_pre, h_post, h_res = module.mappings(expand_streams(torch.randn(1, 3, 32), 4))
    torch.testing.assert_close(h_pre, torch.full_like(h_pre, 0.5), atol=0.05, rtol=0)
    torch.testing.assert_close(h_post, torch.ones_like(h_post), atol=0.1, rtol=0)
    torch.testing.assert_close(h_res, torch.full_like(h_res, 0.25), atol=0.05, rtol=0)


def test_zero_streams_have_finite_gradients() -> None:
    module = make(HyperConnection, 2)
    x = torch.zeros(1, 1, 2, HIDDEN, dtype=torch.float64, requires_grad=True)
    aggregate, carried = module.split(x)
    (aggregate.sum() + module.merge(aggregate, *carried).sum()).backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_expansion_copies() -> None:
    streams = expand_streams(torch.randn(2, 3, 4), 5)
    assert streams.shape == (2, 3, 5, 4)
    assert streams.is_contiguous()
    assert all(torch.equal(streams[:, :, 0], streams[:, :, i]) for i in range(5))


def test_autocast_leaves_the_streams_wide() -> None:
    """Rows 8's kind: a float32 residual state stays float32 inside autocast."""
    module = HyperConnection(ModelConfig(hidden=HIDDEN, mhc=2), 2)
    init_weights(module, 0)
    x = torch.randn(1, 2, 2, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        aggregate, carried = module.split(x)
        assert aggregate.dtype is torch.float32
        merged = module.merge(aggregate.bfloat16(), *carried)
    assert merged.dtype is torch.float32
    assert torch.equal(merged, module.merge(aggregate.bfloat16(), *carried))
