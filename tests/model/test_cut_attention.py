"""Layers cut behind attention: the same bits as autograd and as uncut layers, one more slot of each kind per layer."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch

from overlap.engine import Engine, MicrobatchState
from overlap.ir import Op
from overlap.lower import Issue
from overlap.memory import measure_step
from overlap.model import Decoder, ModelConfig
from overlap.step import train_step
from overlap.verify import StepFacts, compare, step_facts, verify
from recompute import ConfigError, RecomputeConfig
from recompute.config import Replay
from tests.mtp.tools import NONE, B, U, feeds_for, make, tiny
from tests.overlap.hiding import race_free

HIDDEN = Replay.HIDDEN
TABLE = [
    ("plain", NONE), ("multi_queue", U(1)), ("single_queue", B(2)), ("early_release", U(2)), ("fused", NONE),
    ("multi_queue", U(1, replay=HIDDEN)), ("single_queue", U(2, replay=HIDDEN)), ("early_release", B(1, replay=HIDDEN)),
]  # fmt: skip
"""Every built-in order in each of its variants, and every kind of rule."""
SHAPES: tuple[dict[str, Any], ...] = (
    {"dense_layers": 1, "dropout": 0.1, "attention_dropout": 0.1, "jitter": 0.1, "delay": True},
    {"layers": 1, "mtp": 1, "mhc": 2, "dropout": 0.1, "jitter": 0.1},
    {"layers": 1, "mtp": 2, "mtp_repeat": True, "padding": True, "packed": True, "delay": True},
    {"layers": 3, "dense_layers": 1, "mhc": 2, "dropout": 0.1, "delay": True},
)


def cut(rule: RecomputeConfig = NONE, **settings: Any) -> Any:
    return make(rule, cut_attention=True, **settings)


@pytest.mark.parametrize(("order", "rule", "shape"), [(*row, shape) for row, shape in zip(TABLE, cycle(SHAPES))])
def test_equal_under_every_order_and_rule(order: str, rule: RecomputeConfig, shape: dict[str, Any]) -> None:
    chunk = cut(rule, order=order, **shape)
    verdict = verify(chunk, [feeds_for(chunk.module.config, 2)])
    assert verdict.equal, verdict
    assert verdict.gradients.compared == len(list(chunk.parameters()))


class LosePiece(Engine):
    """What `post_attn` gives the residual state of layer 1 is lost."""

    def _backward(self, issue: Issue, owner: MicrobatchState) -> None:
        super()._backward(issue, owner)
        if issue.stage.key == (1, "post_attn"):
            for piece in issue.gives:
                if piece is not None and piece[0].startswith("1."):
                    del owner.grads[piece]


@pytest.mark.parametrize("shape", [{"mhc": 2}, {"dense_layers": 2}])
def test_a_lost_gradient_between_the_two_is_seen(shape: dict[str, Any]) -> None:
    """Control: layer 1's attention and all of layer 0 train on what is left."""
    chunk = cut(U(1), **shape)
    verdict = verify(chunk, [feeds_for(chunk.module.config, 1)], engine_type=LosePiece)
    assert verdict.loss_equal
    assert {"layers.1.attn.norm.weight", "layers.0.attn.ffn_norm.weight"} <= {*verdict.gradients.different}
    assert "layers.1.attn.ffn_norm.weight" not in verdict.gradients.different


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("rule", [NONE, U(2), B(1), U(1, replay=HIDDEN)], ids=str)
def test_one_more_slot_of_each_kind_per_layer(rule: RecomputeConfig, delay: bool) -> None:
    shape = {"layers": 3, "dense_layers": 1, "mtp": 1}
    microbatches, layers = 3, 4
    whole, parts = (
        step_facts(make(rule, delay=delay, cut_attention=on, **shape), microbatches) for on in (False, True)
    )
    replayed = sum(map(len, parts.segments))
    more = {"F": layers - replayed, "N": replayed, "R": replayed, "B": layers, "W": layers if delay else 0}
    assert parts.slots == {op: count + microbatches * more[op] for op, count in whole.slots.items()}
    assert _but_slots(parts) == _but_slots(whole)


def _but_slots(facts: StepFacts) -> tuple[object, ...]:
    return facts.segments, facts.replayed_a2a, facts.replayed_a2a_per_layer


@pytest.mark.parametrize("shape", [{"dropout": 0.1, "dense_layers": 1, "mhc": 2}, {"mtp": 1, "padding": True}])
def test_the_cut_changes_the_order_of_sums_alone(shape: dict[str, Any]) -> None:
    """Losses and buffers have the same bits, gradients the same value.

    A norm may read its input several times: uncut, the residual's gradient is added before these and not behind them.
    """
    chunks = [make(U(1), cut_attention=on, dtype="float64", **shape) for on in (False, True)]
    losses = [train_step(chunk, feeds_for(chunk.module.config, 1)) for chunk in chunks]
    assert [compare(*pair).different for pair in zip(*losses, strict=True)] == [()]
    assert compare(*(dict(chunk.module.named_buffers()) for chunk in chunks)).different == ()
    for whole, parts in zip(*(chunk.parameters() for chunk in chunks), strict=True):
        torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("rule", [U(1), U(2, replay=HIDDEN), B(2)], ids=str)
def test_nothing_more_survives_the_gap(rule: RecomputeConfig) -> None:
    """R2: what lies between the two stages is rebuilt, and is no segment's input."""
    kept = []
    for on in (False, True):
        chunk = make(rule, cut_attention=on, mtp=1, mhc=2)
        kept.append(chunk.planner.survivors(rule, chunk.program.trained()))
    assert kept[0] == kept[1]


@pytest.mark.parametrize("rule", [NONE, U(1)], ids=str)
def test_the_cut_holds_no_byte_more(rule: RecomputeConfig) -> None:
    """What is handed over is what the residual carries past the feed-forward anyway."""
    totals = []
    for on in (False, True):
        chunk = make(rule, cut_attention=on, mhc=2, delay=True)
        totals.append(measure_step(chunk, feeds_for(chunk.module.config, 2)).usage.total)
    assert totals[0] == totals[1]


@pytest.mark.parametrize(("order", "rule"), TABLE[1:])
def test_no_race(order: str, rule: RecomputeConfig) -> None:
    race_free(cut(rule, order=order, mtp=1, mhc=2, delay=True).planner, [rule] * 3)


def test_selective_attn_is_both_stages() -> None:
    """Each is replayed right before its own backward, and their parts are named apart."""
    rule = RecomputeConfig.selective("attn")
    chunk = cut(rule, dropout=0.1, jitter=0.1, dense_layers=1)
    assert verify(chunk, [feeds_for(chunk.module.config, 1)]).equal
    side = chunk.planner.side(rule, chunk.program.trained())
    assert side.alone == tuple((layer, name) for layer in (0, 1) for name in ("attn", "post_attn"))
    assert step_facts(chunk, 2).slots["R"] == 2 * 4
    inner = {stage.name: stage.inner for stage in chunk.program.layer_stages[1] if stage.name.endswith("attn")}
    assert inner == {"attn": {"core_attn", "layernorm", "mla_up_proj"}, "post_attn": {"layernorm"}}
    parts = RecomputeConfig.selective("core_attn", "layernorm", "mla_up_proj", "moe_act")
    assert verify(cut(parts, attention_dropout=0.1, delay=True), [feeds_for(chunk.module.config, 1)]).equal


def test_a_router_reads_the_mask_of_its_own_tokens() -> None:
    """An MTP depth's tokens are those ahead; a layer without a router reads no feed behind attention."""
    config = tiny(cut_attention=True, padding=True, packed=True, dense_layers=1, mtp=1)
    program = Decoder(config).program()
    feeds = ("padding_mask", "cu_seqlens", "positions")
    reads = [program.by_key[layer, "post_attn"].reads for layer in range(3)]
    assert reads == [("0.residual",), ("1.residual", *feeds), ("2.residual", *feeds)]
    assert [program.readers[f"{layer}.residual"][-1].name for layer in range(3)] == ["post"] * 3


def test_a_cut_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="cut_attention=True: has no effect with no layer at all"):
        ModelConfig(layers=0, cut_attention=True)


def test_first_passes_of_both_are_issued_apart() -> None:
    chunk = cut(U(1), order="early_release")
    seen: list[tuple[Op, str]] = []

    class Note:
        def before(self, issue: Issue, owner: MicrobatchState) -> None:
            if issue.stage.layer == 0 and owner.number == 0:
                seen.append((issue.slot.op, issue.stage.name))

        def after(self, issue: Issue, owner: MicrobatchState) -> None: ...

    train_step(chunk, feeds_for(chunk.module.config, 2), observers=(Note(),))
    assert seen[:2] == [(Op.NO_GRAD, "attn"), (Op.NO_GRAD, "post_attn")]
    assert [slot for slot in seen if slot[0] is Op.BACKWARD][-2:] == [(Op.BACKWARD, "post_attn"), (Op.BACKWARD, "attn")]
