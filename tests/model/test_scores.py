"""The router around its kernel: factors and gradients of the losses, with torch's operations in the kernel's place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap.model import ModelConfig
from overlap.model.router import Router

TOKENS = 12


def parts_of(
    logits: Tensor, ids: Tensor, counts: Tensor, padding: Tensor | None, rule: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """What the kernel's docstring says that it writes."""
    scale, sigmoid, normalise, aux, z = rule
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    probs = scores.gather(-1, ids)
    probs = (probs / (probs.sum(-1, keepdim=True) + 1e-20) if normalise else probs) * scale
    keep = torch.ones(len(logits)) if padding is None else (~padding).float()
    shares = (counts * scores).sum(-1) / (scores.sum(-1) + 1e-20)
    return probs, torch.stack((aux * keep * shares, z * keep * logits.logsumexp(-1).square()))


def score_forward(
    logits: Tensor, ids: Tensor, counts: Tensor, padding: Tensor | None, probs: Tensor, parts: Tensor, *rule: Any
) -> None:
    assert padding is None or padding.is_contiguous()
    for written, found in zip((probs, parts), parts_of(logits, ids, counts, padding, rule), strict=True):
        written.copy_(found)


def score_backward(
    logits: Tensor, ids: Tensor, counts: Tensor, padding: Tensor | None, grad_probs: Tensor, grad_aux: Tensor,
    grad_z: Tensor, grad_logits: Tensor, *rule: Any,
) -> None:  # fmt: skip
    assert padding is None or padding.is_contiguous()
    assert grad_aux.shape == grad_z.shape == ()
    logits = logits.detach().requires_grad_()
    with torch.enable_grad():
        outputs = parts_of(logits, ids, counts, padding, rule)
    grad_parts = torch.stack((grad_aux, grad_z)).unsqueeze(-1).expand_as(outputs[1])
    grad_logits.copy_(*torch.autograd.grad(outputs, logits, (grad_probs, grad_parts)))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("losses", [("aux", "z"), ("aux",), ("z",), ()])
def test_losses_are_those_without_the_kernel(
    losses: tuple[str, ...], per_token: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = SimpleNamespace(score_forward=score_forward, score_backward=score_backward)
    monkeypatch.setattr("overlap.model.scores.kernels", lambda name: kernel)
    coefficients = {f"{name}_coefficient": 0.25 if name in losses else 0.0 for name in ("aux", "z")}
    router = Router(ModelConfig(hidden=8, experts=4, topk=2, per_token_loss=per_token, **coefficients))
    torch.nn.init.normal_(router.weight)
    x = torch.randn(TOKENS, 8, requires_grad=True)
    padding = (torch.arange(2 * TOKENS) % 3 == 1)[::2] if padded else None
    results = []
    for by_kernel in (True, False):
        monkeypatch.setattr("overlap.model.router.fused", lambda x, by_kernel=by_kernel: by_kernel)
        routed = router(x, padding=padding)
        assert len(routed.losses) == len(losses)
        total = routed.probs.square().sum() + sum((n + 2) * loss for n, loss in enumerate(routed.losses))
        results.append([routed.probs, *routed.losses, *torch.autograd.grad(total, (x, router.weight))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
