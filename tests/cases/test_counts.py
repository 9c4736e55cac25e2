"""Effects and in-place state: counted once per microbatch, whatever is replayed. Row 16: tests/model/test_router.py."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from overlap import ModelChunk, Program, ProgramError, reference_step, train_step
from overlap.controls import DoubleEffects
from overlap.model import Decoder, ModelConfig, update_expert_bias
from tests.cases.model import COPIES, Outcome, U, assert_equals_reference, different, m0, make_chunk, make_feeds, run


@pytest.mark.parametrize("per_token", [False, True])
def test_logged_router_losses(per_token: bool) -> None:
    """Row 11: the logged balancing and z losses are the reference's, once per microbatch."""
    chunk, feeds = make_chunk(U(1), z_coefficient=0.01, per_token_loss=per_token), make_feeds(2)
    expected = assert_equals_reference(chunk, feeds)
    names = [name for name in expected.buffers if name.endswith(("aux_loss_sum", "z_loss_sum"))]
    assert len(names) == 8
    for name in names:
        logged = expected.buffers[name]
        layer, kind = name.split(".")[1], name.split(".")[-1].removesuffix("_loss_sum")
        losses = [expected.losses[f"{mb}.{layer}.{kind}"] for mb in range(2)]
        assert losses[0] is not None
        assert losses[1] is not None
        assert logged is not None
        assert torch.equal(logged, losses[0] + losses[1])
        assert logged > 0


def test_logged_router_losses_that_count_the_replay() -> None:
    """Row 11: negative control: effects in the replay double what is logged and change no gradient."""
    chunk, feeds = make_chunk(U(1), z_coefficient=0.01), make_feeds(1)
    expected, found = run(chunk, feeds, reference_step), run(chunk, feeds, engine_type=DoubleEffects)
    assert {name.partition(":")[0] for name in different(expected, found)} == {"buffers"}
    logs = {name: b for name, b in expected.buffers.items() if name.endswith(("loss_sum", "tokens_per_expert"))}
    assert different_buffers(expected, found) == set(logs)
    for name, logged in logs.items():
        doubled = found.buffers[name]
        assert logged is not None
        assert doubled is not None
        assert torch.equal(doubled, 2 * logged), name


def different_buffers(expected: Outcome, found: Outcome) -> set[str]:
    return {name.partition(":")[2] for name in different(expected, found)}


def test_tokens_per_expert() -> None:
    """Row 12: every MoE layer counts microbatches * copies = 64, and the bias moves as the reference's."""
    chunk, feeds = make_chunk(U(1)), make_feeds(2)
    expected = assert_equals_reference(chunk, feeds)
    counts = [buffer for name, buffer in expected.buffers.items() if name.endswith("tokens_per_expert")]
    assert [int(count.sum()) for count in counts if count is not None] == [2 * COPIES] * 4 == [64] * 4
    doubled = run(chunk, feeds, engine_type=DoubleEffects).buffers
    assert [int(b.sum()) for n, b in doubled.items() if n.endswith("tokens_per_expert") and b is not None] == [128] * 4
    sides = copy.deepcopy(chunk), copy.deepcopy(chunk)
    reference_step(sides[0], feeds)
    train_step(sides[1], feeds)
    for side in sides:
        update_expert_bias(side)
    buffers = [dict(side.module.named_buffers()) for side in sides]
    for name, buffer in buffers[0].items():
        assert torch.equal(buffer, buffers[1][name])
        if name.endswith("expert_bias"):
            assert buffer.ne(0).any(), "equal loads move no bias"
        if name.endswith("tokens_per_expert"):
            assert buffer.eq(0).all()


class NormedDecoder(Decoder):
    """M0 with a BatchNorm1d in front of every layer's experts."""

    def __init__(self, config: ModelConfig, *, declared: bool = True) -> None:
        super().__init__(config)
        self.declared = declared
        self.norms = nn.ModuleList(nn.BatchNorm1d(config.hidden) for _ in range(config.layers))

    def program(self) -> Program:
        program = super().program()
        stages = []
        for stage in program.stages:
            if stage.name == "experts" and stage.layer is not None:
                norm, experts = self.norms[stage.layer], stage.forward

                def forward(rows: Tensor, *rest: object, norm: nn.Module = norm, experts: object = experts) -> object:
                    return experts(norm(rows), *rest)  # type: ignore[operator]

                stage = replace(
                    stage,
                    forward=forward,
                    parameters=(*stage.parameters, *norm.parameters()),
                    state=tuple(norm.buffers()) if self.declared else (),
                )
            stages.append(stage)
        return replace(program, stages=tuple(stages))


def test_batch_norm_statistics() -> None:
    """Row 14: running statistics advance once per microbatch; comparing gradients alone would not see it."""
    chunk, feeds = ModelChunk(NormedDecoder(m0()), recompute=U(2)), make_feeds(3)
    expected = assert_equals_reference(chunk, feeds)
    tracked = {name: b for name, b in expected.buffers.items() if name.startswith("norms.")}
    assert len(tracked) == 3 * 4
    assert {int(b) for name, b in tracked.items() if name.endswith("num_batches_tracked") and b is not None} == {3}
    assert all(b.ne(0).all() for name, b in tracked.items() if name.endswith("running_mean") and b is not None)


def test_batch_norm_statistics_not_declared() -> None:
    """Row 14: negative control: without `state=` the statistics would advance twice, so the program is refused."""
    chunk, feeds = ModelChunk(NormedDecoder(m0(), declared=False), recompute=U(2)), make_feeds(3)
    with pytest.raises(ProgramError, match=r"stage 0\.experts changes buffer 'norms\.0\.running_mean'"):
        train_step(chunk, feeds)
    chunk.checked = True  # let it run all the same
    expected, found = run_unchecked(chunk, feeds)
    assert {name.partition(":")[0] for name in different(expected, found)} == {"buffers"}
    assert found.buffers["norms.0.num_batches_tracked"] == 6


def run_unchecked(chunk: ModelChunk, feeds: list) -> tuple:
    """Reference and overlapped outcome; `checked` does not survive a copy, so it is set again."""

    def step(side: ModelChunk, microbatches: list) -> list:
        side.checked = True
        return train_step(side, microbatches)

    return run(chunk, feeds, reference_step), run(chunk, feeds, step)
