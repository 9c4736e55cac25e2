"""Grouped products on the device: weight gradients are right, and added are the whole, added."""

import pytest
import torch
from torch import Tensor

from overlap.model import grouped
from recompute.rng import default_generators, seeded

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
COUNTS = [[100, 0, 412, 0], [128, 128, 128, 128], [0, 0, 0, 500], [0, 0, 0, 0], [1, 63, 65, 300]]
WIDTHS = [(256, 1408), (72, 40), (33, 130)]


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)


def ends_of(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0, dtype=torch.int32)


def product(x: Tensor, grad: Tensor, counts: list[int]) -> Tensor:
    """In float64, expert by expert."""
    spans = zip(x[: sum(counts)].double().split(counts), grad[: sum(counts)].double().split(counts), strict=True)
    return torch.stack([x.t() @ grad for x, grad in spans])


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("inner", "outer"), WIDTHS)
@pytest.mark.parametrize("behind", [0, 7])
def test_weight_gradients_are_right(counts, inner, outer, behind):
    """Rows behind the counted are of no expert, whatever is in them."""
    rows = sum(counts)
    x, grad, sizes = draw(rows + behind, inner), draw(rows + behind, outer), torch.tensor(counts, device=DEVICE)
    x[rows:], grad[rows:] = float("nan"), float("inf")
    first = grouped.grouped_mm_wgrad(x, grad, ends_of(sizes), behind == 0)
    again = grouped.grouped_mm_wgrad(x, grad, ends_of(sizes), behind == 0)
    expected = product(x, grad, counts)
    assert (first.double() - expected).norm() <= 4e-3 * expected.norm()
    assert not first[sizes == 0].any(), "exact zeros"
    assert torch.equal(first, again)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("inner", "outer"), WIDTHS)
def test_added_has_the_bits_of_the_whole_added(inner, outer, counts, dtype):
    x, grad, into = draw(sum(counts), inner), draw(sum(counts), outer), draw(4, inner, outer, dtype=dtype)
    into[:, 0] = -0.0
    sizes = torch.tensor(counts, device=DEVICE)
    whole = grouped.grouped_mm_wgrad(x, grad, ends_of(sizes), True)
    expected = into.clone()
    expected += whole
    grouped.grouped_mm_wgrad_add(into, x, grad, ends_of(sizes), True)
    assert torch.equal(into, expected)
    assert torch.equal(into.signbit(), expected.signbit()), "a zero added to -0.0 gives 0.0 both ways"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_added_where_strides_are_others(dtype):
    counts = [100, 0, 212]
    x, grad = draw(256, 312).t(), draw(312, 2 * 384)[:, ::2]
    into = draw(384, 3, 256, dtype=dtype).permute(1, 2, 0)
    sizes = torch.tensor(counts, device=DEVICE)
    whole = grouped.grouped_mm_wgrad(x, grad, ends_of(sizes), True)
    assert torch.equal(whole, grouped.grouped_mm_wgrad(x.contiguous(), grad.contiguous(), ends_of(sizes), True))
    expected = into + whole
    grouped.grouped_mm_wgrad_add(into, x, grad, ends_of(sizes), True)
    assert torch.equal(into, expected)


@pytest.mark.parametrize("counts", COUNTS)
def test_added_to_what_the_kernel_does_not_take(counts):
    """Float64: the kernel's own gradient, whole, added."""
    x, grad, into = draw(sum(counts), 72), draw(sum(counts), 40), draw(4, 72, 40).double()
    sizes = torch.tensor(counts, device=DEVICE)
    expected = into + grouped.grouped_mm_wgrad(x, grad, ends_of(sizes), True)
    grouped.grouped_mm_wgrad_add(into, x, grad, ends_of(sizes), True)
    assert torch.equal(into, expected)


def test_without_our_kernel_experts_go_one_by_one(monkeypatch):
    monkeypatch.setattr(grouped, "fused", lambda x: False)
    counts = [100, 0, 412, 0]
    x, grad, into = draw(512, 256), draw(512, 1408), draw(4, 256, 1408)
    ends = ends_of(torch.tensor(counts, device=DEVICE))
    whole = grouped.grouped_mm_wgrad(x, grad, ends, True)
    wanted = product(x, grad, counts)
    assert (whole.double() - wanted).norm() <= 4e-3 * wanted.norm()
    expected = into + whole
    grouped.grouped_mm_wgrad_add(into, x, grad, ends, True)
    assert torch.equal(into, expected)


def test_adding_allocates_next_to_nothing():
    x, grad, into = draw(512, 256), draw(512, 1408), draw(4, 256, 1408)
    sizes = torch.tensor([100, 0, 412, 0], device=DEVICE)
    grouped.grouped_mm_wgrad_add(into, x, grad, ends_of(sizes), True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grouped.grouped_mm_wgrad_add(into, x, grad, ends_of(sizes), True)
    assert torch.cuda.max_memory_allocated() - before <= 64 * 1024, "the ends, and what a prefix sum needs"


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
