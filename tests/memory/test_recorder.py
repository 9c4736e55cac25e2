"""Live bytes at slot borders: known amounts in known bins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap.engine import Engine, MicrobatchState
from overlap.lower import Issue
from overlap.memory import Bin, gaps_of, measure_step
from tests.memory.compare import decoder, first_pass, measure_with, none, tokens, uniform

BATCH, SEQ, HIDDEN, TOPK, EXPERTS = 2, 6, 16, 2, 4
COPIES = BATCH * SEQ * TOPK
INPUT_BYTES = BATCH * SEQ * HIDDEN * 4
ROUTING_BYTES = 8 * (COPIES + EXPERTS) + 4 * (3 * COPIES + EXPERTS)
"""expert_ids and counts, int64; source, token, inverse and ends, int32."""


@pytest.mark.parametrize("layers", [2, 16])
def test_first_pass_holds_one_layer_beside_inputs_and_routing(layers) -> None:
    """R2: no-grad outputs die at their last use, whatever the depth."""
    passed = first_pass(measure_step(decoder(uniform(1), layers=layers), tokens(1)).usage)
    stages = len(passed) // layers
    rest = [border[Bin.REST] for border in passed]
    # The output of the last layer goes to the head and is no segment's input.
    rest[-1] -= INPUT_BYTES
    per_layer = [rest[stages * layer : stages * (layer + 1)] for layer in range(layers)]
    # Each layer leaves two scalar losses, which the step returns.
    losses = 2 * 4
    assert per_layer == [[nbytes + losses * layer for nbytes in per_layer[0]] for layer in range(layers)]
    assert max(per_layer[0]) == one_layer_bytes() + losses
    assert [border[Bin.SEGMENT_INPUTS] for border in passed[::stages]] == [
        INPUT_BYTES * (layer + 1) for layer in range(layers)
    ]
    assert [border[Bin.PINNED_ROUTING] for border in passed[::stages]] == [
        ROUTING_BYTES * (layer + 1) for layer in range(layers)
    ]
    assert all(border[Bin.LIVE_SEGMENT] == border[Bin.PENDING_WGRAD] == 0 for border in passed)


def one_layer_bytes() -> int:
    """Where a layer's first pass is widest: at the end of its experts."""
    # Residual, shared output; the experts' input rows and probabilities; their output.
    row = HIDDEN * 4
    return 2 * BATCH * SEQ * row + COPIES * (row + 4) + COPIES * row


@pytest.mark.parametrize("layers", [1, 4])
def test_no_segment_inputs_without_recompute(layers) -> None:
    peaks = measure_step(decoder(none, layers=layers), tokens(2)).usage.peaks.bins
    assert peaks[Bin.SEGMENT_INPUTS] == peaks[Bin.LIVE_SEGMENT] == peaks[Bin.RNG_STATES] == 0
    # The next microbatch routes its first layer before this one's last is through its backward.
    assert peaks[Bin.PINNED_ROUTING] == (layers + 1) * ROUTING_BYTES


def test_a_live_segment_grows_with_its_layers_not_with_the_model() -> None:
    def live(group: int, layers: int) -> int:
        return measure_step(decoder(uniform(group), layers=layers), tokens(2)).usage.peaks.bins[Bin.LIVE_SEGMENT]

    assert live(1, 2) == live(1, 4)
    assert live(2, 2) == live(2, 4) > live(1, 4)


def test_weight_gradients_wait_only_if_delayed() -> None:
    def pending(delay_wgrad: bool) -> int:
        chunk = decoder(uniform(1), delay_wgrad=delay_wgrad)
        return measure_step(chunk, tokens(2)).usage.peaks.bins[Bin.PENDING_WGRAD]

    assert pending(False) == 0
    assert pending(True) > 0


def test_feeds_parameters_and_gradients_are_outside() -> None:
    chunk = decoder(none, layers=0, tied=True)
    last = measure_step(chunk, tokens(1)).usage.curve[-1]
    assert last.slot == "B0.weights"
    assert last.total == 4, "only the loss is left"
    assert all(p.grad is not None and bool(p.grad.any()) for p in chunk.module.parameters())


def test_the_curve_names_slots_by_microbatch_of_the_step() -> None:
    curve = measure_step(decoder(layers=1), tokens(3)).usage.curve
    assert {border.slot[1] for border in curve} == {"0", "1", "2"}
    assert curve[0].slot == "F0.embed"
    assert curve[-1].slot == "B2.embed"


def test_in_slot_peak_includes_temporaries() -> None:
    measured = measure_step(decoder(uniform(1)), tokens(2))
    assert measured.in_slot_peak > measured.usage.total


def test_gap_keeps_inputs_and_routing_apart() -> None:
    (gap,) = gaps_of(decoder(uniform(2), layers=3), 1)
    assert gap.segment_inputs == {("embedded", 0), ("1.hidden", 0)}
    assert gap.pinned == {(f"{layer}.{name}", 0) for layer in range(3) for name in ("routing", "arrival")}


class Hoarder(Engine):
    """Keeps one value of every forward for good."""

    kept: list[Any] = []  # noqa: RUF012 (emptied by the test)

    def _forward(self, issue: Issue, owner: MicrobatchState, *rest: Any) -> tuple[Any, ...]:
        outputs = super()._forward(issue, owner, *rest)
        self.kept += [output for output in outputs if torch.is_tensor(output) and output.dim() > 1]
        return outputs


def test_a_leaked_value_shows() -> None:
    """Negative control."""
    Hoarder.kept.clear()
    clean = measure_with(Engine, decoder(uniform(1)), tokens(2))
    leaky = measure_with(Hoarder, decoder(uniform(1)), tokens(2))
    Hoarder.kept.clear()
    assert leaky.total > clean.total
    assert leaky.curve[-1].total > clean.curve[-1].total
