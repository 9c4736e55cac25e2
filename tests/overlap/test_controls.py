"""Controls: each breaks one thing, verify sees it, and it says so where there is nothing to break."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from overlap import ModelChunk
from overlap.controls import CONTROLS, NothingToBreak, TieBreaker, make_control
from overlap.model import Decoder, ModelConfig
from overlap.orders import ORDER_NAMES
from overlap.verify import Verdict, verify
from recompute import ConfigError, RecomputeConfig

U, B = RecomputeConfig.uniform, RecomputeConfig.block
NONE = RecomputeConfig.none()


def make(recompute: RecomputeConfig, *, order: str = "multi_queue", delay: bool = False, **changes: Any) -> ModelChunk:
    config = ModelConfig(**{"layers": 3, "hidden": 16, "vocab": 32, **changes})
    return ModelChunk(Decoder(config), recompute=recompute, order=order, delay_wgrad=delay)


def batches(microbatches: int, steps: int = 2) -> list[list[dict[str, Tensor]]]:
    drawn = torch.randint(32, (steps, microbatches, 2, 1, 16), generator=torch.Generator().manual_seed(0))
    return [[{"ids": ids, "labels": labels} for ids, labels in step] for step in drawn]


def broken(name: str, chunk: ModelChunk, microbatches: int) -> tuple[str, Verdict]:
    control = make_control(name, chunk, microbatches)
    return control.broken, verify(chunk, batches(microbatches, 1), engine_type=control.engine_type)


# Every rule, and every order, which swaps other slots; that a replay is broken does not depend on the order.
RULED = [*((U(2), order, False) for order in ORDER_NAMES), (U(1), "multi_queue", True), (B(1), "multi_queue", False)]
ELSEWHERE = {"swap_slots", "drop_bridge", "skip_snapshot"}
REPLAYED = [case for case in RULED if case[1] in {"plain", "multi_queue"}]


@pytest.mark.parametrize(
    ("name", "rule", "order", "delay"),
    [
        *(("swap_slots", *case) for case in RULED),
        *((name, *case) for name in CONTROLS if name not in ELSEWHERE for case in REPLAYED),
    ],
    ids=str,
)
def test_every_control_is_seen(name: str, rule: RecomputeConfig, order: str, delay: bool) -> None:
    chunk = make(rule, order=order, delay=delay, dropout=0.1)
    what, verdict = broken(name, chunk, 3)
    assert not verdict.equal
    if name == "double_effects":
        assert verdict.gradients.different == ()
        recomputed = range(1 if rule == B(1) else 3)
        logs = ("aux_loss_sum", "tokens_per_expert", "z_loss_sum")
        assert {f"layers.{layer}.router.{log}" for layer in recomputed for log in logs} == set(
            verdict.buffers.different
        )
        assert "applied in the replay too" in what
    else:
        assert verdict.gradients.different != ()
        assert {"no_rng": "draw anew", "unpinned_routing": "route again", "swap_slots": "are swapped"}[name] in what


def test_without_a_control_it_is_equal() -> None:
    """Negative control of all of them."""
    assert verify(make(U(2), dropout=0.1), batches(4, 1)).equal


def test_controls_name_the_stages() -> None:
    def what(name: str) -> str:
        return make_control(name, make(B(1), dropout=0.1), 3).broken

    # An adjoint draws its mask again whether or not its layer is recomputed.
    assert what("no_rng") == "stages 2.post, 1.post, 0.post, 0.attn draw anew in the replay"
    assert what("unpinned_routing").startswith("stages 0.attn route again")
    assert what("double_effects") == "effects of 0.attn are applied in the replay too"
    assert what("swap_slots") == "slots B1.0.attn and B2.0.attn are swapped"


def test_no_rng_leaves_the_live_generator_elsewhere() -> None:
    _, verdict = broken("no_rng", make(U(1), dropout=0.1), 2)
    assert not verdict.rng_equal


def test_swapped_slots_change_the_order_of_sums_alone() -> None:
    """Losses, buffers and the generator of the one step stay; only gradients of the moved stages differ."""
    chunk = make(U(1))
    control = make_control("swap_slots", chunk, 4)
    verdict = verify(chunk, batches(4, 1), engine_type=control.engine_type)
    assert (verdict.loss_equal, verdict.rng_equal, verdict.buffers.different) == (True, True, ())
    assert verdict.gradients.different != ()
    assert all(
        name.startswith(("embedding", "layers.0.attn", "layers.0.router")) for name in verdict.gradients.different
    )


@pytest.mark.parametrize(
    ("name", "chunk", "microbatches", "rule"),
    [
        ("no_rng", make(U(1)), 4, "no replay draws random numbers"),
        ("no_rng", make(NONE, dropout=0.1), 4, "no replay draws random numbers"),
        ("unpinned_routing", make(NONE), 4, "no routing is pinned"),
        ("unpinned_routing", make(U(1), dense_layers=3), 4, "no routing is pinned"),
        ("double_effects", make(NONE), 4, "no stage with effects is replayed"),
        ("double_effects", make(B(1), dense_layers=1), 4, "no stage with effects is replayed"),
        ("swap_slots", make(U(1)), 2, "fewer than 3 microbatches"),
        ("no_rng", make(U(1), layers=0, dropout=0.1), 4, "no replay draws random numbers"),
    ],
)
def test_nothing_to_break(name: str, chunk: ModelChunk, microbatches: int, rule: str) -> None:
    with pytest.raises(NothingToBreak, match=f"control='{name}': .*{rule}"):
        make_control(name, chunk, microbatches)


def test_an_unknown_control() -> None:
    with pytest.raises(ConfigError, match="control='no_luck': must be one of no_rng, unpinned_routing"):
        make_control("no_luck", make(U(1)), 4)


def test_ties_turned_round() -> None:
    ties = TieBreaker()
    scores = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.1, 0.9, 0.9, 0.2]])
    assert ties(scores, 2).tolist() == [[0, 1], [1, 2]]
    ties.turned = True
    assert ties(scores, 2).tolist() == [[3, 2], [2, 1]]
    clear = torch.tensor([[0.1, 0.4, 0.3, 0.2]])
    assert ties(clear, 2).tolist() == [[1, 2]]
