"""A stand-in for Transformer Engine on a CPU: casts round to a grid, one for rows and a finer one for columns."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

OURS = ("te_scaling", "te_casts", "te_linear", "te_pieces", "te_together", "te_backward", "te_grouped")


def stand_in(**members: Any) -> ModuleType:
    """A package with these members."""
    package = ModuleType("stand_in")
    package.__dict__.update({"__path__": [], **members})
    return package


def put_in(monkeypatch: pytest.MonkeyPatch, packages: Mapping[str, ModuleType], ours: Iterable[str]) -> None:
    """Have packages imported as these, and our modules (of overlap.backends, by name) anew, until the test ends."""
    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name, package)
    for name in ours:
        # First set, so that what is imported now is gone after the test.
        monkeypatch.setitem(sys.modules, f"overlap.backends.{name}", stand_in())
        del sys.modules[f"overlap.backends.{name}"]


class Quantizer:
    """Says what a cast makes."""

    def __init__(self, *, square: bool) -> None:
        self.internal = False
        self.rows = self.columns = True
        self.square = square

    def set_usage(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rows, self.columns = rowwise, columnwise


def squares(data: Tensor) -> Tensor:
    """The largest number of each 128 x 128 block, padded as scales are: says whose block it is."""
    blocks = [[part.amax() for part in band.split(128, 1)] for band in data.split(128)]
    return pad_scales(torch.stack([torch.stack(band) for band in blocks]))


def strips(data: Tensor) -> Tensor:
    """The largest number of each 128 columns of a row, by column block."""
    if not data.numel():
        return data.new_zeros(-(-data.shape[1] // 128), 0)
    return pad_scales(torch.stack([part.amax(1) for part in data.split(128, 1)]))


def pad_scales(scales: Tensor) -> Tensor:
    """Rows of a multiple of 4."""
    return torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4))


class Quantised:
    """Rows and columns of a tensor, each there or not; columns are stored transposed."""

    alive: ClassVar[WeakSet[Quantised]] = WeakSet()

    def __init__(
        self, rowwise_data: Tensor | None, rowwise_scale_inv: Tensor | None, columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None, fp8_dtype: str, quantizer: Quantizer | None, is_2D_scaled: bool,
    ) -> None:  # fmt: skip
        self.rows, self.row_scales = rowwise_data, rowwise_scale_inv
        self.columns, self.column_scales = columnwise_data, columnwise_scale_inv
        self.facts = {"fp8_dtype": fp8_dtype, "quantizer": quantizer, "is_2D_scaled": is_2D_scaled}
        self.alive.add(self)

    def get_metadata(self) -> dict[str, Any]:
        return {
            "rowwise_data": self.rows, "rowwise_scale_inv": self.row_scales, "columnwise_data": self.columns,
            "columnwise_scale_inv": self.column_scales, **self.facts,
        }  # fmt: skip

    def read(self, way: str) -> Tensor:
        """Rows or columns, whose scales must be theirs, and in one piece."""
        data, scales = (self.rows, self.row_scales) if way == "rows" else (self.columns, self.column_scales)
        assert data is not None
        assert scales is not None
        assert data.is_contiguous()
        assert scales.is_contiguous()
        assert torch.equal(scales, (squares if self.facts["is_2D_scaled"] else strips)(data))
        return data

    def update_usage(self, *, rowwise_usage: bool, columnwise_usage: bool) -> None:
        assert columnwise_usage != rowwise_usage
        assert (self.columns if columnwise_usage else self.rows) is not None
        if columnwise_usage:
            self.rows = self.row_scales = None
        else:
            self.columns = self.column_scales = None

    def prepare_for_saving(self) -> tuple[list[Tensor | None], Quantised]:
        tensors = [self.rows, self.columns, self.row_scales, self.column_scales]
        self.rows = self.columns = self.row_scales = self.column_scales = None
        return tensors, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        self.rows, self.columns, self.row_scales, self.column_scales = tensors[:4]
        return tensors[4:]


def prepare_for_saving(*objects: Quantised) -> tuple[list[Tensor | None], list[Quantised]]:
    made = [one.prepare_for_saving() for one in objects]
    return [tensor for tensors, _ in made for tensor in tensors], [shell for _, shell in made]


def restore_from_saved(shells: Sequence[Quantised], tensors: list[Tensor | None]) -> list[Quantised]:
    for shell in shells:
        tensors = shell.restore_from_saved(tensors)
    return list(shells)


def product(first: Quantised, second: Quantised, layout: str) -> Tensor:
    """Reads what Transformer Engine's product of this layout reads; what is not there fails."""
    a = first.read("rows" if layout[0] == "T" else "columns")
    b = second.read("columns" if layout[1] == "T" else "rows")
    return b @ a.t()


class Torch:
    """transformer_engine_torch: counts casts and groups, and how many casts were alive at most."""

    def __init__(self) -> None:
        self.casts = self.groups = self.most_alive = 0

    def quantize(self, x: Tensor, quantizer: Quantizer) -> Quantised:
        assert x.is_contiguous()
        assert quantizer.internal
        self.casts += 1
        x = x.detach()
        rows = (x * 4).round() / 4 if quantizer.rows else None
        # With a scale per square both are the same numbers.
        steps = 4 if quantizer.square else 8
        columns = ((x * steps).round() / steps).t().contiguous() if quantizer.columns else None
        scales = squares if quantizer.square else strips
        result = Quantised(
            rows, None if rows is None else scales(rows), columns, None if columns is None else scales(columns),
            "e4m3", quantizer, quantizer.square,
        )  # fmt: skip
        self.most_alive = max(self.most_alive, len(Quantised.alive))
        return result

    def split_quantize(
        self, x: Tensor, splits: list[int], quantizers: list[Quantizer], *, disable_bulk_allocation: bool
    ) -> list[Quantised]:
        assert x.shape[0] == sum(splits)
        return [self.quantize(*pair) for pair in zip(x.split(splits), quantizers, strict=True)]

    def fp8_transpose(self, x: Tensor, dtype: str, *, out: None) -> Tensor:
        assert x.is_contiguous()
        assert dtype == "e4m3"
        return x.t().contiguous()

    def get_num_cublas_streams(self) -> int:
        return 4

    def generic_gemm(
        self, first: Any, trans_a: bool, second: Any, trans_b: bool, *rest: Any, **names: Any
    ) -> tuple[Tensor]:
        assert len(rest) == 12
        assert (names["alpha"], names["beta"]) == (1.0, 0.0)
        return (product(first, second, "NT"[trans_a] + "NT"[trans_b]),)

    def te_general_grouped_gemm(
        self, first: Any, trans_a: bool, second: Any, trans_b: bool, outs: list[Tensor], dtype: Any, splits: list[int],
        *rest: Any,
    ) -> None:  # fmt: skip
        single = rest[2]
        layout = "NT"[trans_a] + "NT"[trans_b]
        self.groups += 1
        targets = outs[0].split(splits) if single else outs
        for a, b, out in zip(first, second, targets, strict=True):
            if out.numel():
                out.copy_(product(a, b, layout))


def recipe(*, delayed: bool = False, current: bool = False, block: bool = False) -> Any:
    """A recipe, as far as make_casts() asks."""
    return SimpleNamespace(
        delayed=lambda: delayed, float8_current_scaling=lambda: current, float8_block_scaling=lambda: block
    )


def install(monkeypatch: pytest.MonkeyPatch) -> tuple[Torch, Any]:
    """Put the stand-in in place; returns transformer_engine_torch and a loader of our modules by short name."""
    engine = Torch()
    state = SimpleNamespace(
        create=lambda recipe, mode, num_quantizers, **__: SimpleNamespace(
            make_quantizers=lambda: [
                # Input, weight, output.
                Quantizer(square=recipe.float8_block_scaling() and mode == "forward" and place % 3 == 1)
                for place in range(num_quantizers)
            ]
        )
    )
    pytorch = stand_in(prepare_for_saving=prepare_for_saving, restore_from_saved=restore_from_saved)
    recipes = stand_in(Float8CurrentScaling=MagicMock())
    packages = {
        "transformer_engine": stand_in(pytorch=pytorch),
        "transformer_engine.common": stand_in(recipe=recipes),
        "transformer_engine.common.recipe": recipes,
        "transformer_engine.pytorch": pytorch,
        "transformer_engine.pytorch.constants": stand_in(TE_DType={torch.bfloat16: 1, torch.float32: 2}),
        "transformer_engine.pytorch.quantization": stand_in(
            FP8GlobalStateManager=MagicMock(), get_fp8_te_dtype=MagicMock(), RecipeState=state
        ),
        "transformer_engine_torch": engine,
    }
    put_in(monkeypatch, packages, OURS)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    casts = import_module("overlap.backends.te_casts")
    monkeypatch.setattr(casts, "_workspace", lambda _: torch.empty(2**14, dtype=torch.uint8))
    return engine, lambda name: import_module(f"overlap.backends.{name}")
