"""Messages of the errors, and that they travel between processes."""

from __future__ import annotations

import copy
import pickle

import pytest

from recompute import ConfigError, RecomputeError


def test_message_names_field_value_and_rule() -> None:
    error = ConfigError(field="recompute_num_layers", value=0, rule="must be an integer of at least 1")
    assert str(error) == "recompute_num_layers=0: must be an integer of at least 1"
    assert (error.field, error.value, error.rule) == (
        "recompute_num_layers",
        0,
        "must be an integer of at least 1",
    )


def test_message_tells_text_from_number() -> None:
    assert str(ConfigError(field="num_layers", value="2", rule="r")) == "num_layers='2': r"


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_config_error_survives_pickling(travel) -> None:
    again = travel(ConfigError(field="f", value=(1, "x"), rule="r"))
    assert type(again) is ConfigError
    assert (again.field, again.value, again.rule, str(again)) == ("f", (1, "x"), "r", "f=(1, 'x'): r")


def test_hierarchy() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(RecomputeError, RuntimeError)
