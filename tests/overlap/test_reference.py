"""The reference step is plain autograd: compared here with a loop written out by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap import ModelChunk, PerToken, Program, ProgramBuilder, reference_step, train_step
from overlap.model import Decoder, ModelConfig
from recompute import ConfigError
from recompute.rng import default_generators, seeded, stage_seed
from tests.overlap.programs import Own, differences, result_of


def make(**changes: Any) -> ModelChunk:
    per_token = changes.get("per_token_loss", False)
    config = ModelConfig(**{"layers": 2, "hidden": 16, "vocab": 32, **changes})
    scale = {"loss_scale": PerToken()} if per_token else {}
    return ModelChunk(Decoder(config), seed=5, **scale)


def feeds(count: int) -> list[dict[str, Tensor]]:
    drawn = torch.randint(32, (count, 2, 2, 8), generator=torch.Generator().manual_seed(0))
    return [{"ids": ids, "labels": labels} for ids, labels in drawn]


def by_hand(chunk: ModelChunk, microbatches: list[dict[str, Tensor]], factor: float) -> list[dict[str, Tensor]]:
    """One graph per microbatch, gradients summed by autograd."""
    program, results = chunk.program, []
    for number, mb in enumerate(microbatches):
        values: dict[str, Any] = dict(mb)
        for stage in program.stages:
            seed = stage_seed(5, 0, number, stage.layer, stage.name)
            with seeded(seed, default_generators(torch.device("cpu"))):
                result = stage.forward(*(values[name] for name in stage.reads))
            values.update(zip(stage.writes, result if len(stage.writes) > 1 else (result,), strict=True))
        total = torch.stack([values[loss.value].double() for loss in program.losses]).sum() * factor
        total.backward()
        results.append({loss.value: values[loss.value].detach() for loss in program.losses})
    return results


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_against_a_loop_by_hand(accumulate: int, dropout: float) -> None:
    """Equal up to the rounding of another order of sums; losses, which have no such freedom, to the bit."""
    chunk, plain = make(dropout=dropout), make(dropout=dropout)
    losses = reference_step(chunk, feeds(3), accumulate)
    expected = by_hand(plain, feeds(3), 1 / (3 * accumulate))
    for mb, other in zip(losses, expected, strict=True):
        assert mb.keys() == other.keys()
        assert all(torch.equal(loss, other[name]) for name, loss in mb.items())
    for (name, p), q in zip(chunk.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    assert chunk.steps_done == 1


def test_losses_per_token_divide_by_all_tokens() -> None:
    microbatches = feeds(2)
    microbatches[0]["labels"][:, 2:] = -100
    chunk, plain = make(per_token_loss=True), make(per_token_loss=True)
    reference_step(chunk, microbatches)
    by_hand(plain, microbatches, 1 / (4 + 16))
    for p, q in zip(chunk.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_effects_are_applied_in_microbatch_order() -> None:
    chunk = make()
    (first, second) = reference_step(chunk, feeds(2))
    router = chunk.get_submodule("module.layers.0.router")
    assert torch.equal(torch.as_tensor(router.aux_loss_sum), first["0.aux"] + second["0.aux"])
    assert int(torch.as_tensor(router.tokens_per_expert).sum()) == 2 * 16 * 2


def test_refuses_what_train_step_refuses() -> None:
    with pytest.raises(ConfigError, match="microbatches="):
        reference_step(make(), [])
    with pytest.raises(ConfigError, match=r"microbatches\[0\]=\['ids'\]"):
        reference_step(make(), [{"ids": feeds(1)[0]["ids"]}])


class TwoReaders(nn.Module):
    """A value with three readers, one of which uses it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def program(self) -> Program:
        b = ProgramBuilder()
        x = b.input("x")
        with b.layer(0):
            (hidden,) = b.compute("attn", self.product, x, outputs=("hidden",), parameters=(self.weight,))
            (one,) = b.compute("experts", lambda h: h * torch.tanh(h), hidden, outputs=("one",))
            (two,) = b.compute("shared", torch.exp, hidden, outputs=("two",))
            (out,) = b.compute("post", lambda h, a, c: h + a + c, hidden, one, two, outputs=("out",))
        (loss,) = b.compute("head", lambda h: h.square().mean(), out, outputs=("loss",))
        b.loss(loss, 0.5)
        return b.build(outputs=(out,))

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def test_a_value_with_three_readers_and_a_weighted_loss() -> None:
    chunk = ModelChunk(TwoReaders())
    plain = copy.deepcopy(chunk.module)
    x = torch.randn(5, 4)
    (outputs,) = reference_step(chunk, [{"x": x}])
    hidden = plain.product(x)  # type: ignore[operator]
    out = hidden + hidden * torch.tanh(hidden) + torch.exp(hidden)
    (0.5 * out.square().mean()).backward()
    assert torch.equal(outputs["0.out"], out)
    assert outputs.keys() == {"loss", "0.out"}
    assert not outputs["0.out"].requires_grad
    torch.testing.assert_close(chunk.module.weight.grad, plain.weight.grad)


class _HalfGradient(torch.autograd.Function):
    """A sum whose backward knows the gradient of its second term only."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        return left + right

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]


def without_gradient(module: Any, b: ProgramBuilder) -> None:
    x = b.input("x")
    (h,) = b.compute("embed", lambda x: x @ module.w, x, outputs=("h",), parameters=(module.w,))
    (y,) = b.compute("mine", lambda h: h @ module.v, h, outputs=("y",), parameters=(module.v,))
    (z,) = b.compute("half", _HalfGradient.apply, y, h, outputs=("z",))
    b.loss(b.compute("head", lambda z: z.square().sum(), z, outputs=("loss",))[0])


def test_what_gets_no_gradient_gets_none() -> None:
    """None, not zeros: an optimizer decays a weight that has a gradient of zeros."""
    members = {name: nn.Parameter(torch.ones(2, 2)) for name in ("w", "v")}
    expected, found = (ModelChunk(Own(without_gradient, **copy.deepcopy(members))) for _ in range(2))
    reference_step(expected, [{"x": torch.ones(1, 2)}])
    train_step(found, [{"x": torch.ones(1, 2)}])
    assert found.module.v.grad is None
    assert differences(result_of(expected), result_of(found)) == []


def one_tensor_under_three_names(module: Any, b: ProgramBuilder) -> None:
    def same(x: Tensor) -> tuple[Tensor, ...]:
        y = x @ module.w
        return y, y, y

    values = b.compute("mine", same, b.input("x"), outputs=("a", "b", "c"), parameters=(module.w,))
    readers = [
        b.compute(f"reader{n}", lambda v, n=n: (v * (n + 0.3)).sin(), values[n % 3], outputs=(f"r{n}",))[0]
        for n in range(9)
    ]
    b.loss(b.compute("head", lambda *r: sum(r).mean(), *readers, outputs=("loss",))[0])


def test_values_that_are_one_tensor_are_summed_one_by_one() -> None:
    """R3: the gradient of each value is the sum of its own readers' shares."""
    w = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))
    expected, found = (ModelChunk(Own(one_tensor_under_three_names, w=copy.deepcopy(w))) for _ in range(2))
    feed = [{"x": torch.randn(16, 16, generator=torch.Generator().manual_seed(n))} for n in (1, 2)]
    reference_step(expected, feed)
    train_step(found, feed)
    assert differences(result_of(expected), result_of(found)) == []
