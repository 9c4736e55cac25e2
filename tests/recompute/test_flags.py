"""Flags as users know them: every name arrives, no name is ignored, errors name the flag."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from types import MappingProxyType
from typing import Any

import pytest

from recompute import FLAG_NAMES, ConfigError, FlagSettings, RecomputeConfig, Replay, plan_segments, read_flags

UNIFORM_1 = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def refusal(flags: dict) -> str:
    """Return the message with which `flags` are refused."""
    with pytest.raises(ConfigError) as caught:
        read_flags(flags)
    return str(caught.value)


def test_no_flags_means_everything_off() -> None:
    off = FlagSettings(recompute=RecomputeConfig.none(), overlap=False, delay_wgrad=False, mtp_num_layers=0)
    assert read_flags({}) == off
    assert read_flags(Namespace()) == off


def test_every_flag_arrives() -> None:
    flags = {
        "recompute_granularity": "selective",
        "recompute_method": "block",
        "recompute_num_layers": 3,
        "recompute_mtp": True,
        "recompute_replay": "hidden",
        "recompute_modules": ["attn", "moe_act"],
        "recompute_keep": "host",
        "overlap_moe_expert_parallel_comm": True,
        "delay_wgrad_compute": True,
        "mtp_num_layers": 2,
    }
    assert set(flags) == set(FLAG_NAMES)
    assert read_flags(flags) == FlagSettings(
        recompute=RecomputeConfig(
            granularity="selective",
            method="block",
            num_layers=3,
            recompute_mtp=True,
            replay=Replay.HIDDEN,
            modules=("attn", "moe_act"),
            keep="host",
        ),
        overlap=True,
        delay_wgrad=True,
        mtp_num_layers=2,
    )


def test_none_is_not_set() -> None:
    """As argparse leaves an option that was not given."""
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_replay", "mtp_num_layers",
             "recompute_modules", "recompute_keep")  # fmt: skip
    unset = Namespace(**dict.fromkeys(names))
    assert read_flags(unset) == read_flags({})


def test_row_40_each_entry_plans_the_same_segments() -> None:
    """Row 40: recompute flags were dropped on one path; direct, mapping and command line must agree."""
    parser = ArgumentParser()
    parser.add_argument("--recompute-granularity")
    parser.add_argument("--recompute-method")
    parser.add_argument("--recompute-num-layers", type=int)
    words = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    entries = {
        "direct": RecomputeConfig.uniform(1),
        "dict": read_flags(UNIFORM_1).recompute,
        "mapping": read_flags(MappingProxyType(UNIFORM_1)).recompute,
        "command line": read_flags(parser.parse_args(words.split())).recompute,
    }
    segments = {name: len(plan_segments(4, 0, config)) for name, config in entries.items()}
    assert segments == dict.fromkeys(entries, 4)


@pytest.mark.parametrize("dropped", UNIFORM_1)
def test_row_40_dropped_field_is_refused(dropped: str) -> None:
    """Row 40: leaving out any one of the three recompute flags raises instead of turning recompute off."""
    flags = {name: value for name, value in UNIFORM_1.items() if name != dropped}
    message = refusal(flags)
    left_out = {
        "recompute_granularity": "recompute_method='uniform': has no effect unless granularity is 'full' or "
        "'selective'",
        "recompute_method": "recompute_method=None: must be 'uniform' or 'block'",
        "recompute_num_layers": "recompute_num_layers=None: must be an integer of at least 1",
    }
    assert message == left_out[dropped]


@pytest.mark.parametrize("name", ["recompute_layers", "recompute-method", "method", "Recompute_method", ""])
def test_row_40_unknown_name_is_refused(name: str) -> None:
    """Row 40: a flag that nobody reads raises."""
    assert refusal({**UNIFORM_1, name: 1}).startswith(f"{name}=1: is not a known flag; known are recompute_gran")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"recompute_num_layers": 0}, "recompute_num_layers=0: must be an integer of at least 1"),
        ({"recompute_num_layers": "1"}, "recompute_num_layers='1': must be an integer of at least 1"),
        ({"recompute_method": "blocks"}, "recompute_method='blocks': must be 'uniform' or 'block'"),
        ({"recompute_granularity": "half"}, "recompute_granularity='half': must be 'none', 'full' or 'selective'"),
        ({"recompute_mtp": 1}, "recompute_mtp=1: must be True or False"),
        (
            {
                "recompute_granularity": "selective",
                "recompute_method": None,
                "recompute_num_layers": None,
                "recompute_modules": ["core_att"],
            },
            "recompute_modules='core_att': is no module; known are attn, experts, shared_experts, core_attn, "
            "layernorm, mla_up_proj, moe_act",
        ),
        ({"recompute_keep": "hots"}, "recompute_keep='hots': must be 'device', 'host' or 'sharded'"),
        ({"recompute_replay": "early"}, "recompute_replay='early': must be 'just_in_time' or 'hidden'"),
        (
            {"recompute_replay": "hidden"},
            "recompute_replay='hidden': has no effect unless overlap_moe_expert_parallel_comm is set",
        ),
        (
            {"overlap_moe_expert_parallel_comm": "true"},
            "overlap_moe_expert_parallel_comm='true': must be True or False",
        ),
        ({"delay_wgrad_compute": None}, "delay_wgrad_compute=None: must be True or False"),
        (
            {"delay_wgrad_compute": True},
            "delay_wgrad_compute=True: has no effect unless overlap_moe_expert_parallel_comm is set",
        ),
        ({"mtp_num_layers": -1}, "mtp_num_layers=-1: must be an integer of at least 0"),
        ({"mtp_num_layers": True}, "mtp_num_layers=True: must be an integer of at least 0"),
        (
            {"recompute_method": "block", "recompute_mtp": True},
            "recompute_mtp=True: has no effect unless mtp_num_layers is set",
        ),
    ],
)
def test_refused(changed: dict, message: str) -> None:
    assert refusal({**UNIFORM_1, **changed}) == message


def test_reading_leaves_the_source_alone() -> None:
    flags = {**UNIFORM_1, "mtp_num_layers": None}
    before = dict(flags)
    read_flags(flags)
    assert flags == before


@pytest.mark.parametrize("flags", [None, [], "recompute_method"])
def test_flags_are_a_mapping(flags: Any) -> None:
    with pytest.raises(ConfigError, match=r"flags=.*must be a mapping from names to values"):
        read_flags(flags)
