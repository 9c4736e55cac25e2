"""A stand-in for Transformer Engine on a CPU: casts round to a grid, one for rows and a finer one for columns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

OURS = ("te_scaling", "te_casts", "te_linear", "te_grouped")


def stand_in(**members: Any) -> ModuleType:
    """A package with these members."""
    package = ModuleType("stand_in")
    package.__dict__.update({"__path__": [], **members})
    return package


class Quantizer:
    """Says what a cast makes."""

    def __init__(self) -> None:
        self.internal = False
        self.rows = self.columns = True

    def set_usage(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rows, self.columns = rowwise, columnwise


class Quantised:
    """Rows and columns of a tensor, each there or not."""

    alive: ClassVar[WeakSet[Quantised]] = WeakSet()

    def __init__(self, x: Tensor, quantizer: Quantizer) -> None:
        assert quantizer.internal
        x = x.detach()
        self.rows: Tensor | None = (x * 4).round() / 4 if quantizer.rows else None
        self.columns: Tensor | None = (x * 8).round() / 8 if quantizer.columns else None
        self.alive.add(self)

    def update_usage(self, *, rowwise_usage: bool, columnwise_usage: bool) -> None:
        assert columnwise_usage
        assert not rowwise_usage
        assert self.columns is not None
        self.rows = None

    def prepare_for_saving(self) -> tuple[list[Tensor | None], Quantised]:
        tensors = [self.rows, self.columns]
        self.rows = self.columns = None
        return tensors, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        self.rows, self.columns = tensors[:2]
        return tensors[2:]


def prepare_for_saving(*objects: Quantised) -> tuple[list[Tensor | None], list[Quantised]]:
    made = [one.prepare_for_saving() for one in objects]
    return [tensor for tensors, _ in made for tensor in tensors], [shell for _, shell in made]


def restore_from_saved(shells: Sequence[Quantised], tensors: list[Tensor | None]) -> list[Quantised]:
    for shell in shells:
        tensors = shell.restore_from_saved(tensors)
    return list(shells)


def product(first: Quantised, second: Quantised, layout: str) -> Tensor:
    """Reads what Transformer Engine's product of this layout reads; what is not there fails."""
    a = first.rows if layout[0] == "T" else first.columns
    b = second.columns if layout[1] == "T" else second.rows
    assert a is not None
    assert b is not None
    return {"TN": lambda: b @ a.t(), "NN": lambda: b @ a, "NT": lambda: b.t() @ a}[layout]()


class Torch:
    """transformer_engine_torch: counts casts and groups, and how many casts were alive at most."""

    def __init__(self) -> None:
        self.casts = self.groups = self.most_alive = 0

    def quantize(self, x: Tensor, quantizer: Quantizer) -> Quantised:
        assert x.is_contiguous()
        self.casts += 1
        result = Quantised(x, quantizer)
        self.most_alive = max(self.most_alive, len(Quantised.alive))
        return result

    def split_quantize(
        self, x: Tensor, splits: list[int], quantizers: list[Quantizer], *, disable_bulk_allocation: bool
    ) -> list[Quantised]:
        assert x.shape[0] == sum(splits)
        return [self.quantize(*pair) for pair in zip(x.split(splits), quantizers, strict=True)]

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
        create=lambda _, num_quantizers, **__: SimpleNamespace(
            make_quantizers=lambda: [Quantizer() for _ in range(num_quantizers)]
        )
    )
    pytorch = stand_in(prepare_for_saving=prepare_for_saving, restore_from_saved=restore_from_saved)
    recipes = stand_in(Float8CurrentScaling=MagicMock())
    for name, package in {
        "transformer_engine": stand_in(pytorch=pytorch),
        "transformer_engine.common": stand_in(recipe=recipes),
        "transformer_engine.common.recipe": recipes,
        "transformer_engine.pytorch": pytorch,
        "transformer_engine.pytorch.constants": stand_in(TE_DType={torch.bfloat16: 1, torch.float32: 2}),
        "transformer_engine.pytorch.quantization": stand_in(
            FP8GlobalStateManager=MagicMock(), get_fp8_te_dtype=MagicMock(), RecipeState=state
        ),
        "transformer_engine_torch": engine,
    }.items():
        monkeypatch.setitem(sys.modules, name, package)
    for name in OURS:
        # First set, so that what is imported now is gone after the test.
        monkeypatch.setitem(sys.modules, f"overlap.backends.{name}", stand_in())
        del sys.modules[f"overlap.backends.{name}"]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    casts = import_module("overlap.backends.te_casts")
    monkeypatch.setattr(casts, "_workspace", lambda _: torch.empty(2**14, dtype=torch.uint8))
    return engine, lambda name: import_module(f"overlap.backends.{name}")
