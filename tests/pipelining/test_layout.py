from __future__ import annotations

from typing import Any

import pytest

from overlap.pipelining.layout import PipelineLayout, Placement, even_layers, make_layout, parse_layers
from recompute.errors import ConfigError


def test_loop_and_v_place_their_stages() -> None:
    loop = make_layout(pp=2, vpp=3, layers=8)
    assert [loop.stages_of(rank) for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert loop.layers == (2, 2, 1, 1, 1, 1)
    v = make_layout(pp=3, vpp=2, layers=6, placement=Placement.V)
    assert [v.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [v.rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize("per_stage", [(2, 0, 3, 0), (0, 0, 0, 5), (5, 0, 0, 0)])
def test_ragged_and_empty_stages_cover_every_layer_once(per_stage: tuple[int, ...]) -> None:
    layout = make_layout(pp=2, vpp=2, layers=5, per_stage=per_stage)
    assert [layer for stage in range(4) for layer in layout.layers_of(stage)] == list(range(5))
    assert [len(layout.layers_of(stage)) for stage in range(4)] == list(per_stage)


def test_even_layers_differ_by_one_at_most() -> None:
    for layers in range(12):
        for stages in range(1, 6):
            counts = even_layers(layers, stages)
            assert sum(counts) == layers
            assert max(counts) - min(counts) <= 1


def test_text() -> None:
    assert parse_layers("3, 0,12") == (3, 0, 12)
    with pytest.raises(ConfigError, match="pp_layout"):
        parse_layers("3,-1")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"pp": 0, "vpp": 1, "layers": ()}, "pp"),
        ({"pp": 2, "vpp": True, "layers": (1, 1)}, "vpp"),
        ({"pp": 2, "vpp": 2, "layers": (1, 1, 1)}, "pp_layout"),
        ({"pp": 2, "vpp": 2, "layers": (1, 1, 1, -1)}, "pp_layout"),
        ({"pp": 2, "vpp": 1, "layers": (1, 1), "placement": Placement.V}, "vpp"),
    ],
)
def test_bad_layouts_name_the_field(fields: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PipelineLayout(**fields)
    assert caught.value.field == field


def test_layers_must_add_up() -> None:
    with pytest.raises(ConfigError, match="add up to the model's 4 layers"):
        make_layout(pp=2, vpp=1, layers=4, per_stage=(1, 2))


BAD: list[dict[str, Any]] = [
    {"layers": None}, {"layers": [1, 1, 1, 1]}, {"layers": "1111"}, {"layers": 4}, {"placement": "x"},
    {"placement": None},
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_kinds(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be "):
        PipelineLayout(**{"pp": 2, "vpp": 2, "layers": (1, 1, 1, 1), **bad})


def test_a_placement_may_be_text() -> None:
    text: Any = "v"
    assert PipelineLayout(pp=2, vpp=2, layers=(1, 1, 1, 1), placement=text).placement is Placement.V


@pytest.mark.parametrize("bad", [{"layers": None}, {"layers": 4.0}, {"per_stage": 2}, {"per_stage": "22"}], ids=str)
def test_kinds_of_a_model(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be "):
        make_layout(**{"pp": 2, "vpp": 1, "layers": 4, **bad})
