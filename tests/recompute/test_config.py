"""Every rule of RecomputeConfig: what is accepted, what is refused and with which words."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from recompute import ConfigError, Granularity, Keep, Method, RecomputeConfig, RecomputeModule, Replay

MODULES = ", ".join(RecomputeModule)
NOTHING_KEPT = "has no effect unless layers or whole stages (attn, experts, shared_experts) are recomputed"


def test_default_is_no_recompute() -> None:
    config = RecomputeConfig()
    assert config == RecomputeConfig.none()
    assert not config.enabled
    assert dataclasses.astuple(config) == (Granularity.NONE, None, None, False, Replay.JUST_IN_TIME, (), Keep.DEVICE)


def test_constructors() -> None:
    assert RecomputeConfig.uniform(2) == RecomputeConfig(
        granularity=Granularity.FULL, method=Method.UNIFORM, num_layers=2
    )
    assert RecomputeConfig.block(3) == RecomputeConfig(granularity=Granularity.FULL, method=Method.BLOCK, num_layers=3)
    assert RecomputeConfig.block(3, recompute_mtp=True).recompute_mtp
    assert RecomputeConfig.uniform(1).enabled


@pytest.mark.parametrize("replay", Replay)
@pytest.mark.parametrize("method", Method)
def test_text_becomes_enum_member(method: Method, replay: Replay) -> None:
    config = RecomputeConfig(granularity="full", method=str(method), num_layers=1, replay=str(replay))
    assert config.granularity is Granularity.FULL
    assert config.method is method
    assert config.replay is replay


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (RecomputeConfig.none(), "none"),
        (RecomputeConfig.uniform(2), "uniform 2"),
        (RecomputeConfig.block(9), "block 9"),
        (RecomputeConfig.block(3, recompute_mtp=True), "block 3 + mtp"),
        (RecomputeConfig.uniform(2, replay=Replay.HIDDEN), "uniform 2 hidden"),
        (RecomputeConfig.block(3, recompute_mtp=True, replay=Replay.HIDDEN), "block 3 + mtp hidden"),
        (RecomputeConfig.uniform(2, keep=Keep.HOST), "uniform 2 keep host"),
        (RecomputeConfig.selective("moe_act", "attn"), "selective attn,moe_act"),
        (
            RecomputeConfig(
                granularity="selective", method="block", num_layers=3, modules=["experts"], replay="hidden", keep="host"
            ),
            "block 3 hidden + selective experts keep host",
        ),
    ],
)
def test_prints_as_in_tables(config: RecomputeConfig, text: str) -> None:
    assert str(config) == text


def test_modules_are_equal_in_any_order_and_spelling() -> None:
    config = RecomputeConfig.selective("attn", "moe_act")
    assert RecomputeConfig(granularity="selective", modules=[RecomputeModule.MOE_ACT, "attn"]) == config
    assert hash(RecomputeConfig.selective("moe_act", "attn")) == hash(config)
    assert config.modules == (RecomputeModule.ATTN, RecomputeModule.MOE_ACT)
    assert config.enabled


def test_is_immutable_hashable_and_picklable() -> None:
    config = RecomputeConfig.block(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_layers = 3  # type: ignore[misc]
    assert {config: "plan"}[RecomputeConfig.block(2)] == "plan"
    assert pickle.loads(pickle.dumps(config)) == config


def test_replace_checks_again() -> None:
    with pytest.raises(ConfigError, match="num_layers=0"):
        dataclasses.replace(RecomputeConfig.block(2), num_layers=0)


_COUNT = "must be an integer of at least 1"


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("value", [None, 0, -1, True, False, "2", 2.0])
def test_num_layers_must_be_a_positive_integer(method: Method, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        RecomputeConfig(granularity="full", method=method, num_layers=value)
    assert str(caught.value) == f"num_layers={value!r}: {_COUNT}"


@pytest.mark.parametrize("value", [None, "", "Uniform", "blocks", 1, ["uniform"]])
def test_full_needs_a_known_method(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        RecomputeConfig(granularity="full", method=value, num_layers=1)
    assert str(caught.value) == f"method={value!r}: must be 'uniform' or 'block'"


@pytest.mark.parametrize("value", [None, "", "Full", "partial", True, 0])
def test_granularity_must_be_known(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        RecomputeConfig(granularity=value)
    assert str(caught.value) == f"granularity={value!r}: must be 'none', 'full' or 'selective'"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"granularity": "selective"},
            "modules=(): must name at least one of attn, experts, shared_experts, core_attn, layernorm, mla_up_proj, "
            "moe_act",
        ),
        ({"granularity": "selective", "modules": ("attn", "atn")}, f"modules='atn': is no module; known are {MODULES}"),
        (
            {"granularity": "selective", "modules": "attn"},
            f"modules='attn': must be a tuple of names; known are {MODULES}",
        ),
        ({"granularity": "selective", "modules": ["attn", "attn"]}, "modules='attn': stands twice"),
        (
            {"granularity": "selective", "modules": ("attn", "core_attn")},
            "modules='core_attn': has no effect beside 'attn'",
        ),
        (
            {"granularity": "selective", "modules": ("experts", "moe_act")},
            "modules='moe_act': has no effect beside 'experts'",
        ),
        ({"modules": ("attn",)}, "modules=('attn',): has no effect unless granularity is 'full' or 'selective'"),
        (
            {"granularity": "full", "method": "block", "num_layers": 1, "modules": ("attn",)},
            "modules=('attn',): has no effect unless granularity is 'selective'",
        ),
        (
            {"granularity": "selective", "modules": ("attn",), "num_layers": 1},
            "num_layers=1: has no effect without a method",
        ),
        (
            {"granularity": "selective", "modules": ("attn",), "replay": "hidden"},
            "replay='hidden': has no effect without a method",
        ),
        (
            {"granularity": "selective", "modules": ("attn",), "method": "uniform", "num_layers": 1},
            "method='uniform': leaves no layer to the modules of 'selective': take 'block', or no method",
        ),
        ({"keep": "disk"}, "keep='disk': must be 'device', 'host' or 'sharded'"),
        ({"keep": "host"}, f"keep='host': {NOTHING_KEPT}"),
        ({"granularity": "selective", "modules": ("core_attn",), "keep": "sharded"}, f"keep='sharded': {NOTHING_KEPT}"),
        (
            {"granularity": "full", "method": "uniform", "num_layers": 1, "replay": None},
            "replay=None: must be 'just_in_time' or 'hidden'",
        ),
        ({"replay": "hidden"}, "replay='hidden': has no effect unless granularity is 'full' or 'selective'"),
        ({"method": "uniform"}, "method='uniform': has no effect unless granularity is 'full' or 'selective'"),
        ({"num_layers": 1}, "num_layers=1: has no effect unless granularity is 'full' or 'selective'"),
        ({"num_layers": 0}, "num_layers=0: has no effect unless granularity is 'full' or 'selective'"),
        ({"recompute_mtp": True}, "recompute_mtp=True: has no effect unless granularity is 'full' or 'selective'"),
        (
            {"granularity": "full", "method": "uniform", "num_layers": 1, "recompute_mtp": True},
            "recompute_mtp=True: only 'block' takes it: 'uniform' recomputes every MTP depth already",
        ),
        (
            {"granularity": "full", "method": "block", "num_layers": 1, "recompute_mtp": "false"},
            "recompute_mtp='false': must be True or False",
        ),
        ({"recompute_mtp": None}, "recompute_mtp=None: must be True or False"),
    ],
)
def test_refused(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RecomputeConfig(**fields)
    assert str(caught.value) == message
