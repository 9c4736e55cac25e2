"""Initial weights of a slice are those of the same places in one process."""

from __future__ import annotations

import torch
from torch import nn

from overlap.model import GroupedExperts, init_weights


def model_with(held: range) -> nn.ModuleList:
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), GroupedExperts(4, 6, 5, held), nn.Linear(4, 4, bias=False)])
    init_weights(model, 3)
    return model


def test_a_slice_is_initialised_as_the_whole() -> None:
    whole = dict(model_with(range(4)).named_parameters())
    for held in (range(0, 2), range(2, 4), range(3, 4)):
        for name, parameter in model_with(held).named_parameters():
            expected = whole[name][held.start : held.stop] if name.startswith("1.") else whole[name]
            assert torch.equal(parameter, expected)
