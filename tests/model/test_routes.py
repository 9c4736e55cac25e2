from __future__ import annotations

import pytest
import torch

from overlap.model import Decoder, ModelConfig, Router
from overlap.model.routes import InTurn, fix_route
from recompute.errors import ConfigError


def test_copies_go_to_the_first_experts_in_turn() -> None:
    assert InTurn(4)(torch.rand(3, 6), 2).tolist() == [[0, 1], [2, 3], [0, 1]]
    assert InTurn(3)(torch.rand(3, 6), 2).tolist() == [[0, 1], [2, 0], [1, 2]]


def test_every_router_is_fixed_and_weighs_its_rows_still() -> None:
    model = Decoder(ModelConfig(layers=2, experts=4, mtp=1))
    fix_route(model, 2)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    assert [router.select for router in routers] == [InTurn(2)] * 3
    routed = routers[0](torch.randn(5, 32))
    assert routed.routing.counts.tolist() == [5, 5, 0, 0]
    assert routed.probs.requires_grad


@pytest.mark.parametrize(
    ("config", "field"),
    [(ModelConfig(topk=3), "topk"), (ModelConfig(expert_groups=2, topk=1, topk_groups=1), "topk_groups")],
)
def test_a_choice_that_cannot_be_made_is_refused(config: ModelConfig, field: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        fix_route(Decoder(config), 2)
    assert refusal.value.field == field
