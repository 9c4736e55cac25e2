"""What binary operators and reductions make of their operands, against the CPU allocator's own events."""

from __future__ import annotations

import pytest
import torch

from overlap.memory.operands import OPERANDS, aten
from tests.memory.compare import within

FLOATS = (torch.float32, torch.float64)
NUMBERS = (True, 2, 0.5)
WITH_A_NUMBER = [func for func in OPERANDS if str(func).endswith((".Tensor", ".Scalar")) and "mean" not in str(func)]


@pytest.mark.parametrize("func", WITH_A_NUMBER, ids=str)
def test_a_number(func) -> None:
    for dtype in FLOATS:
        for number in NUMBERS:
            if "sub" in str(func) and number is True:
                continue
            x = torch.ones(3, 5, dtype=dtype)
            assert within(func, x, number) == OPERANDS[func](x, number), (dtype, number)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_a_number_and_whole_numbers(dtype) -> None:
    x = torch.arange(7).to(dtype)
    for func in (aten.eq.Scalar, aten.add.Tensor, aten.floor_divide.default):
        assert within(func, x, 2) == OPERANDS[func](x, 2)
    # here the tensor itself is copied into a common type
    assert within(aten.mul.Tensor, x, 2.0) == OPERANDS[aten.mul.Tensor](x, 2.0) == 8 + 4 + 7 * 4


def test_tensors_of_two_types() -> None:
    x, whole = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64)
    for pair in ((x, x), (x, whole), (whole, x), (x[0, 0], whole[0, 0]), (x, whole[0, 0]), (x, x[0, 0].double())):
        assert within(aten.div.Tensor, *pair) == OPERANDS[aten.div.Tensor](*pair)
    assert OPERANDS[aten.div.Tensor](x, whole) == 6 * 4


WIDENED = [(torch.bfloat16, torch.float32), (torch.float32, torch.float64), (torch.int32, torch.int64)]


@pytest.mark.parametrize(("narrow", "wide"), WIDENED, ids=str)
def test_in_place(narrow, wide) -> None:
    """A result that is wider than its place is made before it is cast into it."""
    for func in (aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor):
        x, y = torch.ones(3, 5, dtype=narrow), torch.ones(3, 5, dtype=wide)
        assert within(func, x, y) == OPERANDS[func](x, y) == 2 * 15 * wide.itemsize
        assert within(func, y, x) == OPERANDS[func](y, x) == 15 * wide.itemsize
    x, y = torch.ones(3, 5, dtype=torch.bfloat16), torch.ones(3, 5)
    assert within(aten.div_.Tensor, x, y) == OPERANDS[aten.div_.Tensor](x, y) == 2 * 15 * 4


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64], ids=str)
def test_whole_numbers_are_divided_as_floats(dtype) -> None:
    x = torch.ones(7).to(dtype)
    for right in (x, x[0], torch.ones(7, dtype=torch.int64), True, 2, 0.5):
        assert within(aten.div.Tensor, x, right) == OPERANDS[aten.div.Tensor](x, right), right


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, *FLOATS], ids=str)
def test_sums(dtype) -> None:
    x = torch.ones(4, 6).to(dtype)
    for func, rest in ((aten.sum.default, ()), (aten.sum.dim_IntList, ([-1], True)), (aten.cumsum.default, (0,))):
        assert within(func, x, *rest) == OPERANDS[func](x, *rest), func


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_means(dtype) -> None:
    x = torch.ones(4, 6, dtype=dtype)
    for rest in (([-1], True), ([0],)):
        assert within(aten.mean.dim, x, *rest) == OPERANDS[aten.mean.dim](x, *rest)
