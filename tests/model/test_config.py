"""ModelConfig refuses what breaks a rule, naming field, value and rule."""

from __future__ import annotations

import math
from typing import Any

import pytest

from overlap.model import Attention, DType, ModelConfig, Score
from recompute.errors import ConfigError

INTEGERS = [name for name, field in ModelConfig.__dataclass_fields__.items() if field.type == "int"]
FLOATS = [name for name, field in ModelConfig.__dataclass_fields__.items() if field.type == "float"]
BOOLS = [name for name, field in ModelConfig.__dataclass_fields__.items() if field.type == "bool"]
ZERO_ALLOWED = {"layers", "dense_layers", "q_rank", "shared_width", "mtp"}


def test_every_field_has_a_type_that_is_checked() -> None:
    enums = {"attention", "score", "dtype"}
    others = {"capacity", "mhc", "mtp_widths"}
    assert {*INTEGERS, *FLOATS, *BOOLS, *enums, *others} == set(ModelConfig.__dataclass_fields__)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [-1, None, True, "2", 2.0, math.nan])
def test_integer_fields_refuse_other_things(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*must be an integer") as raised:
        ModelConfig(**{name: value})
    assert raised.value.field == name


@pytest.mark.parametrize("name", sorted(set(INTEGERS) - ZERO_ALLOWED))
def test_sizes_refuse_zero(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0"):
        ModelConfig(**{name: 0})


@pytest.mark.parametrize("name", sorted(ZERO_ALLOWED))
def test_some_counts_may_be_zero(name: str) -> None:
    assert getattr(ModelConfig(**{name: 0}), name) == 0


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [-0.1, None, True, "0.1", math.nan, math.inf])
def test_number_fields_refuse_other_things(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}="):
        ModelConfig(**{name: value})


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "jitter"])
@pytest.mark.parametrize("value", [1, 1.5])
def test_probabilities_stay_below_one(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match="below 1"):
        ModelConfig(**{name: value})


@pytest.mark.parametrize("name", BOOLS)
@pytest.mark.parametrize("value", [0, 1, None, "True"])
def test_switches_refuse_other_things(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="must be True or False"):
        ModelConfig(**{name: value})


def test_float16_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="loss scaler"):
        ModelConfig(dtype="float16")


@pytest.mark.parametrize(("name", "value"), [("dtype", "int8"), ("attention", "mqa"), ("score", None), ("dtype", 4)])
def test_names_are_known(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="must be one of"):
        ModelConfig(**{name: value})


def test_text_becomes_the_named_member() -> None:
    config = ModelConfig(attention="gqa", score="softmax", dtype="bfloat16")
    assert (config.attention, config.score, config.dtype) == (Attention.GQA, Score.SOFTMAX, DType.BFLOAT16)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("topk", {"topk": 5, "experts": 4}),
        ("topk", {"topk": 3, "experts": 8, "expert_groups": 4, "topk_groups": 1}),
        ("expert_groups", {"experts": 4, "expert_groups": 3}),
        ("topk_groups", {"expert_groups": 2, "topk_groups": 3}),
        ("kv_heads", {"heads": 4, "kv_heads": 3, "attention": "gqa"}),
        ("dense_layers", {"layers": 1, "dense_layers": 2}),
        ("rope_dim", {"rope_dim": 7}),
        ("head_dim", {"head_dim": 7, "attention": "gqa"}),
        ("head_dim", {"head_dim": 8}),
        ("kv_rank", {"kv_rank": 8, "attention": "gqa"}),
        ("mtp", {"mtp": 8, "max_seq": 8}),
        ("mtp_widths", {"mtp": 2, "mtp_widths": (8,)}),
        ("mtp_widths", {"mtp": 2, "mtp_widths": (8, 16), "mtp_repeat": True}),
        ("mtp_widths", {"mtp": 2, "mtp_widths": [8, 16]}),
        ("mtp_widths", {"mtp": 2, "mtp_widths": (8, 0)}),
        ("mtp_widths", {"mtp_widths": (8,)}),
        ("mtp_repeat", {"mtp_repeat": True}),
        ("mtp_dense", {"mtp_dense": True}),
        ("mtp_detach", {"mtp_detach": True}),
        ("mtp_scale", {"mtp_scale": 0.2}),
        ("mtp_scale", {"mtp": 1, "mtp_scale": 0}),
        ("mhc", {"mhc": 0}),
        ("mhc", {"mhc": -1}),
        ("mhc", {"mhc": True}),
        ("mhc", {"mhc": 2.0}),
        ("mhc", {"mhc": 2, "layers": 0}),
        ("mhc_iterations", {"mhc_iterations": 5}),
        ("mhc_iterations", {"mhc": 2, "mhc_iterations": 0}),
        ("mhc_epsilon", {"mhc_epsilon": 1e-3}),
        ("mhc_epsilon", {"mhc": 2, "mhc_epsilon": 0.0}),
        ("padding", {"padding": True, "layers": 0}),
        ("packed", {"packed": True, "layers": 0}),
    ],
)
def test_fields_fit_together(name: str, settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as raised:
        ModelConfig(**settings)
    assert raised.value.field == name
