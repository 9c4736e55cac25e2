"""verify: equal for every combination of settings, and it names whatever differs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from overlap import ModelChunk, PerMicrobatch, PerToken, Program, ProgramBuilder, ProgramError, reference_step
from overlap.model import Decoder, ModelConfig
from overlap.orders import ORDER_NAMES
from overlap.verify import StepFacts, compare, step_facts, verify
from recompute import ConfigError, RecomputeConfig

NONE = RecomputeConfig.none()
Batches = list[list[dict[str, Tensor]]]


def batches(steps: int, microbatches: int, batch: int = 1, seq: int = 6, vocab: int = 16) -> Batches:
    generator = torch.Generator().manual_seed(steps * 100 + microbatches)
    drawn = torch.randint(vocab, (steps, microbatches, 2, batch, seq), generator=generator)
    return [[{"ids": ids, "labels": labels} for ids, labels in step] for step in drawn]


def tiny(**changes: Any) -> ModelConfig:
    shape: dict[str, Any] = {"layers": 2, "hidden": 8, "vocab": 16, "ffn_width": 8, "expert_width": 4}
    return ModelConfig(**{**shape, "shared_width": 4, **changes})


def make(recompute: RecomputeConfig = NONE, *, order: str = "multi_queue", **changes: Any) -> ModelChunk:
    return ModelChunk(Decoder(tiny(**changes)), recompute=recompute, order=order)


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """Shapes of a decoder."""
    layers = draw(st.integers(0, 5), label="layers")
    groups = draw(st.sampled_from([1, 2]), label="expert_groups")
    experts = draw(st.sampled_from([2, 4]), label="experts")
    topk_groups = draw(st.integers(1, groups), label="topk_groups")
    return {
        "layers": layers,
        "dense_layers": draw(st.integers(0, layers), label="dense_layers"),
        "experts": experts,
        "expert_groups": groups,
        "topk_groups": topk_groups,
        "topk": draw(st.integers(1, topk_groups * experts // groups), label="topk"),
        "shared_width": draw(st.sampled_from([0, 4]), label="shared_width"),
        "dropout": draw(st.sampled_from([0.0, 0.1]), label="dropout"),
        "attention_dropout": draw(st.sampled_from([0.0, 0.1]), label="attention_dropout"),
        "jitter": draw(st.sampled_from([0.0, 0.1]), label="jitter"),
        "cut_attention": layers > 0 and draw(st.booleans(), label="cut_attention"),
        "attention": draw(st.sampled_from(["mla", "gqa"]), label="attention"),
        "score": draw(st.sampled_from(["sigmoid", "softmax"]), label="score"),
        "tied": draw(st.booleans(), label="tied"),
        "per_token_loss": draw(st.booleans(), label="per_token_loss"),
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "float64"]), label="dtype"),
    }


rules = st.one_of(
    st.just(NONE), st.integers(1, 6).map(RecomputeConfig.uniform), st.integers(1, 6).map(RecomputeConfig.block)
)


@settings(max_examples=25)
@given(
    model=models(),
    rule=rules,
    microbatches=st.integers(1, 4),
    order=st.sampled_from(ORDER_NAMES),
    delay_wgrad=st.booleans(),
    batch=st.sampled_from([1, 3]),
)
@example(
    model={"layers": 5, "dropout": 0.1, "jitter": 0.1, "dense_layers": 1, "tied": True},
    rule=RecomputeConfig.uniform(2),
    microbatches=4,
    order="multi_queue",
    delay_wgrad=True,
    batch=3,
)
def test_every_combination_is_equal(
    model: dict[str, Any], rule: RecomputeConfig, microbatches: int, order: str, delay_wgrad: bool, batch: int
) -> None:
    config = tiny(**model)
    chunk = ModelChunk(
        Decoder(config),
        recompute=rule,
        order=order,
        delay_wgrad=delay_wgrad,
        loss_scale=PerToken() if config.per_token_loss else PerMicrobatch(),
    )
    verdict = verify(chunk, batches(1, microbatches, batch))
    assert verdict.gradients.different == ()
    assert verdict.buffers.different == ()
    assert verdict.equal
    assert verdict.gradients.compared == len(list(chunk.parameters()))
    facts = step_facts(chunk, microbatches)
    assert verdict.max_live_segments == min(1, len(facts.segments))
    moe = sum(layer >= config.dense_layers for segment in facts.segments for layer in segment)
    assert facts.replayed_a2a == microbatches * expected_a2a(facts, config.dense_layers)
    assert facts.replayed_a2a_per_layer == (facts.replayed_a2a / (moe * microbatches) if moe else 0.0)


def expected_a2a(facts: StepFacts, dense_layers: int) -> int:
    """Dispatch of every MoE layer in a segment, and combine of those with a layer behind them in it (R8)."""
    return sum(1 + (layer != segment[-1]) for segment in facts.segments for layer in segment if layer >= dense_layers)


@pytest.mark.parametrize(
    ("rule", "per_layer"),
    [(RecomputeConfig.uniform(1), 1.0), (RecomputeConfig.block(4), 1.0), (RecomputeConfig.uniform(4), 1.75)],
    ids=str,
)
def test_replayed_all_to_alls(rule: RecomputeConfig, per_layer: float) -> None:
    """One of two is replayed per layer with one layer per segment; k layers replay k dispatches and k-1 combines."""
    assert step_facts(make(rule, layers=4), 3).replayed_a2a_per_layer == per_layer


def test_facts() -> None:
    facts = step_facts(make(RecomputeConfig.uniform(1), layers=2), 3)
    stages = 6  # attn, shared, dispatch, experts, combine, post
    assert facts.segments == ((0,), (1,))
    assert facts.slots == {"F": 3 * 2, "N": 3 * 2 * stages, "R": 3 * 2 * 4, "B": 3 * (2 * stages + 2), "W": 0}
    assert facts.replayed_a2a == 6


def test_two_steps_and_what_is_compared() -> None:
    chunk = make(RecomputeConfig.uniform(1), dropout=0.1)
    before = copy.deepcopy(chunk.state_dict())
    state = torch.get_rng_state()
    verdict = verify(chunk, batches(2, 2))
    assert verdict.equal
    assert verdict.gradients.compared == len(list(chunk.parameters()))
    assert verdict.buffers.compared == len(list(chunk.buffers()))
    assert torch.equal(torch.get_rng_state(), state)
    after = chunk.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items() if torch.is_tensor(value))


def gradient_of(chunk: ModelChunk, name: str) -> Tensor:
    gradient = chunk.module.get_parameter(name).grad
    assert gradient is not None
    return gradient


def test_a_reference_that_differs_is_named() -> None:
    """Negative control: a reference that adds to one gradient, one buffer and draws once more."""

    def other(chunk: ModelChunk, microbatches: Any) -> Any:
        losses = reference_step(chunk, microbatches)
        gradient_of(chunk, "embedding")[0, 0] += 1
        chunk.module.get_buffer("layers.1.router.tokens_per_expert")[0] += 1
        torch.rand(1)
        losses[0]["loss"] += 1
        return losses

    verdict = verify(make(RecomputeConfig.uniform(1)), batches(1, 2), reference=other)
    assert verdict.gradients.different == ("embedding",)
    assert verdict.buffers.different == ("layers.1.router.tokens_per_expert",)
    assert (verdict.loss_equal, verdict.rng_equal, verdict.equal) == (False, False, False)


@pytest.mark.parametrize("part", ["loss", "rng"])
def test_each_part_alone_makes_it_different(part: str) -> None:
    def other(chunk: ModelChunk, microbatches: Any) -> Any:
        losses = reference_step(chunk, microbatches)
        if part == "rng":
            torch.rand(1)
        else:
            losses[1]["0.aux"] += 1
        return losses

    verdict = verify(make(), batches(1, 2), reference=other)
    assert (verdict.loss_equal, verdict.rng_equal) == (part != "loss", part != "rng")
    assert not verdict.equal


def test_a_difference_in_the_first_step_is_remembered() -> None:
    def other(chunk: ModelChunk, microbatches: Any) -> Any:
        losses = reference_step(chunk, microbatches)
        if chunk.steps_done == 1:
            gradient_of(chunk, "head.norm.weight").mul_(0)
        return losses

    assert "head.norm.weight" in verify(make(), batches(2, 1), reference=other).gradients.different


def test_a_gradient_that_is_not_finite_is_named() -> None:
    chunk = make()
    with torch.no_grad():
        chunk.module.get_parameter("head.norm.weight")[0] = float("inf")
    verdict = verify(chunk, batches(1, 1))
    assert not verdict.equal
    assert "head.projection.weight" in verdict.gradients.different


@pytest.mark.parametrize(
    ("expected", "found", "equal"),
    [
        (torch.zeros(2), torch.zeros(2), True),
        (torch.zeros(2), -torch.zeros(2), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), False),
        (torch.zeros(2), torch.zeros(1, 2), False),
        (torch.zeros(2), None, False),
        (None, torch.zeros(2), False),
        (None, None, True),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), False),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), True),
        (torch.tensor([True]), torch.tensor([False]), False),
    ],
)
def test_compare(expected: Tensor | None, found: Tensor | None, equal: bool) -> None:
    result = compare({"w": expected}, {"w": found})
    assert result.compared == 1
    assert result.different == (() if equal else ("w",))


def test_compare_key_sets() -> None:
    one = torch.zeros(1)
    result = compare({"b": one, "a": one, "c": one}, {"c": one, "d": one})
    assert result.compared == 4
    assert result.different == ("a", "b", "d")


class Hidden(nn.Module):
    """A model whose layer 1 counts its calls in a buffer, with or without saying so."""

    calls: Tensor

    def __init__(self, *, declared: bool, quietly: bool = False) -> None:
        super().__init__()
        self.declared, self.quietly = declared, quietly
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("calls", torch.zeros(()))

    def program(self) -> Program:
        b = ProgramBuilder()
        hidden = b.input("hidden")
        for index, layer in enumerate(self.layers):
            with b.layer(index):
                (hidden,) = b.compute(
                    "mix", self.counted if index else layer, hidden, outputs=("hidden",),
                    parameters=layer.parameters(), state=(self.calls,) if index and self.declared else (),
                )  # fmt: skip
        (loss,) = b.compute("loss", torch.sum, hidden, outputs=("loss",))
        b.loss(loss)
        return b.build()

    def counted(self, hidden: Tensor) -> Tensor:
        (self.calls.data if self.quietly else self.calls).add_(1)
        return F.relu(self.layers[1](hidden))


@pytest.mark.parametrize("quietly", [False, True])
def test_an_undeclared_buffer_is_named(quietly: bool) -> None:
    """Also one that is changed past autograd's version counter."""
    feeds = [[{"hidden": torch.randn(3, 4)} for _ in range(2)]]
    chunk = ModelChunk(Hidden(declared=False, quietly=quietly), recompute=RecomputeConfig.uniform(1), order="plain")
    with pytest.raises(ProgramError, match=r"stage 1\.mix changes buffer 'calls' in place: declare it in state="):
        verify(chunk, feeds)
    chunk = ModelChunk(Hidden(declared=True, quietly=quietly), recompute=RecomputeConfig.uniform(1), order="plain")
    assert verify(chunk, feeds).equal


def test_a_graph_that_cannot_be_recorded_is_refused_before_the_other_side_runs() -> None:
    chunk = ModelChunk(Decoder(ModelConfig(layers=1)))
    with pytest.raises(ConfigError, match="a CUDA graph needs a CUDA device"):
        verify(chunk, batches(1, 1), reference=lambda chunk, microbatches: pytest.fail("ran"), graph=True)
