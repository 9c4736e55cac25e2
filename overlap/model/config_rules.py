"""The rules of ModelConfig: types, ranges, fields without effect, fields that fit together. Never imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import TYPE_CHECKING

from recompute.errors import ConfigError

if TYPE_CHECKING:
    from overlap.model.config import ModelConfig

_COUNTS = {"layers": 0, "dense_layers": 0, "q_rank": 0, "shared_width": 0, "mtp": 0}
"""Smallest allowed value of the integer fields where it is not 1."""
_BELOW_ONE = ("jitter", "dropout", "attention_dropout")
_POSITIVE = ("route_scale", "norm_eps", "rope_base", "mhc_epsilon", "mtp_scale")
_NOT_NEGATIVE = ("aux_coefficient", "z_coefficient", "bias_rate")


def check_config(config: ModelConfig, enums: Mapping[str, type[StrEnum]]) -> None:
    """Check a config in full; text in an enum field becomes the member.

    Raises:
        ConfigError: Names field, value and rule.
    """
    _check_types(config)
    for name, kind in enums.items():
        object.__setattr__(config, name, _member(name, getattr(config, name), kind))
    _check_unused(config)
    for name, holds, rule in (*_shape_rules(config), *_token_rules(config)):
        if not holds:
            raise ConfigError(field=name, value=getattr(config, name), rule=rule)


def _check_types(config: ModelConfig) -> None:
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        if field.type == "int" or (field.type == "int | None" and value is not None):
            _check_count(name, value, _COUNTS.get(name, 1))
        elif field.type == "float":
            _check_number(name, value)
        elif field.type == "bool" and type(value) is not bool:
            raise ConfigError(field=name, value=value, rule="must be True or False")
        elif field.type == "tuple[int, ...]":
            if type(value) is not tuple:
                raise ConfigError(field=name, value=value, rule="must be a tuple of integers")
            for entry in value:
                _check_count(name, entry, 1)


def _check_count(name: str, value: object, minimum: int) -> None:
    # bool is an int to Python; True layers is a mistake
    if type(value) is not int or value < minimum:
        raise ConfigError(field=name, value=value, rule=f"must be an integer, {minimum} or more")


def _check_number(name: str, value: object) -> None:
    if (type(value) is not float and type(value) is not int) or not math.isfinite(value):
        raise ConfigError(field=name, value=value, rule="must be a finite number")
    if name in _BELOW_ONE and not 0 <= value < 1:
        raise ConfigError(field=name, value=value, rule="must be at least 0 and below 1")
    if name in _POSITIVE and value <= 0:
        raise ConfigError(field=name, value=value, rule="must be above 0")
    if name in _NOT_NEGATIVE and value < 0:
        raise ConfigError(field=name, value=value, rule="must be 0 or more")


def _member(name: str, value: object, kind: type[StrEnum]) -> StrEnum:
    if name == "dtype" and value == "float16":
        rule = "float16 is refused: its gradients need a loss scaler, which the step does not have; use bfloat16"
        raise ConfigError(field=name, value=value, rule=rule)
    if value not in [str(member) for member in kind]:
        raise ConfigError(field=name, value=value, rule="must be one of " + ", ".join(kind))
    return kind(value)


def _check_unused(config: ModelConfig) -> None:
    """Refuse settings that nothing reads."""
    conditions = (
        (config.attention != "mla", f"attention {config.attention}",
         ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")),
        (config.attention != "gqa", f"attention {config.attention}", ("kv_heads", "head_dim")),
        (config.mhc is None, "mhc None", ("mhc_iterations", "mhc_epsilon")),
        (config.mtp == 0, "mtp 0", ("mtp_repeat", "mtp_dense", "mtp_widths", "mtp_scale", "mtp_detach")),
        (config.dense_layers == config.layers and (config.mtp == 0 or config.mtp_dense), "no layer with experts",
         ("capacity",)),
        (config.layers + config.mtp == 0, "no layer at all", ("mhc", "padding", "packed", "cut_attention")),
    )  # fmt: skip
    defaults = {field.name: field.default for field in fields(config)}
    for unread, condition, names in conditions:
        for name in names:
            if unread and getattr(config, name) != defaults[name]:
                rule = f"has no effect with {condition}: leave it at its default"
                raise ConfigError(field=name, value=getattr(config, name), rule=rule)


def _shape_rules(config: ModelConfig) -> Iterator[tuple[str, bool, str]]:
    group = config.experts // config.expert_groups
    yield "dense_layers", config.dense_layers <= config.layers, f"must not exceed layers ({config.layers})"
    yield "kv_heads", config.heads % config.kv_heads == 0, f"must divide heads ({config.heads})"
    yield "rope_dim", config.rope_dim % 2 == 0, "must be even"
    yield "head_dim", config.head_dim % 2 == 0, "must be even"
    yield "topk", config.topk <= config.experts, f"must not exceed experts ({config.experts})"
    yield "expert_groups", config.experts % config.expert_groups == 0, f"must divide experts ({config.experts})"
    rule = f"must not exceed expert_groups ({config.expert_groups})"
    yield "topk_groups", config.topk_groups <= config.expert_groups, rule
    reach = config.topk_groups * group
    yield "topk", config.topk <= reach, f"must not exceed the experts of topk_groups groups ({reach})"


def _token_rules(config: ModelConfig) -> Iterator[tuple[str, bool, str]]:
    widths = config.mtp_widths
    rule = f"must be below max_seq ({config.max_seq}): a deeper one looks past the end of every sequence"
    yield "mtp", config.mtp < config.max_seq, rule
    yield "mtp_widths", len(widths) in (0, config.mtp), f"must hold one width for each of the mtp ({config.mtp}) depths"
    same = len(set(widths)) <= 1 or not config.mtp_repeat
    yield "mtp_widths", same, "must all be equal with mtp_repeat: all depths use one layer"
