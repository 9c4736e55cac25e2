"""Rules of Fp8Config."""

from __future__ import annotations

import pytest

from overlap.model.fp8 import ROW_MULTIPLE, Fp8Config, Recipe
from recompute import ConfigError


def test_text_will_do():
    assert Fp8Config(recipe="block").recipe is Recipe.BLOCK
    assert set(ROW_MULTIPLE) == set(Recipe)


@pytest.mark.parametrize(
    ("first", "last", "covered"),
    [(0, 0, [0, 1, 2, 3, 4, 5]), (1, 1, [1, 2, 4, 5]), (4, 0, [4, 5]), (2, 2, [4, 5])],
)
def test_layers_that_stay_wide(first, last, covered):
    config = Fp8Config(recipe="current", first_bf16=first, last_bf16=last)
    assert [layer for layer in range(6) if config.covers(layer, 4)] == covered, "4 decoder layers, 2 MTP depths"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "fp8"}, "fp8='fp8': must be one of block, current, delayed, mxfp8"),
        ({"recipe": "block", "first_bf16": -1}, "fp8_first_bf16=-1"),
        ({"recipe": "block", "last_bf16": True}, "fp8_last_bf16=True"),
        ({"recipe": "delayed", "amax_history": 0}, "fp8_amax_history=0"),
        ({"recipe": "block", "amax_history": 16}, "fp8_amax_history=16: has no effect with recipe block"),
    ],
)
def test_bad_values(changes, message):
    with pytest.raises(ConfigError) as caught:
        Fp8Config(**changes)
    assert message in str(caught.value)
