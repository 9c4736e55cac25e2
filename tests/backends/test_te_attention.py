"""Transformer Engine's attention in the place of the model's, with a stand-in for the package."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from enum import IntEnum
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from overlap.model import ModelConfig
from overlap.model.attention import CoreAttention
from recompute.errors import ConfigError
from recompute.rng import recorded_by
from tests.backends.te_stand_in import put_in, stand_in


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
        self.deterministic = False

    def forward(self, *inputs: Tensor) -> Tensor:
        torch.cuda.default_generators[0].set_offset(torch.cuda.default_generators[0].get_offset() + 16)
        stored = [x.as_strided(x.shape, torch.empty(x.shape).stride()).transpose(1, 2) for x in inputs]
        result: Tensor = CoreAttention()(*stored, 0.0, None)
        return result


class Kernels:
    """The kernels that the module takes, with their long lists of arguments; counts forwards."""

    def __init__(self) -> None:
        self.forwards = 0

    def fused_attn_fwd(self, *args: Any) -> list[Tensor]:
        assert len(args) == 32
        query, key, value, draws = *args[16:19], args[29]
        self.forwards += 1
        torch.cuda.default_generators[0].set_offset(torch.cuda.default_generators[0].get_offset() + draws)
        return [mixed(query, key, value), torch.zeros(1), torch.zeros(2)]

    def fused_attn_bwd(self, *args: Any) -> tuple[Tensor, ...]:
        assert len(args) == 32
        leaves = [x.detach().requires_grad_() for x in args[19:22]]
        assert [len(args[25]), args[23].shape] == [2, args[22].shape]
        with torch.enable_grad():
            return torch.autograd.grad(mixed(*leaves), leaves, args[23])


def mixed(*inputs: Tensor) -> Tensor:
    """[B, S, H, d] each."""
    query = inputs[0]
    result: Tensor = CoreAttention()(*(x.transpose(1, 2) for x in inputs), 0.0, None)
    return result.view(*query.shape[:-1], inputs[2].shape[-1])


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Generator:
    made = Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (made,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


@pytest.fixture(params=["modules", "kernels", "other kernels"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    recipe = stand_in(Float8CurrentScaling=MagicMock())
    engine = stand_in(DotProductAttention=Attention, autocast=lambda **_: nullcontext())
    attention = "transformer_engine.pytorch.attention"
    core_attention = f"{attention}.dot_product_attention"
    chosen = {"use_fused_attention": request.param != "other kernels", "fused_attention_backend": 1}
    chooser = stand_in(_attention_backends=chosen)
    packages = {
        "transformer_engine": stand_in(pytorch=engine),
        "transformer_engine.common": stand_in(recipe=recipe),
        "transformer_engine.common.recipe": recipe,
        "transformer_engine.pytorch": engine,
        "transformer_engine.pytorch.constants": stand_in(TE_DType={}),
        "transformer_engine.pytorch.quantization": stand_in(
            FP8GlobalStateManager=MagicMock(), get_fp8_te_dtype=MagicMock()
        ),
        attention: stand_in(),
        core_attention: stand_in(dot_product_attention=chooser),
        f"{core_attention}.dot_product_attention": chooser,
        f"{core_attention}.utils": stand_in(get_full_cu_seqlens=lambda *_: torch.zeros(3)),
        "transformer_engine.pytorch.cpp_extensions": stand_in(),
        "transformer_engine.pytorch.cpp_extensions.fused_attn": stand_in(
            **{name: MagicMock() for name in ("AttnBiasType", "AttnMaskType", "QKVFormat", "QKVLayout", "SoftmaxType")},
            FusedAttnBackend=IntEnum("FusedAttnBackend", {"F16_arbitrary_seqlen": 1}),
        ),
        "transformer_engine_torch": Kernels(),
    }
    put_in(monkeypatch, packages, ["te_attention", "te_fused_attention", "te_scaling"])
    module = import_module("overlap.backends.te_attention")
    config = ModelConfig(hidden=32, heads=4, kv_heads=2, head_dim=8, attention="gqa")
    made = module.TECoreAttention(config, request.param == "modules")
    made.way = request.param
    return made


def draw() -> list[Tensor]:
    return [torch.randn(2, heads, 16, 8) for heads in (4, 2, 2)]


def draw_again() -> list[Tensor]:
    torch.manual_seed(0)
    return draw()


def test_any_strides(core, generator):
    inputs = draw()
    packed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    want = CoreAttention()(*inputs, 0.0, None)
    for made in (core, copy.deepcopy(core)):
        assert torch.equal(made(*inputs, 0.0, None), want)
        assert torch.equal(made(*packed, 0.0, None), want)


def test_gradients(core, generator):
    """As torch's, whichever way; the kernels are asked for once per shape and then called directly."""
    found, want = ([x.requires_grad_() for x in draw_again()] for _ in range(2))
    seed = torch.linspace(-1, 1, 2 * 16 * 32).view(2, 16, 32)
    core(*found, 0.0, None).backward(seed)
    CoreAttention()(*want, 0.0, None).backward(seed)
    for ours, theirs in zip(found, want, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
    with torch.no_grad():
        core(*found, 0.0, None)
    assert sys.modules["transformer_engine_torch"].forwards == (2 if core.way == "kernels" else 0)
    assert len(core._chosen) == (0 if core.way == "modules" else 1)


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


@pytest.mark.parametrize("captured_by", ["a graphed step", "the caller"])
def test_a_graph_holds_whole_tiles_only(core, generator, captured_by, monkeypatch):
    """Of cuDNN's kernels, where a backward may follow, whoever calls them."""
    whole = [torch.randn(1, heads, 128, 8) for heads in (4, 2, 2)]
    core(*draw(), 0.0, None)
    with nullcontext() if captured_by == "the caller" else recorded_by(MagicMock()):
        if captured_by == "the caller":
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        core(*whole, 0.0, None)
        with nullcontext() if core.way == "other kernels" else pytest.raises(ConfigError, match="seq=16: a CUDA graph"):
            core(*draw(), 0.0, None)
        core.eval()
        with torch.no_grad():
            core(*draw(), 0.0, None)
