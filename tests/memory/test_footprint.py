"""Single slots: what they allocate, alias and hold, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap import Program, ProgramBuilder, ProgramError
from overlap.chunk import ModelChunk
from overlap.ir import Op, StageKey
from overlap.memory import fake_chunk, predict, take_footprint
from overlap.memory.device_model import DEVICES
from overlap.memory.facts import Facts, Footprint, Kind, forward_kind
from overlap.memory.refs import OUTSIDE_REF, Ref, Source
from overlap.model import Decoder, ModelConfig
from overlap.model.linear import linear
from overlap.planning.device_kernels import register_flops
from overlap.step import step_plans
from recompute.wgrad import weight_gradient
from tests.memory.compare import assert_exact, decoder, none, tokens, uniform

ROWS, WIDTH = 4, 8
FULL = ROWS * WIDTH * 4

Forward = Callable[..., Any]


class Single(nn.Module):
    """Two layers of one stage `mix`, then the loss `square`."""

    def __init__(self, forward: Forward, **declarations: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.function = forward
        self.declarations = declarations

    def program(self) -> Program:
        b = ProgramBuilder()
        hidden = b.input("hidden")
        weight = b.parameter("w", self.weight)
        for index in range(2):
            with b.layer(index):
                (hidden,) = b.compute("mix", self.function, hidden, weight, outputs=("out",), **self.declarations)
        (loss,) = b.compute("loss", square, hidden, outputs=("loss",))
        b.loss(loss)
        return b.build()


def square(x: Tensor) -> Tensor:
    return x.square().sum()


def data(microbatches: int = 1) -> list[dict[str, Tensor]]:
    return [{"hidden": torch.randn(ROWS, WIDTH)} for _ in range(microbatches)]


@contextmanager
def footprint(forward: Forward, **declarations: Any) -> Iterator[Footprint]:
    with fake_chunk(lambda: ModelChunk(Single(forward, **declarations), order="plain")) as chunk:
        yield take_footprint(chunk, data()[0])


def facts_of(found: Footprint, key: StageKey, source: Source, *, graph: bool = True, delayed: bool = False) -> Facts:
    return found.facts[delayed][Kind(key, source, graph, False)]


READS = {Ref(Source.READ, 0), Ref(Source.READ, 1)}


def test_an_alias_is_not_born() -> None:
    with footprint(lambda x, w: x + 1) as found:
        assert facts_of(found, (0, "mix"), Source.FORWARD, graph=False).born == (FULL,)
    with footprint(lambda x, w: x.t().t()) as found:
        facts = facts_of(found, (0, "mix"), Source.FORWARD, graph=False)
        assert (facts.born, facts.writes) == ((), ((Ref(Source.READ, 0),),))


def test_a_view_keeps_its_whole_base() -> None:
    with footprint(lambda x, w: torch.cat((x @ w, x))[:ROWS]) as found:
        assert facts_of(found, (0, "mix"), Source.FORWARD, graph=False).born == (2 * FULL,)


def test_a_tape_holds_its_reads_and_what_the_graph_saved() -> None:
    with footprint(lambda x, w: (x @ w).exp().sin()) as found:
        facts = facts_of(found, (1, "mix"), Source.FORWARD)
        written, exp = Ref(Source.FORWARD, 0), Ref(Source.FORWARD, 1)
        assert facts.writes == ((written,),)
        assert facts.tape == READS | {exp}, "sin's result is saved by nobody"
        assert facts.born == (FULL, FULL)
        assert facts_of(found, (1, "mix"), Source.FORWARD, graph=False).tape == frozenset()


def test_gradients_are_new_aliases_or_nothing() -> None:
    with footprint(lambda x, w: x @ w) as found:
        facts = facts_of(found, (1, "mix"), Source.BACKWARD)
        assert facts.gives == ((Ref(Source.BACKWARD, 0),), (Ref(Source.BACKWARD, 1),))
        assert facts.born == (FULL, WIDTH * WIDTH * 4)
        first = facts_of(found, (0, "mix"), Source.BACKWARD)
        assert first.gives == (None, (Ref(Source.BACKWARD, 0),)), "nobody wants a gradient of the feed"
    with footprint(lambda x, w: x @ w, adjoint=lambda grads, pinned: (grads[0], None)) as found:
        facts = facts_of(found, (1, "mix"), Source.BACKWARD, graph=False)
        assert facts.gives == ((Ref(Source.PIECE, 0),), None)


def test_a_delayed_weight_gradient_holds_its_tensors_and_gives_at_w() -> None:
    with footprint(linear, wgrad=True) as found:
        facts = facts_of(found, (1, "mix"), Source.BACKWARD, delayed=True)
        assert facts.pending == READS | {Ref(Source.PIECE, 0)}
        assert facts.hidden == frozenset()
        assert facts.gives[1] is None
        late = facts_of(found, (1, "mix"), Source.WGRAD, delayed=True)
        assert (late.born, late.gives) == ((WIDTH * WIDTH * 4,), (None, (Ref(Source.WGRAD, 0),)))
        assert facts_of(found, (1, "mix"), Source.BACKWARD).pending == frozenset()


def test_parameters_are_outside() -> None:
    with footprint(lambda x, w: x @ w) as found:
        facts = facts_of(found, (None, "weights"), Source.FORWARD)
        assert (facts.born, facts.writes) == ((), ((OUTSIDE_REF,),))


def test_routing_is_a_value_of_several_tensors() -> None:
    with fake_chunk(lambda: decoder(layers=1)) as chunk:
        found = take_footprint(chunk, tokens(1)[0])
    first = found.facts[False][Kind((0, "attn"), Source.FORWARD, True, False)]
    replay = found.facts[False][Kind((0, "attn"), Source.FORWARD, True, True)]
    routing, counts = first.writes[-2:]
    assert len(set(routing)) == 6
    assert counts == routing[4:5]
    assert replay.writes[-2] == ()
    assert replay.writes[-1] == (Ref(Source.PINNED, 0, 4),)
    assert {ref for ref in replay.tape if ref.source is Source.PINNED}, "the permutation is needed backward"


class Closure(torch.autograd.Function):
    """Puts off a weight gradient whose code holds a tensor that it does not name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        doubled = x * 2
        return grads[0] @ w.t(), weight_gradient(w, lambda g: (doubled / 2).t() @ g, grads[0])


def closure(x: Tensor, w: Tensor) -> Tensor:
    result: Tensor = Closure.apply(x, w)
    return result


def test_a_tensor_in_a_closure_is_found() -> None:
    with footprint(closure, wgrad=True) as found:
        facts = facts_of(found, (1, "mix"), Source.BACKWARD, delayed=True)
        assert [facts.born[ref.place] for ref in facts.hidden if ref.source is Source.BACKWARD] == [FULL]
    settings = {"order": "plain", "delay_wgrad": True}
    for recompute in (none, uniform(2)):
        assert_exact(lambda: ModelChunk(Single(closure, wgrad=True), recompute=recompute, **settings), data(2))  # noqa: B023


class Keeper:
    """Keeps its last output."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        self.kept = [x @ w]
        return self.kept[0] * 2


def test_memory_that_no_table_holds_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"stage 0.mix keeps a tensor beyond its slot"):
        predict(lambda: ModelChunk(Single(Keeper()), order="plain"), data())


class Opaque:
    """An object whose tensors nobody sees."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def opaque(x: Tensor, w: Tensor) -> tuple[Tensor, Opaque]:
    return x @ w, Opaque(x + 1)


def test_an_opaque_value_is_refused() -> None:
    class Model(Single):
        def program(self) -> Program:
            b = ProgramBuilder()
            hidden, weight = b.input("hidden"), b.parameter("w", self.weight)
            with b.layer(0):
                hidden, _ = b.compute("mix", opaque, hidden, weight, outputs=("out",), nondiff=("extra",))
            (loss,) = b.compute("loss", square, hidden, outputs=("loss",))
            b.loss(loss)
            return b.build()

    with pytest.raises(ProgramError, match=r"0.mix .* in none of its values"):
        predict(lambda: ModelChunk(Model(opaque), order="plain"), data())


class Table:
    """Makes a table at its first call and keeps it for good."""

    def __init__(self) -> None:
        self.table: list[Tensor] = []

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        if not self.table:
            self.table.append(torch.ones(WIDTH))
        return x @ w * self.table[0]


@pytest.mark.parametrize("recompute", [none, uniform(1)], ids=str)
def test_a_table_made_at_the_first_call_is_not_the_steps(recompute) -> None:
    assert_exact(lambda: ModelChunk(Single(Table()), recompute=recompute, order="plain"), data(2))


LOSSES: Sequence[Callable[..., Tensor]] = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss,
    F.binary_cross_entropy_with_logits, F.poisson_nll_loss,
)  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses_that_return_a_buffer_of_full_size(loss, reduction) -> None:
    """Some CPU kernels reduce within a buffer of the input's size; fake kernels return four bytes."""

    class Model(Single):
        def program(self) -> Program:
            b = ProgramBuilder()
            hidden, weight = b.input("hidden"), b.parameter("w", self.weight)
            (hidden,) = b.compute("mix", torch.matmul, hidden, weight, outputs=("out",))
            (total,) = b.compute("loss", self.end, hidden, outputs=("loss",))
            b.loss(total)
            return b.build()

        def end(self, x: Tensor) -> Tensor:
            total: Tensor = loss(x, torch.ones(WIDTH).expand_as(x), reduction=reduction)
            return total

    assert_exact(lambda: ModelChunk(Model(loss), order="plain"), data(2))


def test_a_dry_run_leaves_the_generators_alone() -> None:
    feeds = tokens(1)
    before = torch.get_rng_state()
    predict(lambda: decoder(uniform(1), dropout=0.1, attention_dropout=0.1, jitter=0.1), feeds)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_dry_run_serves_every_order_and_config() -> None:
    """Facts are about stages, not about schedules."""
    with fake_chunk(lambda: decoder(uniform(1), order="plain", layers=1)) as chunk:
        one = take_footprint(chunk, tokens(1)[0])
    with fake_chunk(lambda: decoder(none, delay_wgrad=True, layers=1)) as chunk:
        other = take_footprint(chunk, tokens(1)[0])
    assert one == other


def test_what_nobody_reads_takes_one_element_and_no_product() -> None:
    """The graph is the same, and so is its backward; a step's floating-point operations fall by those products."""
    register_flops()
    config = ModelConfig(layers=1, hidden=16)
    with fake_chunk(lambda: ModelChunk(Decoder(config), recompute=uniform(1), delay_wgrad=True)) as chunk:
        found = take_footprint(chunk, tokens(1)[0], (True,), device=DEVICES["h200"])
        replays = [i for plan, _ in step_plans(chunk, 3) for i in plan.issues if i.slot.op is Op.REPLAY]
    facts = found.facts[True]
    inner = {"experts": (12 * config.topk, config.expert_width), "shared": (12, config.shared_width)}
    for stage, (rows, width) in inner.items():
        kinds = [Kind((0, stage), Source.FORWARD, True, False, graph_only=left) for left in (False, True)]
        whole, left_out = (facts[kind] for kind in kinds)
        product = 2 * rows * width * config.hidden
        assert whole.born[0] == rows * config.hidden * 4
        assert left_out.born == (4, *whole.born[1:])
        assert (left_out.writes, left_out.tape) == (whole.writes, whole.tape)
        assert whole.work.flops - left_out.work.flops == product == whole.work.flops / 3
        for source in (Source.BACKWARD, Source.WGRAD):
            one, other = (facts[replace(kind, source=source)] for kind in kinds)
            assert one == other
        flops = sum(facts[forward_kind(issue)].work.flops for issue in replays if issue.stage.name == stage)
        assert flops == 3 * (whole.work.flops - product)
        # what readers find is the first pass's
        assert found.spans[0, stage] == (((rows * config.hidden, 4),),)
    assert {kind.key[1] for kind in facts if kind.graph_only} == set(inner)
