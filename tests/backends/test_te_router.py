"""The choice of experts by Transformer Engine's router, with a stand-in that chooses as its kernel does."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap.model import ModelConfig, Router, init_weights, update_expert_bias
from overlap.model.routes import InTurn
from tests.backends.te_stand_in import put_in, stand_in

OFFERED: dict[str, dict[str, Any]] = {
    "bias": {},
    "plain": {"expert_bias": False},
    "softmax": {"score": "softmax", "expert_bias": False},
    "groups": {"expert_groups": 4, "topk_groups": 2, "topk": 4},
    "groups that limit nothing": {"expert_groups": 4, "topk_groups": 4, "topk": 3},
}
OTHERS: dict[str, dict[str, Any]] = {
    "softmax with a bias": {"score": "softmax"},
    "groups of which one each": {"expert_groups": 4, "topk_groups": 2, "topk": 2},
}


def choose(
    logits: Tensor, topk: int, *, use_pre_softmax: bool, num_groups: int | None, group_topk: int | None,
    scaling_factor: None, score_function: str, expert_bias: Tensor | None, topk_indices: Tensor,
) -> None:  # fmt: skip
    """As Megatron defines it: a group counts as its topk // group_topk best."""
    scores = logits.sigmoid() if score_function == "sigmoid" else logits.softmax(-1)
    assert not logits.requires_grad
    assert expert_bias is None or score_function == "sigmoid"
    if expert_bias is not None:
        scores = scores + expert_bias
    if num_groups is not None and group_topk is not None:
        grouped = scores.view(len(scores), num_groups, -1)
        worth = grouped.topk(topk // group_topk).values.sum(-1)
        inside = torch.zeros_like(worth).scatter(-1, worth.topk(group_topk).indices, 1).bool()
        scores = grouped.masked_fill(~inside.unsqueeze(-1), float("-inf")).flatten(1)
    topk_indices.copy_(scores.topk(topk).indices.flip(-1))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    packages = {
        "transformer_engine": stand_in(),
        "transformer_engine.pytorch": stand_in(),
        "transformer_engine.pytorch.router": stand_in(fused_topk_with_score_function=choose),
    }
    put_in(monkeypatch, packages, ["te_router"])
    return import_module("overlap.backends.te_router")


def make(settings: dict[str, Any]) -> Router:
    router = Router(ModelConfig(**{"hidden": 8, "experts": 16, **settings}))
    init_weights(router, 3)
    router.expert_bias.copy_(torch.linspace(-0.3, 0.3, 16))
    return router


@pytest.mark.parametrize("name", OFFERED)
def test_the_same_experts(module, name):
    router = make(OFFERED[name])
    assert module.offers(router.config)
    made = module.TERouter(router)
    logits = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    found, want = made._pick(logits), router._pick(logits)
    assert found.dtype == want.dtype
    assert torch.equal(found.sort().values, want.sort().values)
    assert not torch.equal(found, want), "control: in another order"


@pytest.mark.parametrize("name", OTHERS)
def test_other_settings_are_left_to_the_model(module, name):
    assert not module.offers(make(OTHERS[name]).config)


def test_groups_would_be_chosen_otherwise(module):
    """Control: where offers() says no, the kernel does choose other experts."""
    router = make(OTHERS["groups of which one each"])
    logits = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    found, want = (one._pick(logits).sort().values for one in (module.TERouter(router), router))
    assert not torch.equal(found, want)


def test_it_takes_over_what_the_router_has(module):
    router = make({})
    made = copy.deepcopy(module.TERouter(router))
    assert {name: x.shape for name, x in made.state_dict().items()} == {
        name: x.shape for name, x in router.state_dict().items()
    }
    assert all(torch.equal(x, router.state_dict()[name]) for name, x in made.state_dict().items())
    shared = module.TERouter(router)
    assert shared.weight is router.weight
    assert shared.tokens_per_expert is router.tokens_per_expert
    before = router.expert_bias.clone()
    shared.count(torch.arange(16))
    update_expert_bias(shared)
    assert not torch.equal(router.expert_bias, before)


def test_a_fixed_route_stays(module):
    router = make({})
    router.select = InTurn(4)
    assert module.TERouter(router)._pick(torch.randn(4, 16)).tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]
