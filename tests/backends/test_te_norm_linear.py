"""A norm and the product behind it by one module, with a stand-in for the package."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from overlap.model import Decoder, ModelConfig
from overlap.model.attention import CoreAttention, LatentAttention
from overlap.model.norm import RMSNorm
from recompute.wgrad import WeightGradients, collect_weight_gradients, weights_left_out
from tests.backends.te_stand_in import install, stand_in

CONFIG = ModelConfig(layers=1, hidden=16, q_rank=12)


class Fused(torch.autograd.Function):
    """What the module does, with all that it asks of a weight that is gathered anew for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, weight: Tensor, eps: float, store: Any) -> Tensor:
        ctx.materialize = getattr(weight, "materialize_group_for_backward", None)
        if ctx.materialize is not None:
            (same,) = weight.materialize_group_for_forward()  # type: ignore[attr-defined]
            assert torch.equal(same, weight)
        ctx.save_for_backward(x, norm, weight)
        ctx.eps, ctx.store, ctx.wanted = eps, store, weight.requires_grad
        return F.rms_norm(x, norm.shape, norm, eps) @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = gradients
        x, norm, weight = ctx.saved_tensors
        assert ctx.materialize is None or ctx.materialize() == [None]
        with torch.enable_grad():
            leaves = (x.detach().requires_grad_(), norm.detach().requires_grad_())
            y = F.rms_norm(leaves[0], norm.shape, leaves[1], ctx.eps)
        assert ctx.store.delay_wgrad_compute() == ctx.wanted
        if ctx.wanted:
            ctx.store.put([y.detach(), grad], lambda y, grad: (grad.t() @ y, None))
        return *torch.autograd.grad(y, leaves, grad @ weight), None, None, None


class Module(nn.Module):
    """Stands for te.Linear, without its backward."""

    def __init__(self, inner: int, outer: int, *, bias: bool, params_dtype: torch.dtype, device: str) -> None:
        super().__init__()
        assert not bias
        self.weight = nn.Parameter(torch.empty(outer, inner, dtype=params_dtype, device=device))
        self.fp8_meta: dict[Any, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class NormModule(Module):
    """Stands for te.LayerNormLinear."""

    runs = 0

    def __init__(self, inner: int, outer: int, *, eps: float, normalization: str, **settings: Any) -> None:
        super().__init__(inner, outer, **settings)
        assert normalization == "RMSNorm"
        self.layer_norm_weight = nn.Parameter(torch.empty_like(self.weight[0]))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        NormModule.runs += 1
        result: Tensor = Fused.apply(x, self.layer_norm_weight, self.weight, self.eps, self.__dict__["wgrad_store"])
        return result


class Norm(RMSNorm):
    """Stands for TENorm, by its own name."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__(len(weight), eps)
        self.weight = weight


@pytest.fixture(params=[False, True], ids=["wide", "fp8"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[LatentAttention, LatentAttention]:
    """The same attention, torch's and converted."""
    _, load = install(monkeypatch)
    attention = stand_in(TENorm=Norm, TECoreAttention=lambda *_: CoreAttention())
    for name in ("te_products", "te_layers", "te_norm_linear", "te"):
        monkeypatch.setitem(sys.modules, f"overlap.backends.{name}", attention)
        del sys.modules[f"overlap.backends.{name}"]
    for name in ("te_attention", "te_norm"):
        monkeypatch.setitem(sys.modules, f"overlap.backends.{name}", attention)
    monkeypatch.setitem(sys.modules, "overlap.backends.te_permute", stand_in(TEPermutation=nn.Module))
    monkeypatch.setitem(sys.modules, "overlap.backends.te_router", stand_in(TERouter=nn.Module, offers=bool))
    engine: Any = sys.modules["transformer_engine.pytorch"]
    engine.Linear, engine.LayerNormLinear = Module, NormModule
    engine.prepare_for_saving = lambda *objects: (objects, objects)
    engine.restore_from_saved = lambda shells, tensors: tensors
    manager: Any = sys.modules["transformer_engine.pytorch.quantization"]
    manager.FP8GlobalStateManager.is_fp8_enabled.return_value = request.param
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(NormModule, "runs", 0)
    # The projections that read what a layer's norm gives stay torch's, so that this runs on a CPU.
    plain: Any = Decoder(CONFIG, seed=0).get_submodule("layers.0.attn.attention")
    found = copy.deepcopy(plain)
    keep = (found.query[0], found.latent, found.output)
    load("te").TEBackend(modules=True)._convert(found, CONFIG, None, "here")
    assert {type(module).__name__ for module in keep} == {"Linear"}
    found.query[0], found.latent, found.output = keep
    return plain, found


def run(attention: nn.Module) -> tuple[Tensor, ...]:
    x = torch.randn(2, 8, CONFIG.hidden, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = attention(x)
    y.square().sum().backward()
    gradients = [parameter.grad for parameter in attention.parameters()]
    attention.zero_grad()
    return y.detach(), x.grad, *gradients


def assert_close(found: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_both_projections_are_torchs(pair):
    plain, found = pair
    assert {name: x.shape for name, x in found.state_dict().items()} == {
        name: x.shape for name, x in plain.state_dict().items()
    }
    assert_close(run(found), run(plain))
    assert NormModule.runs == 2
    with torch.no_grad():
        x = torch.randn(1, 4, CONFIG.hidden)
        torch.testing.assert_close(found(x), plain(x))


def test_a_copy_has_its_own(pair):
    plain, found = pair
    run(found)
    made = found.key_value._normed
    assert len(made) == 1
    assert made not in found.key_value.__getstate__().values()
    copied = copy.deepcopy(found)
    with torch.no_grad():
        found.latent_norm.weight.zero_()
        found.key_value.weight.zero_()
    assert_close(run(copied), run(plain))


def test_a_product_put_in_later_gets_what_the_norm_gives(pair):
    plain, found = pair
    found.key_value = copy.deepcopy(plain.key_value)
    found.query[1] = copy.deepcopy(plain.query[1])
    found.query[2] = copy.deepcopy(plain.query[2])
    assert_close(run(found), run(plain))
    assert NormModule.runs == 0


def assert_one_runs_apart(plain: nn.Module, found: nn.Module) -> None:
    x = torch.randn(1, 4, CONFIG.hidden)
    torch.testing.assert_close(found(x), plain(x))
    assert NormModule.runs == 1


@pytest.mark.parametrize("hooked", ["latent_norm", "key_value"])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@torch.no_grad()
def test_hooks_see_their_module_run(pair, hooked, register):
    plain, found = pair
    seen: list[str] = []
    getattr(found.get_submodule(hooked), register)(lambda *_: seen.append(hooked))
    assert_one_runs_apart(plain, found)
    assert seen == [hooked]


@pytest.mark.parametrize("hooked", ["latent_norm", "key_value"])
@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@torch.no_grad()
def test_hooks_of_backward_keep_their_module_apart(pair, hooked, register):
    plain, found = pair
    getattr(found.get_submodule(hooked), register)(lambda *_: None)
    assert_one_runs_apart(plain, found)


@torch.no_grad()
def test_hooks_of_all_modules_see_both_run(pair):
    _, found = pair
    seen: list[nn.Module] = []
    with register_module_forward_hook(lambda module, *_: seen.append(module)):
        found(torch.randn(1, 4, CONFIG.hidden))
    assert {found.latent_norm, found.key_value} <= set(seen)
    assert NormModule.runs == 0


def test_norms_of_another_epsilon_are_other_modules(pair):
    _, found = pair
    x = torch.randn(5, CONFIG.kv_rank)
    results = []
    for eps in (1e-6, 1.0):
        found.latent_norm.eps = eps
        results.append(found.normed(found.latent_norm, found.key_value, x))
        torch.testing.assert_close(results[-1], found.key_value(found.latent_norm(x)))
    assert not torch.allclose(*results)


def test_weight_gradients_wait_and_may_be_drained_in_any_order(pair):
    """Row 56: as for every other product; a queue of the module would give another microbatch's."""
    _, found = pair
    inputs = [torch.randn(5, 12, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    norm, linear = found.query[1], found.query[2]
    want, pending = [], [WeightGradients() for _ in inputs]
    for x in inputs:
        found.normed(norm, linear, x).square().sum().backward()
        want.append(linear.weight.grad)
        found.zero_grad()
    with weights_left_out():
        outputs = [found.normed(norm, linear, x) for x in inputs]
    for output, collector in zip(outputs, pending, strict=True):
        with collect_weight_gradients(collector):
            output.square().sum().backward()
    assert linear.weight.grad is None
    assert norm.weight.grad is not None
    for turn, number in enumerate((2, 0, 1)):
        ((weight, gradient),) = pending[number].drain()
        assert weight is linear.weight
        assert torch.equal(gradient, want[number])
        assert not torch.allclose(gradient, want[turn]), "control: first in, first out"
