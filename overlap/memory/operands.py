"""What binary operators of the CPU make of their operands first: a tensor of a number, and one of the common type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Number = bool | int | float
_WRAPPED: Mapping[type, int] = {bool: 1, int: 8, float: 8}
"""Bytes of the tensor that a Python number becomes: bool, int64 or float64 (ATen/ScalarOps.h, scalar_to_tensor)."""
aten = torch.ops.aten


def operand_bytes(left: Tensor, right: Tensor | Number, *rest: Any, **keywords: Any) -> int:
    """Bytes of the tensors that an element-wise operator makes before it computes.

    A number becomes a tensor. An operand, that tensor included, whose type is not the common one is copied into it
    (ATen/TensorIterator.cpp, compute_types).
    """
    return _operands(left, right, torch.result_type(left, right))


def in_place_bytes(left: Tensor, right: Tensor | Number, *rest: Any, **keywords: Any) -> int:
    """Of an operator that writes to its first operand: a result of the common type too, if that is another."""
    return operand_bytes(left, right) + _cast(left, torch.result_type(left, right))


def quotient_bytes(left: Tensor, right: Tensor | Number, *rest: Any, **keywords: Any) -> int:
    """Of a division: whole numbers are divided in the default type (ATen/native/BinaryOps.cpp, div)."""
    common = torch.result_type(left, right)
    wide = common if common.is_floating_point or common.is_complex else torch.get_default_dtype()
    return _operands(left, right, wide)


def mean_bytes(x: Tensor, *rest: Any, **keywords: Any) -> int:
    """Of the number of elements, an integer that the sums are divided by (ATen/native/ReduceOps.cpp, mean)."""
    return operand_bytes(x, 1)


def sum_bytes(x: Tensor, *rest: Any, **keywords: Any) -> int:
    """Of whole numbers narrower than int64 a wide copy."""
    whole = not (x.dtype.is_floating_point or x.dtype.is_complex)
    return _cast(x, torch.int64) if whole else 0


OPERANDS: Mapping[Any, Callable[..., int]] = {
    **dict.fromkeys(
        (
            aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar,
            aten.mul.Tensor, aten.mul.Scalar, aten.floor_divide.default,
            aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar,
        ),
        operand_bytes,
    ),
    **dict.fromkeys(
        (
            aten.add_.Tensor, aten.add_.Scalar, aten.sub_.Tensor, aten.sub_.Scalar,
            aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar,
        ),
        in_place_bytes,
    ),
    aten.div.Tensor: quotient_bytes,
    aten.div.Scalar: quotient_bytes,
    aten.mean.dim: mean_bytes,
    aten.sum.default: sum_bytes,
    aten.sum.dim_IntList: sum_bytes,
    aten.cumsum.default: sum_bytes,
}  # fmt: skip
"""As ON_CPU, of which it is a part."""


def _operands(left: Tensor, right: Tensor | Number, common: torch.dtype) -> int:
    if isinstance(right, Tensor):
        return _cast(left, common) + _cast(right, common)
    return _WRAPPED[type(right)] + _cast(left, common) + (common.itemsize if _type_of(right) != common else 0)


def _type_of(number: Number) -> torch.dtype:
    return torch.float64 if type(number) is float else torch.int64 if type(number) is int else torch.bool


def _cast(x: Tensor, common: torch.dtype) -> int:
    return x.numel() * common.itemsize if x.dtype != common else 0
