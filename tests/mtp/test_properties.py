"""Any mix of the options at small sizes: bitwise equal to plain autograd, whoever is replayed."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from recompute import RecomputeConfig
from recompute.config import Replay
from tests.mtp.tools import make, verdict_of


@st.composite
def models(draw: Any) -> dict[str, Any]:
    """Settings of a model that fit together."""
    layers = draw(st.integers(0, 3))
    mtp = draw(st.integers(0 if layers else 1, 3))
    chosen: dict[str, Any] = {
        "layers": layers,
        "mtp": mtp,
        "dense_layers": draw(st.integers(0, layers)),
        "mhc": draw(st.sampled_from([None, 1, 2, 4])),
        "shared_width": draw(st.sampled_from([0, 8])),
        "attention": draw(st.sampled_from(["mla", "gqa"])),
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "float64"])),
        "dropout": draw(st.sampled_from([0.0, 0.2])),
        "jitter": draw(st.sampled_from([0.0, 0.1])),
    }
    for name in ("tied", "per_token_loss", "padding", "packed", "cut_attention"):
        chosen[name] = draw(st.booleans())
    # the step counts the tokens of a per-token loss by the labels
    chosen["labels"] = chosen["per_token_loss"] or draw(st.booleans())
    if mtp:
        for name in ("mtp_repeat", "mtp_dense", "mtp_detach"):
            chosen[name] = draw(st.booleans())
        same = chosen["mtp_repeat"]
        chosen["mtp_widths"] = draw(st.sampled_from([(), (8,) * mtp, (8,) * mtp if same else tuple(range(4, 4 + mtp))]))
    return chosen


@st.composite
def recomputes(draw: Any) -> RecomputeConfig:
    """A recompute rule."""
    replay = draw(st.sampled_from(list(Replay)))
    rule = draw(st.sampled_from(["none", "uniform", "block", "block with depths"]))
    layers = draw(st.integers(1, 4))
    if rule == "none":
        return RecomputeConfig.none()
    if rule == "uniform":
        return RecomputeConfig.uniform(layers, replay=replay)
    return RecomputeConfig.block(layers, recompute_mtp=rule == "block with depths", replay=replay)


@settings(max_examples=30)
@given(
    model=models(),
    recompute=recomputes(),
    order=st.sampled_from(["multi_queue", "single_queue"]),
    delay=st.booleans(),
    batch=st.integers(1, 3),
    microbatches=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_every_mix_is_bitwise_equal(
    model: dict[str, Any],
    recompute: RecomputeConfig,
    order: str,
    delay: bool,
    batch: int,
    microbatches: int,
    seed: int,
) -> None:
    chunk = make(recompute, order=order, delay=delay, **model)
    verdict = verdict_of(chunk, microbatches, batch=batch, seed=seed)
    assert verdict.equal, verdict
