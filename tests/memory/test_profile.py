"""profile_step: the three columns in one answer."""

from __future__ import annotations

import json

import pytest

from overlap.chunk import ModelChunk
from overlap.memory import profile_step
from recompute.errors import ConfigError
from tests.memory.compare import decoder, tokens, uniform


@pytest.fixture(scope="module")
def profile():
    return profile_step(lambda: decoder(uniform(1), dropout=0.1), tokens(2))


def test_columns_of_the_json(profile) -> None:
    payload = json.loads(json.dumps(profile.as_json()))
    assert payload["measured"] == payload["predicted"]
    for column in ("measured", "predicted", "formula"):
        assert set(payload[column]) == {
            "segment_inputs", "pinned_routing", "live_segment", "pending_wgrad", "host_inputs", "rng_states", "rest",
            "total",
        }  # fmt: skip
    assert payload["in_slot_peak"] >= payload["measured"]["total"]
    assert payload["host"]["engine_us"] > 0


def test_measured_and_predicted_are_equal_slot_by_slot(profile) -> None:
    assert profile.measured == profile.predicted
    assert profile.measured.total > 0


def test_curve_is_for_pictures(profile) -> None:
    assert len(profile.curve) == len(profile.measured.curve)
    slot, kinds = profile.curve[0]
    assert slot == "F0.embed"
    assert sum(kinds.values()) == profile.measured.curve[0].total
    assert max(sum(kinds.values()) for _, kinds in profile.curve) == profile.measured.total


def test_unfit_feeds_are_refused_before_anything_runs() -> None:
    def build() -> ModelChunk:
        return decoder(layers=0)

    with pytest.raises(ConfigError, match="microbatches"):
        profile_step(build, [])
    with pytest.raises(ConfigError, match=r"microbatches\[0\]"):
        profile_step(build, [{"ids": tokens(1)[0]["ids"]}])
