from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.parallel.layout import ParallelLayout, Place
from recompute.errors import ConfigError


def test_groups_of_two_stages_of_two_replicas_of_two_slices() -> None:
    layout = ParallelLayout(world_size=8, ep=2, pp=2)
    assert layout.shape == (2, 2, 2)
    assert layout.ep_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.data_groups() == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout.expert_data_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.pp_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.place(6) == Place(pp=1, expert_data=1, ep=0)
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [layout.local_experts(6, rank) for rank in (0, 1, 6)] == [range(0, 3), range(3, 6), range(0, 3)]


@given(ep=st.integers(1, 4), replicas=st.integers(1, 4), pp=st.integers(1, 3))
def test_every_rank_is_in_one_group_of_each_kind(ep: int, replicas: int, pp: int) -> None:
    layout = ParallelLayout(world_size=ep * replicas * pp, ep=ep, pp=pp)
    for groups, size in (
        (layout.ep_groups(), ep),
        (layout.data_groups(), ep * replicas),
        (layout.expert_data_groups(), replicas),
        (layout.pp_groups(), pp),
    ):
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(layout.world_size))
        assert {len(ranks) for ranks in groups} == {size}
    for ranks in layout.expert_data_groups():
        assert len({layout.local_experts(4 * ep, rank) for rank in ranks}) == 1
    for ranks in layout.ep_groups():
        experts = [expert for rank in ranks for expert in layout.local_experts(4 * ep, rank)]
        assert experts == list(range(4 * ep))


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ({"world_size": 0}, "world_size"),
        ({"world_size": 4, "ep": 3}, "ep"),
        ({"world_size": 4, "pp": 3}, "pp"),
        ({"world_size": 4, "pp": 2, "ep": 4}, "ep"),
        ({"world_size": 4, "ep": True}, "ep"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, field: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        ParallelLayout(**sizes)
    assert refusal.value.field == field


def test_ep_divides_the_experts() -> None:
    with pytest.raises(ConfigError, match="must divide experts"):
        ParallelLayout(world_size=4, ep=4).local_experts(6, 0)


def test_there_is_no_such_rank() -> None:
    with pytest.raises(ConfigError, match="rank"):
        ParallelLayout(world_size=2).place(2)
