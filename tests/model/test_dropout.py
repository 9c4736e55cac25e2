"""Dropout noise: a function of generator state, shape and type."""

from __future__ import annotations

import pytest
import torch

from overlap.model import dropout, dropout_noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_noise_ignores_strides(dtype: torch.dtype) -> None:
    state = torch.get_rng_state()
    plain = dropout_noise(torch.empty(6, 8, dtype=dtype), 0.3)
    torch.set_rng_state(state)
    assert torch.equal(dropout_noise(torch.empty(8, 6, dtype=dtype).t(), 0.3), plain)
    torch.set_rng_state(state)
    assert torch.equal(dropout_noise(torch.empty(1, 1, dtype=dtype).expand(6, 8), 0.3), plain)


def test_mean_is_kept() -> None:
    noise = dropout_noise(torch.empty(100_000), 0.25)
    assert noise.unique().tolist() == [0, torch.tensor(1 / 0.75).item()]
    assert noise.mean().item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_nothing_is_drawn_without_need(p: float, training: bool) -> None:
    state = torch.get_rng_state()
    x = torch.randn(3)
    state = torch.get_rng_state()
    assert dropout(x, p, training=training) is x
    assert torch.equal(torch.get_rng_state(), state)
