"""Cross entropy without logits, against torch's own with them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap.model import chunked_loss
from overlap.model.chunked_loss import linear_cross_entropy
from recompute.wgrad import WeightGradients, collect_weight_gradients, weights_left_out

IGNORED = -100


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, nn.Parameter, Tensor]:
    hidden = torch.randn(7, 4, dtype=dtype, requires_grad=True)
    weight = nn.Parameter(torch.randn(11, 4, dtype=dtype))
    return hidden, weight, torch.tensor([3, 0, IGNORED, 10, 5, IGNORED, 3])


@pytest.fixture(params=[1, 20, 10**6], ids=lambda piece: f"piece{piece}", autouse=True)
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one row, of two or three, and all at once."""
    monkeypatch.setattr(chunked_loss, "_PIECE", request.param)


def test_finite_differences() -> None:
    hidden, weight, labels = data()
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, labels, ignored=IGNORED), (hidden, weight))


def test_equals_torch_with_logits() -> None:
    hidden, weight, labels = data()
    loss = linear_cross_entropy(hidden, weight, labels, ignored=IGNORED)
    expected = F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss * 0.3, (hidden, weight))
    torch.testing.assert_close(found, torch.autograd.grad(expected * 0.3, (hidden, weight)))


def test_all_ignored_is_zero() -> None:
    hidden, weight, _ = data()
    loss = linear_cross_entropy(hidden, weight, torch.full((7,), IGNORED), ignored=IGNORED)
    loss.backward()
    assert loss.item() == 0.0
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delayed_weight_gradient_is_the_same_to_the_bit(dtype: torch.dtype) -> None:
    hidden, weight, labels = data(dtype)
    linear_cross_entropy(hidden, weight, labels, ignored=IGNORED).backward()
    expected, weight.grad = (hidden.grad, weight.grad), None
    again = hidden.detach().requires_grad_()
    collector = WeightGradients()
    with weights_left_out():
        loss = linear_cross_entropy(again, weight, labels, ignored=IGNORED)
    with collect_weight_gradients(collector):
        loss.backward()
    assert weight.grad is None
    ((owner, gradient),) = collector.drain()
    assert owner is weight
    assert expected[0] is not None
    assert expected[1] is not None
    assert again.grad is not None
    assert torch.equal(again.grad, expected[0])
    assert torch.equal(gradient, expected[1])


def test_frozen_weight() -> None:
    hidden, weight, labels = data()
    weight.requires_grad_(False)
    linear_cross_entropy(hidden, weight, labels, ignored=IGNORED).backward()
    assert weight.grad is None
    assert hidden.grad is not None


@pytest.mark.parametrize("label", [11, 300, -1, -99, 10**12, -(10**12)])
def test_a_label_outside_the_vocabulary_is_seen(label: int) -> None:
    """Loss and weight gradient are NaN, and the hidden gradient where the label is; other tokens' is what it was."""
    hidden, weight, labels = data()
    linear_cross_entropy(hidden, weight, labels, ignored=IGNORED).backward()
    (before, hidden.grad), weight.grad = (hidden.grad, None), None
    assert before is not None
    labels[4] = label
    loss = linear_cross_entropy(hidden, weight, labels, ignored=IGNORED)
    loss.backward()
    assert loss.isnan()
    assert weight.grad is not None
    assert weight.grad.isnan().all()
    assert hidden.grad is not None
    assert hidden.grad[4].isnan().all()
    others = [token for token in range(7) if token != 4]
    assert torch.equal(hidden.grad[others], before[others])


def test_an_ignored_label_inside_the_vocabulary() -> None:
    hidden, weight, labels = data()
    labels[labels == IGNORED] = 5
    loss = linear_cross_entropy(hidden, weight, labels, ignored=5)
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, labels, ignore_index=5, reduction="sum"))
