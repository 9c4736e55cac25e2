"""Gradient hooks, delayed weight gradients and accumulation over several calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from overlap import ModelChunk, Op, PerToken, reference_step, train_step
from overlap.engine import Engine, MicrobatchState
from overlap.lower import Issue
from overlap.model import Decoder, Linear
from recompute import RecomputeConfig
from tests.cases.model import (
    NONE,
    B,
    U,
    Watcher,
    assert_equals_reference,
    different,
    m0,
    make_chunk,
    make_feeds,
    outcome,
    run,
)
from tests.cases.test_requires_grad import adapted_m0

RULES = [U(1), U(3), B(2), NONE]
Fired = list[tuple[str, tuple[Op, int, int | None, str] | None]]


def watch_hooks(chunk: ModelChunk, watcher: Watcher) -> Fired:
    """Log (parameter, slot) whenever a parameter's gradient has been accumulated."""
    fired: Fired = []
    for name, parameter in chunk.module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append((name, watcher.slot)))
    return fired


@pytest.mark.parametrize(
    ("rule", "delay_wgrad", "tied"),
    [
        *((U(1), delay, tied) for delay in (False, True) for tied in (False, True)),
        *((r, True, True) for r in RULES[1:]),
    ],
    ids=str,
)
def test_hooks_fire_once_per_microbatch(rule: RecomputeConfig, delay_wgrad: bool, tied: bool) -> None:
    """Row 55: once per microbatch and trainable parameter, with delay after the delayed weight gradient; EQ."""
    chunk, feeds, watcher = make_chunk(rule, delay_wgrad=delay_wgrad, tied=tied), make_feeds(2), Watcher()
    assert_equals_reference(chunk, feeds)
    fired = watch_hooks(chunk, watcher)
    train_step(chunk, feeds, observers=(watcher,))
    counts = Counter((name, slot[1]) for name, slot in fired if slot is not None)
    names = [name for name, _ in chunk.module.named_parameters()]
    assert counts == Counter({(name, mb): 1 for name in names for mb in range(2)})
    where = {name: slot[0] for name, slot in fired if slot is not None}
    late = {name for name in names if name.endswith((".experts.down", ".attention.output.weight", "down.weight"))}
    assert late
    assert {where[name] for name in late} == {Op.WGRAD if delay_wgrad else Op.BACKWARD}
    assert {op for name, op in where.items() if "norm" in name or "router" in name} == {Op.BACKWARD}


@pytest.mark.parametrize("delay_wgrad", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_hooks_of_accumulate_nodes_fire_once_per_microbatch(delay_wgrad: bool, tied: bool) -> None:
    """Row 55: the hooks of torch's data parallelism and of bucketed reducers, in every step; EQ."""
    chunk, feeds = make_chunk(U(1), delay_wgrad=delay_wgrad, tied=tied), make_feeds(4)
    fired: Counter[str] = Counter()
    nodes = []
    for name, parameter in chunk.module.named_parameters():
        node: Any = get_gradient_edge(parameter).node
        node.register_hook(lambda *_, name=name: fired.update([name]))
        nodes.append(node)
    for step in (1, 2):
        train_step(chunk, feeds)
        assert fired == Counter({name: step * len(feeds) for name, _ in chunk.module.named_parameters()})
    assert_equals_reference(chunk, feeds)


def test_gradient_seen_by_the_last_hook_is_the_sum() -> None:
    """Row 55: the second microbatch's gradient adds to the first one's and does not replace it."""
    chunk, feeds = make_chunk(U(1), delay_wgrad=True), make_feeds(2)
    seen: dict[str, Tensor] = {}
    for name, parameter in chunk.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.__setitem__(name, p.grad.clone()))
    train_step(chunk, feeds)
    total = run(make_chunk(), feeds, reference_step).gradients
    single = run(make_chunk(), feeds[1:], reference_step, accumulate=2).gradients
    for name, gradient in seen.items():
        expected, last = total[name], single[name]
        assert expected is not None
        assert last is not None
        assert torch.equal(gradient, expected)
        assert not torch.equal(gradient, last)


class ForgetsOne(Engine):
    """Control: never computes the delayed gradient of one stage."""

    def _wgrad(self, issue: Issue, owner: MicrobatchState) -> None:
        if issue.stage.key != (1, "experts"):
            super()._wgrad(issue, owner)


def test_an_optimizer_step_cannot_meet_a_pending_queue() -> None:
    """Row 55: train_step returns with nothing pending, or does not return."""
    chunk, feeds = make_chunk(U(1), delay_wgrad=True), make_feeds(2)
    pending: dict[int, int] = {}
    owners: dict[int, MicrobatchState] = {}

    def note(issue: Issue, owner: MicrobatchState) -> None:
        owners[owner.number] = owner
        pending[owner.number] = max(pending.get(owner.number, 0), len(owner.pending))

    train_step(chunk, feeds, observers=(Watcher(note),))
    assert all(count > 0 for count in pending.values())
    assert [len(owner.pending) for owner in owners.values()] == [0, 0]
    with pytest.raises(RuntimeError, match=r"pending weight gradients of microbatch 0: .*experts"):
        train_step(chunk, feeds, engine_type=ForgetsOne)


class DirectUse(nn.Module):
    """A product that takes its weight itself and not through a module that could delay it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def direct_m0() -> Decoder:
    """M0 whose attention output weight is used directly, beside three delayed ones in the same stage."""
    model = Decoder(m0())
    for module in list(model.modules()):
        if hasattr(module, "latent") and hasattr(module, "output"):
            module.output = DirectUse(module.output.weight.detach().clone())  # type: ignore[union-attr, operator]
    return model


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_weight_used_directly_beside_delayed_ones(rule: RecomputeConfig) -> None:
    """Row 56: the queue holds what the replay put off, once; the direct weight gets its gradient in B."""
    chunk = ModelChunk(direct_m0(), recompute=rule, delay_wgrad=True)
    feeds = make_feeds(2)
    assert_equals_reference(chunk, feeds)
    queued: dict[tuple[int, int | None, str], int] = {}

    def note(issue: Issue, owner: MicrobatchState) -> None:
        if issue.slot.op is Op.BACKWARD and issue.stage.key in owner.pending:
            collector, _ = owner.pending[issue.stage.key]
            queued[(owner.number, *issue.stage.key)] = len(collector.pending)

    watcher = Watcher(note)
    fired = watch_hooks(chunk, watcher)
    train_step(chunk, feeds, observers=(watcher,))
    attention = chunk.get_submodule("module.layers.0.attn.attention")
    delayed = sum(isinstance(module, Linear) for module in attention.modules())
    assert delayed == 3
    assert {count for (_, _, name), count in queued.items() if name == "attn"} == {delayed}
    assert len([name for _, _, name in queued if name == "attn"]) == 2 * 4
    direct = [slot[0] for name, slot in fired if name.endswith("attention.output.weight") and slot is not None]
    assert direct == [Op.BACKWARD] * (2 * 4)
    put_off = [slot[0] for name, slot in fired if name.endswith("attention.latent.weight") and slot is not None]
    assert put_off == [Op.WGRAD] * (2 * 4)


def in_two_calls(chunk: ModelChunk, feeds: list, **settings: Any) -> Any:
    losses = [*train_step(chunk, feeds[:2], accumulate=2, **settings)]
    return outcome(chunk, losses + train_step(chunk, feeds[2:], accumulate=2, **settings))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_two_calls_are_one_call_of_all_microbatches(rule: RecomputeConfig) -> None:
    """Row 57: two calls of two microbatches add up to one of four, router losses and counters included."""
    feeds = make_feeds(4)
    expected = run(make_chunk(), feeds, reference_step)
    torch.manual_seed(7)
    assert different(expected, in_two_calls(make_chunk(rule), feeds)) == []
    torch.manual_seed(7)
    unscaled = make_chunk(rule)
    losses = [*train_step(unscaled, feeds[:2]), *train_step(unscaled, feeds[2:])]
    broken = different(expected, outcome(unscaled, losses))
    assert {name.partition(":")[0] for name in broken} == {"gradients"}, "without accumulate= the scale is another"


def test_two_calls_with_a_loss_per_token() -> None:
    """Row 57: the same where losses are sums over tokens of unequal microbatches."""
    feeds = make_feeds(4)
    feeds[1]["labels"][:, 3:] = -100
    tokens = sum(int((mb["labels"] != -100).sum()) for mb in feeds)

    def chunk() -> ModelChunk:
        return ModelChunk(Decoder(m0(per_token_loss=True)), recompute=U(1), loss_scale=PerToken())

    expected = run(chunk(), feeds, reference_step)
    torch.manual_seed(7)
    assert different(expected, in_two_calls(chunk(), feeds, total_tokens=tokens)) == []
    torch.manual_seed(7)
    assert different(expected, in_two_calls(chunk(), feeds, total_tokens=tokens + 1)) != []


class BucketReducer:
    """Reduces a bucket of parameters when all are ready; a parameter may be ready once per step."""

    def __init__(self, parameters: list[nn.Parameter], size: int) -> None:
        self.buckets = [parameters[i : i + size] for i in range(0, len(parameters), size)]
        self.ready: Counter[int] = Counter()
        self.issued: list[int] = []
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda p, n=number: self._ready(n, p))

    def _ready(self, number: int, parameter: nn.Parameter) -> None:
        self.ready[id(parameter)] += 1
        if all(self.ready[id(other)] == 1 for other in self.buckets[number]):
            self.issued.append(number)

    def finish(self) -> None:
        missing = [number for number in range(len(self.buckets)) if self.issued.count(number) != 1]
        if missing:
            raise RuntimeError(f"communication not issued for buckets {missing}")


@pytest.mark.parametrize("delay_wgrad", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_adapters_under_a_bucketed_reducer(rule: RecomputeConfig, delay_wgrad: bool) -> None:
    """Row 59: frozen base, adapters only: every trainable parameter is ready exactly once, every bucket is issued."""
    torch.manual_seed(3)
    chunk = ModelChunk(adapted_m0(), recompute=rule, delay_wgrad=delay_wgrad)
    trainable = [p for p in chunk.parameters() if p.requires_grad]
    frozen = [p for p in chunk.parameters() if not p.requires_grad]
    reducer = BucketReducer(trainable, 5)
    assert len(reducer.buckets) > 3
    train_step(chunk, make_feeds(1))
    reducer.finish()
    assert {reducer.ready[id(p)] for p in trainable} == {1}
    assert all(p.grad is None for p in frozen)


def test_the_reducer_notices_a_parameter_that_is_not_ready() -> None:
    """Row 59: negative control: a bucket with a parameter outside the program stays open."""
    chunk = make_chunk(U(1))
    reducer = BucketReducer([*chunk.parameters(), nn.Parameter(torch.zeros(1))], 5)
    train_step(chunk, make_feeds(1))
    with pytest.raises(RuntimeError, match="communication not issued"):
        reducer.finish()
