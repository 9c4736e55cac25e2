"""The segmentation rule (DESIGN R1): the table of expected segments, and properties for any counts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recompute import ConfigError, RecomputeConfig, RecomputeSegment, format_segments, plan_segments

none, uniform, block = RecomputeConfig.none, RecomputeConfig.uniform, RecomputeConfig.block


def block_mtp(num_layers: int) -> RecomputeConfig:
    """`block` that recomputes MTP depths too."""
    return block(num_layers, recompute_mtp=True)


@pytest.mark.parametrize(
    ("decoder", "mtp", "config", "expected"),
    [
        (5, 0, uniform(1), "[0][1][2][3][4]"),
        (5, 0, uniform(2), "[0 1][2 3][4]"),
        (5, 0, uniform(3), "[0 1 2][3 4]"),
        (5, 0, uniform(5), "[0 1 2 3 4]"),
        (5, 0, uniform(8), "[0 1 2 3 4]"),
        (4, 2, uniform(2), "[0 1][2 3][4][5]"),
        (3, 2, uniform(2), "[0 1][2][3][4]"),  # never [2 3]: decoder and MTP do not mix
        (5, 0, block(3), "[0][1][2]"),
        (3, 0, block(9), "[0][1][2]"),
        (5, 1, block(2), "[0][1]"),
        (5, 1, block_mtp(2), "[0][1][5]"),
        (3, 2, block_mtp(9), "[0][1][2][3][4]"),
        (0, 2, uniform(1), "[0][1]"),
        (0, 2, uniform(4), "[0][1]"),  # a group size never joins MTP depths
        (0, 2, block_mtp(1), "[0][1]"),
        (0, 2, block(1), ""),
        (0, 0, uniform(1), ""),
        (0, 0, block_mtp(1), ""),
        (5, 0, none(), ""),
        (5, 2, none(), ""),
    ],
)
def test_expected_segments(decoder: int, mtp: int, config: RecomputeConfig, expected: str) -> None:
    assert format_segments(plan_segments(decoder, mtp, config)) == expected


@pytest.mark.parametrize(
    ("layers", "group", "sizes"),
    [(24, 7, [7, 7, 7, 3]), (5, 2, [2, 2, 1]), (3, 5, [3]), (1, 1, [1])],
)
def test_row_35_ragged_last_group(layers: int, group: int, sizes: list[int]) -> None:
    """Row 35: the last group ends at the last layer; every layer once, in order."""
    segments = plan_segments(layers, 0, uniform(group))
    assert [len(segment) for segment in segments] == sizes
    assert [layer for segment in segments for layer in segment.layers] == list(range(layers))


@pytest.mark.parametrize("config", [block(4), block(5), block(1000)])
def test_row_35_block_above_the_layer_count_means_all(config: RecomputeConfig) -> None:
    """Row 35: block with more layers than there are recomputes all of them."""
    assert format_segments(plan_segments(4, 0, config)) == "[0][1][2][3]"


@pytest.mark.parametrize("make", [uniform, block])
@pytest.mark.parametrize("num_layers", [0, -1, -7])
def test_row_35_no_layers_refused(make, num_layers: int) -> None:
    """Row 35: zero or a negative number is refused before any plan is made."""
    with pytest.raises(ConfigError, match=f"num_layers={num_layers}: must be an integer of at least 1"):
        make(num_layers)


counts = st.integers(min_value=0, max_value=70)
sizes = st.integers(min_value=1, max_value=90)


@given(counts, counts, sizes)
def test_uniform_covers_every_layer_once_in_order(decoder: int, mtp: int, group: int) -> None:
    segments = plan_segments(decoder, mtp, uniform(group))
    assert [layer for segment in segments for layer in segment.layers] == list(range(decoder + mtp))
    groups = [segment for segment in segments if segment.first < decoder]
    assert len(groups) == -(-decoder // group)
    assert all(len(segment) == group for segment in groups[:-1])
    assert all(1 <= len(segment) <= group and segment.last < decoder for segment in groups)
    assert all(len(segment) == 1 for segment in segments[len(groups) :])


@given(counts, counts, sizes, st.booleans())
def test_block_is_the_first_layers_one_each(decoder: int, mtp: int, count: int, recompute_mtp: bool) -> None:
    segments = plan_segments(decoder, mtp, block(count, recompute_mtp=recompute_mtp))
    depths = range(decoder, decoder + mtp) if recompute_mtp else range(0)
    assert [segment.layers for segment in segments] == [(layer,) for layer in (*range(min(count, decoder)), *depths)]


@given(counts, counts, st.one_of(st.just(none()), st.builds(uniform, sizes), st.builds(block_mtp, sizes)))
def test_segments_ascend_and_repeat_exactly(decoder: int, mtp: int, config: RecomputeConfig) -> None:
    segments = plan_segments(decoder, mtp, config)
    assert all(before.last < after.first for before, after in pairwise(segments))
    assert plan_segments(decoder, mtp, config) == segments


@pytest.mark.parametrize("value", [-1, True, None, "4", 4.0])
def test_counts_are_checked(value: object) -> None:
    rule = "must be an integer of at least 0"
    with pytest.raises(ConfigError) as caught:
        plan_segments(value, 0, none())
    assert str(caught.value) == f"num_decoder_layers={value!r}: {rule}"
    with pytest.raises(ConfigError) as caught:
        plan_segments(0, value, uniform(1))
    assert str(caught.value) == f"num_mtp_layers={value!r}: {rule}"


def test_segment_knows_its_ends() -> None:
    segment = RecomputeSegment((2, 3, 4))
    assert (segment.first, segment.last, len(segment), str(segment)) == (2, 4, 3, "[2 3 4]")
    assert 3 in segment
    assert 5 not in segment


@pytest.mark.parametrize("layers", [(), (-1, 0), (0, 2), (1, 0), (1, 1)])
def test_segment_refuses_other_than_consecutive_layers(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="must be consecutive layer numbers from 0 up"):
        RecomputeSegment(layers)


@pytest.mark.parametrize("layers", [None, 1, "01", [0, 1], (0.0, 1.0), (True, 2), ("a",)])
def test_layers_are_integers(layers: Any) -> None:
    with pytest.raises(ConfigError, match="must be a tuple of integers"):
        RecomputeSegment(layers)


@pytest.mark.parametrize("config", [None, "uniform", RecomputeConfig])
def test_segments_of_what_is_no_config(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"config=.*must be a RecomputeConfig"):
        plan_segments(2, 0, config)
