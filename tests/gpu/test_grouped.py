"""Grouped products on the device: weight gradients added in pieces are the whole, added; generators are left alone."""

import pytest
import torch

from overlap.model import grouped
from recompute.rng import default_generators, seeded

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("counts", [[100, 0, 412, 0], [128, 128, 128, 128], [0, 0, 0, 500]])
def test_added_in_pieces(counts, monkeypatch):
    monkeypatch.setattr(grouped, "_PIECE_BYTES", 4 * 256 * 2 * 256)
    rows = sum(counts)
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)

    x, grad, into = draw(rows, 256), draw(rows, 1408), draw(4, 256, 1408)
    ends = torch.tensor(counts, device=DEVICE).cumsum(0, dtype=torch.int32)
    expected = into + grouped.grouped_mm_wgrad(x, grad, ends, True)
    grouped.grouped_mm_wgrad_add(into, x, grad, ends, True)
    assert torch.equal(into, expected)


def test_a_device_generator_goes_on_where_it_was():
    generators = default_generators(DEVICE)
    torch.rand(7, device=DEVICE)
    before = [generator.get_state() for generator in generators]
    with seeded(5, generators):
        first = torch.rand(1000, device=DEVICE)
    with seeded(5, generators):
        again = torch.rand(1000, device=DEVICE)
    assert torch.equal(first, again)
    assert all(torch.equal(g.get_state(), state) for g, state in zip(generators, before, strict=True))
