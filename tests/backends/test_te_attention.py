"""Transformer Engine's attention in the place of the model's, with a stand-in for the package."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from overlap.model import ModelConfig
from overlap.model.attention import CoreAttention


class Generator:
    """Of a device: only its place counts."""

    def __init__(self) -> None:
        self.offset = 8

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


class Attention(nn.Module):
    """Takes the memory of what it is given as [B, S, H, d], whatever the strides, and moves the generator on."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.fp8_meta: dict[Any, Any] = {}

    def forward(self, *inputs: Tensor) -> Tensor:
        torch.cuda.default_generators[0].set_offset(torch.cuda.default_generators[0].get_offset() + 16)
        stored = [x.as_strided(x.shape, torch.empty(x.shape).stride()).transpose(1, 2) for x in inputs]
        result: Tensor = CoreAttention()(*stored, 0.0, None)
        return result


def stand_in(**members: Any) -> ModuleType:
    """A package with these members."""
    package = ModuleType("stand_in")
    package.__dict__.update({"__path__": [], **members})
    return package


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Generator:
    made = Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (made,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return made


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    recipe = stand_in(Float8CurrentScaling=MagicMock())
    engine = stand_in(DotProductAttention=Attention, autocast=lambda **_: nullcontext())
    for name, package in {
        "transformer_engine": stand_in(pytorch=engine),
        "transformer_engine.common": stand_in(recipe=recipe),
        "transformer_engine.common.recipe": recipe,
        "transformer_engine.pytorch": engine,
        "transformer_engine.pytorch.constants": stand_in(TE_DType={}),
        "transformer_engine.pytorch.quantization": stand_in(
            FP8GlobalStateManager=MagicMock(), get_fp8_te_dtype=MagicMock()
        ),
        "transformer_engine_torch": stand_in(),
    }.items():
        monkeypatch.setitem(sys.modules, name, package)
    ours = ("overlap.backends.te_attention", "overlap.backends.te_scaling")
    for name in ours:
        # First set, so that what is imported now is gone after the test.
        monkeypatch.setitem(sys.modules, name, stand_in())
        del sys.modules[name]
    module = import_module(ours[0])
    return module.TECoreAttention(ModelConfig(hidden=32, heads=4, kv_heads=2, head_dim=8, attention="gqa"))


def draw() -> list[Tensor]:
    return [torch.randn(2, heads, 16, 8) for heads in (4, 2, 2)]


def test_any_strides(core, generator):
    inputs = draw()
    packed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    want = CoreAttention()(*inputs, 0.0, None)
    for made in (core, copy.deepcopy(core)):
        assert torch.equal(made(*inputs, 0.0, None), want)
        assert torch.equal(made(*packed, 0.0, None), want)


def test_control_strides_count(core, generator):
    """The stand-in tells contiguous inputs from others."""
    inputs = draw()
    views = [x.transpose(1, 2) for x in inputs]
    assert not torch.equal(Attention()(*views), CoreAttention()(*inputs, 0.0, None))


@pytest.mark.parametrize(("dropout", "moved"), [(0.0, 0), (0.1, 16)])
def test_generator_moves_with_dropout_only(core, generator, dropout, moved):
    core(*draw(), dropout, None)
    assert generator.offset == 8 + moved


def test_generator_is_put_back_after_a_failure(core, generator):
    query, key, value = draw()
    with pytest.raises(RuntimeError):
        core(query[..., :4], key, value, 0.0, None)
    assert generator.offset == 8


def test_a_mask_is_left_to_torch(core, generator):
    inputs = draw()
    mask = torch.ones(2, 1, 16, 16, dtype=torch.bool).tril()
    assert torch.equal(core(*inputs, 0.0, mask), CoreAttention()(*inputs, 0.0, mask))
    assert generator.offset == 8
