"""RMSNorm with Transformer Engine's backward, with a stand-in for the package."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.backends.te_stand_in import put_in

EPS = 1e-5


class Kernel:
    """The backward's kernel, from what it is handed: if `shift` is not 0, with another scale."""

    def __init__(self) -> None:
        self.shift = 0.0

    def rmsnorm_bwd(
        self, grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
    ) -> list[Tensor]:
        assert (sm_margin, zero_centered) == (0, False)
        assert [grad.shape, scale.shape, scale.dtype] == [x.shape, x.shape[:1], torch.float32]
        assert all(tensor.is_contiguous() and tensor.dtype is x.dtype for tensor in (grad, x, weight))
        wide, normal = grad.double() * weight.double(), x.double() * (scale.double() + self.shift)[:, None]
        inner = (wide * normal).mean(-1, keepdim=True)
        rows = (wide - normal * inner) * (scale.double() + self.shift)[:, None]
        return [rows.to(x.dtype), (grad.double() * normal).sum(0).to(x.dtype)]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    packages: dict[str, Any] = {"transformer_engine_torch": made}
    put_in(monkeypatch, packages, ["te_norm"])
    return made


def run(norm: Any, x: Tensor, weight: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    y: Tensor = norm(x)
    return (y.detach(), *torch.autograd.grad(y, (x, weight), seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True], ids=["", "strided"])
def test_a_norm_is_torchs(kernel, dtype, strided):
    """Its result to the bit, with and without a graph; its gradients, from the scale that forward kept."""
    draws = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 8, 5, generator=draws) if strided else torch.randn(3, 5, 8, generator=draws)
    x = (drawn.transpose(1, 2) if strided else drawn).to(dtype).requires_grad_()
    weight = torch.nn.Parameter(torch.rand(8, generator=draws).to(dtype) + 0.5)
    seed = torch.randn(3, 5, 8, generator=draws).to(dtype)
    norm = import_module("overlap.backends.te_norm").TENorm(weight, EPS)

    want = run(lambda x: F.rms_norm(x, weight.shape, weight, EPS), x, weight, seed)
    found = run(norm, x, weight, seed)
    assert torch.equal(found[0], want[0])
    with torch.no_grad():
        assert torch.equal(norm(x), want[0])
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for ours, theirs in zip(found[1:], want[1:], strict=True):
        assert [ours.dtype, ours.shape] == [theirs.dtype, theirs.shape]
        torch.testing.assert_close(ours, theirs, **close)
    kernel.shift = 0.3
    assert not torch.allclose(run(norm, x, weight, seed)[1], want[1], **close), "the scale is what forward kept"


def test_a_wider_weight_gets_a_gradient_of_its_type(kernel):
    """As torch's norm gives it under autocast: computed in x's type."""
    x, weight = torch.randn(4, 8).bfloat16().requires_grad_(), torch.nn.Parameter(torch.ones(8))
    norm = import_module("overlap.backends.te_norm").TENorm(weight, EPS)
    y, *grads = run(norm, x, weight, torch.ones(4, 8).bfloat16())
    assert [y.dtype, *(grad.dtype for grad in grads)] == [torch.bfloat16, torch.bfloat16, torch.float32]
