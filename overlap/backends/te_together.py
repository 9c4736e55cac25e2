"""Casts to 8 bits of what belongs to several experts by one call, where scales allow it.

A cast by Transformer Engine costs tens of microseconds of host time per tensor, more than its kernel takes. With a
scale per 128 x 128 block, weights that lie one behind another are cast as one: blocks do not reach across them, and a
matrix in columns is its rows transposed, with the same numbers. With a scale per 128 columns of a row, rows of all
experts are cast as one. Columns of rows, and tensors with one scale each, have a cast of their own per expert.
Legend: E experts, O and I outer and inner width, P rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import transformer_engine_torch as tex
from torch import Tensor

from overlap.backends.te_casts import Casts, cast, cast_split

_BLOCK = 128
_SCALE_MULTIPLE = 4
"""What a row of scales is padded to a multiple of."""


def cast_weights(weights: Tensor, casts: Casts, experts: slice, busy: Sequence[int], *, columns: bool) -> list[Any]:
    """Quantise some matrices.

    Args:
        weights: [E, O, I], of all experts.
        casts: Quantizers.
        experts: Which to take.
        busy: Those of them that are needed, counted from the first.
        columns: In columns, else in rows.
    """
    matrices = weights.detach()[experts]
    count, outer, inner = matrices.shape
    rows = matrices.reshape(-1, inner)
    if casts.blocks and outer % _BLOCK == 0:
        made = cast(rows, casts.weights[0], rows=True, columns=False, from_rows=False)
        return (_columns if columns else _rows)(made.get_metadata(), type(made), count, busy)
    # Columns are made beside rows.
    theirs = cast_split(
        rows, [outer] * count, casts.weights[experts], rows=not columns, columns=columns, from_rows=True,
        together=False,
    )  # fmt: skip
    return [theirs[place] for place in busy]


def cast_rows(x: Tensor, splits: Sequence[int], quantizers: Sequence[Any], casts: Casts) -> list[Any]:
    """Quantise the parts of [P, I], `splits` rows each, in rows."""
    if not casts.blocks or any(split % _SCALE_MULTIPLE for split in splits):
        return cast_split(x, splits, quantizers, rows=True, columns=False, from_rows=casts.from_rows)
    whole = cast(x, quantizers[0], rows=True, columns=False, from_rows=False)
    made, storage = whole.get_metadata(), type(whole)
    # Scales are stored by column block: [I / 128, P].
    data, scales = made["rowwise_data"].split_with_sizes(splits), made["rowwise_scale_inv"].split_with_sizes(splits, 1)
    return [
        storage(**{**made, "rowwise_data": part, "rowwise_scale_inv": theirs.contiguous(), "quantizer": None})
        for part, theirs in zip(data, scales, strict=True)
    ]


def _cut(made: dict[str, Any], count: int) -> tuple[Tensor, Tensor]:
    data, scales = made["rowwise_data"], made["rowwise_scale_inv"]
    return data.view(count, -1, data.shape[-1]), scales.view(count, -1, scales.shape[-1])


def _rows(made: dict[str, Any], storage: Any, count: int, busy: Sequence[int]) -> list[Any]:
    data, scales = (part.unbind() for part in _cut(made, count))
    return [
        storage(**{**made, "rowwise_data": data[place], "rowwise_scale_inv": scales[place], "quantizer": None})
        for place in busy
    ]


def _columns(made: dict[str, Any], storage: Any, count: int, busy: Sequence[int]) -> list[Any]:
    data, scales = _cut(made, count)
    blocks, across = scales.shape[1], -(-data.shape[2] // _BLOCK)
    width = -(-blocks // _SCALE_MULTIPLE) * _SCALE_MULTIPLE
    turned = scales.new_zeros(count, across, width)
    turned[..., :blocks] = scales[..., :across].transpose(1, 2)
    shared = {**made, "rowwise_data": None, "rowwise_scale_inv": None, "quantizer": None}
    results = []
    for place in busy:
        shared["columnwise_data"] = tex.fp8_transpose(data[place], made["fp8_dtype"], out=None)
        shared["columnwise_scale_inv"] = turned[place]
        results.append(storage(**shared))
    return results
