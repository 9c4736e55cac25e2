"""Whose memory a value is: what plans say of it must be true of its storage, whatever the transport (R14)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap import ModelChunk, train_step
from overlap.dispatch import LocalTransport, Transport
from overlap.dispatch.host_loopback import HostLoopback
from overlap.dispatch.round_trip import RoundTrip
from overlap.engine import MicrobatchState
from overlap.ir import Lane, Op
from overlap.keeping import LOADED
from overlap.lower import Issue
from overlap.model import Decoder, ModelConfig
from recompute import Keep, RecomputeConfig, Replay

RULES = {
    "none": RecomputeConfig.none(),
    "uniform1-hidden": RecomputeConfig.uniform(1, replay=Replay.HIDDEN),
    "uniform2-host": RecomputeConfig.uniform(2, keep=Keep.HOST),
    "stages-host": RecomputeConfig.selective("attn", "experts", keep=Keep.HOST),
}


class Wire(RoundTrip):
    """As a copy kernel has it."""

    def round_trip(self, rows: Tensor) -> Tensor:
        return rows.clone()


class Careless(Wire):
    """Control: hands the weights on."""

    def dispatch(self, tokens: Tensor, probs: Tensor, *args: Any, **keywords: Any) -> Any:
        rows, _, arrival = super().dispatch(tokens, probs, *args, **keywords)
        return rows, probs, arrival


class Owners:
    """Notes the lane of every storage when it is first written, and what is later said to be another's."""

    def __init__(self) -> None:
        self.homes: dict[int, Lane] = {}
        self.wrong: list[str] = []
        self._kept: list[Tensor] = []
        """Addresses of what is gone would be given out again."""

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        pass

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        for name, value, home in self._written(issue, owner):
            self._kept.append(value)
            if self.homes.setdefault(value.untyped_storage()._cdata, home) is not home:
                self.wrong.append(f"{issue.slot} {name}")

    def _written(self, issue: Issue, owner: MicrobatchState) -> Iterator[tuple[str, Tensor, Lane]]:
        for key in issue.writes:
            value = None if key is None else owner.values[key]
            if key is not None and torch.is_tensor(value) and key[0] not in issue.stage.nondiff:
                yield key[0], value, Lane.COPY if key[1] == LOADED else issue.stage.allocates


def owners(transport: Transport, rule: RecomputeConfig) -> Owners:
    config = ModelConfig(layers=3, hidden=16, vocab=32, mtp=1, mhc=2, shared_width=8)
    tokens = torch.randint(32, (2, 2, 2, 9), generator=torch.Generator().manual_seed(0))
    feeds = [{"ids": ids[..., :-1].contiguous(), "labels": ids[..., 1:].contiguous()} for ids in tokens[:, 0]]
    found = Owners()
    chunk = ModelChunk(Decoder(config, transport=transport), recompute=rule)
    chunk.checked = True  # a step's own check would refuse the control
    train_step(chunk, feeds, observers=(found,))
    return found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("transport", [LocalTransport(), HostLoopback(), HostLoopback(0.3), Wire()])
def test_memory_is_the_lanes_that_the_plan_says(transport: Transport, rule: str) -> None:
    found = owners(transport, RULES[rule])
    assert found.wrong == []
    moves = type(transport) is not LocalTransport
    assert (Lane.COMM in found.homes.values()) is moves
    assert (Lane.COPY in found.homes.values()) is ("host" in rule)


def test_control_weights_handed_on_are_found() -> None:
    """With keep="host" they are copied out on a third lane, and would be given out again while that still reads."""
    found = owners(Careless(), RULES["stages-host"])
    assert {slot.partition(" ")[2].partition(".")[2] for slot in found.wrong} == {"dispatched_probs"}
    assert any(slot.startswith(Op.FORWARD.value) for slot in found.wrong)
