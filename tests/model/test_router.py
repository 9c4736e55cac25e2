"""Router: choice, probabilities, losses, counters, bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from overlap.model import ModelConfig, Router, init_weights, update_expert_bias

TOKENS = 16


def make(**settings: Any) -> Router:
    router = Router(ModelConfig(hidden=8, **settings))
    init_weights(router, 3)
    return router


def tokens(count: int = TOKENS) -> Tensor:
    return torch.randn(count, 8)


def logits_of(router: Router, x: Tensor) -> Tensor:
    return x @ router.weight.T


def test_sigmoid_probabilities_sum_to_the_scale() -> None:
    router = make(route_scale=2.5)
    x = tokens()
    probs, routing, _ = router(x)
    scores = logits_of(router, x).sigmoid()
    best, ids = scores.topk(2)
    assert torch.equal(routing.expert_ids, ids)
    torch.testing.assert_close(probs, 2.5 * best / best.sum(-1, keepdim=True))


def test_softmax_probabilities_are_not_renormalised() -> None:
    router = make(score="softmax")
    x = tokens()
    torch.testing.assert_close(router(x).probs, logits_of(router, x).softmax(-1).topk(2).values)


def test_one_expert_per_token_keeps_a_gradient() -> None:
    router = make(topk=1)
    router(tokens()).probs.sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.ne(0).any()


def test_groups_limit_the_choice() -> None:
    router = make(experts=8, expert_groups=4, topk_groups=2, topk=3)
    x = tokens(64)
    scores = logits_of(router, x).sigmoid()
    for row, ids in zip(scores, router(x).routing.expert_ids, strict=True):
        best_groups = set(row.view(4, 2).sum(-1).topk(2).indices.tolist())
        allowed = [e for e in range(8) if e // 2 in best_groups]
        best = sorted(allowed, key=lambda e: -row[e].item())[:3]
        assert ids.tolist() == best


def test_a_group_is_scored_by_its_two_best() -> None:
    router = make(experts=6, expert_groups=2, topk_groups=1, topk=1)
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = torch.tensor([2.0, -9.0, -9.0, 1.0, 1.0, -9.0])
    x = torch.zeros(1, 8)
    x[0, 0] = 1
    assert router(x).routing.expert_ids.item() in (3, 4)


def test_bias_moves_the_choice_but_no_probability() -> None:
    router = make()
    x = tokens()
    router.expert_bias[3] = 10
    probs, routing, _ = router(x)
    assert (routing.expert_ids[:, 0] == 3).all()
    chosen = logits_of(router, x).sigmoid().gather(-1, routing.expert_ids)
    torch.testing.assert_close(probs, chosen / chosen.sum(-1, keepdim=True))


def test_bias_switched_off_has_no_say() -> None:
    router = make(expert_bias=False)
    x = tokens()
    before = router(x).routing.expert_ids
    router.expert_bias[3] = 10
    assert torch.equal(router(x).routing.expert_ids, before)


@pytest.mark.parametrize("count", [16, 4])
def test_counts_equal_a_loop(count: int) -> None:
    routing = make()(tokens(count)).routing
    counts = [0] * 4
    for row in routing.expert_ids.tolist():
        for expert in row:
            counts[expert] += 1
    assert routing.counts.tolist() == counts


@pytest.mark.parametrize("count", [16, 4])
def test_padding_counts_equal_a_loop(count: int) -> None:
    """Row 34: [tokens] against [tokens, experts], where the two differ and where they are the same number."""
    padding = torch.arange(count) % 3 == 1
    routing = make()(tokens(count), padding=padding).routing
    counts = [0] * 4
    for token, row in enumerate(routing.expert_ids.tolist()):
        for expert in row:
            counts[expert] += not padding[token]
    assert routing.counts.tolist() == counts
    assert not routing.covers
    behind = routing.source[sum(counts) :] // 2
    assert sorted(behind.tolist()) == sorted([token for token in range(count) if padding[token]] * 2)
    assert torch.equal(routing.source[routing.inverse], torch.arange(2 * count))


@pytest.mark.parametrize("per_token", [False, True])
def test_padding_has_no_part_in_the_losses(per_token: bool) -> None:
    """As if the padding had not been there, in value and in gradient."""
    router = make(aux_coefficient=0.5, z_coefficient=0.25, per_token_loss=per_token)
    x = tokens()
    padding = torch.arange(TOKENS) % 4 == 3
    found, expected = router(x, padding=padding), router(x[~padding])
    torch.testing.assert_close(found.losses, expected.losses)
    assert torch.equal(found.routing.counts, expected.routing.counts)
    for one, other in zip(found.losses, expected.losses, strict=True):
        grads = [torch.autograd.grad(loss, router.weight, retain_graph=True)[0] for loss in (one, other)]
        torch.testing.assert_close(*grads)


def test_nothing_but_padding() -> None:
    routed = make()(tokens(), padding=torch.ones(TOKENS, dtype=torch.bool))
    assert not routed.routing.counts.any()
    assert all(loss == 0 for loss in routed.losses)


def test_pinned_routing_is_not_chosen_again() -> None:
    """Row 17: with ties broken another way at each call, a replay at pinned ids gives the same numbers."""
    router = make()
    with torch.no_grad():
        router.weight.zero_()
    calls: list[int] = []

    def alternating(scores: Tensor, k: int) -> Tensor:
        calls.append(k)
        order = torch.arange(scores.shape[-1]).expand_as(scores)
        return (order.flip(-1) if len(calls) % 2 else order)[..., :k]

    router.select = alternating
    x = tokens()
    first = router(x)
    again = router(x, first.routing)
    assert len(calls) == 1
    assert again.routing is first.routing
    assert torch.equal(again.probs, first.probs)
    assert all(torch.equal(a, b) for a, b in zip(first.losses, again.losses, strict=True))
    assert not torch.equal(router(x).routing.expert_ids, first.routing.expert_ids)


def test_pinned_ids_give_the_gradient_of_the_first_pass() -> None:
    router = make()
    x = tokens()
    first = router(x)
    (before,) = torch.autograd.grad(first.probs.square().sum() + sum(first.losses), router.weight)
    again = router(x, first.routing)
    (after,) = torch.autograd.grad(again.probs.square().sum() + sum(again.losses), router.weight)
    assert torch.equal(before, after)


def test_losses() -> None:
    router = make(aux_coefficient=0.5, z_coefficient=0.25)
    x = tokens()
    _, routing, (aux, z) = router(x)
    logits = logits_of(router, x)
    scores = logits.sigmoid()
    share = torch.tensor([(routing.expert_ids == e).sum() / (TOKENS * 2) for e in range(4)])
    mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
    torch.testing.assert_close(aux, 0.5 * 4 * (share * mean).sum())
    torch.testing.assert_close(z, 0.25 * logits.exp().sum(-1).log().square().mean())


def test_per_token_losses_count_every_token() -> None:
    x = tokens()
    mean, total = make()(x).losses, make(per_token_loss=True)(x).losses
    assert all(torch.equal(m * TOKENS, t) for m, t in zip(mean, total, strict=True))


def test_losses_without_weight_do_not_exist() -> None:
    router = make(aux_coefficient=0.0, z_coefficient=0.0)
    assert router.loss_names == ()
    assert router(tokens()).losses == ()
    assert [name for name, _ in router.effects] == ["counts"]


def test_forward_changes_no_buffer_and_effects_do() -> None:
    router = make()
    before = {name: buffer.clone() for name, buffer in router.named_buffers()}
    routed = router(tokens())
    assert all(torch.equal(buffer, before[name]) for name, buffer in router.named_buffers())
    values = {"counts": routed.routing.counts, **dict(zip(router.loss_names, routed.losses, strict=True))}
    for name, apply in router.effects:
        apply(values[name])
    assert torch.equal(router.tokens_per_expert, routed.routing.counts)
    assert torch.equal(router.aux_loss_sum, routed.losses[0].detach())
    assert torch.equal(router.z_loss_sum, routed.losses[1].detach())


def test_effects_do_nothing_in_eval_mode() -> None:
    """Row 64: counters do not move in evaluation."""
    router = make().eval()
    router.count(torch.ones(4, dtype=torch.int64))
    router.log_aux(torch.ones(()))
    router.log_z(torch.ones(()))
    assert not router.tokens_per_expert.any()
    assert not router.aux_loss_sum.any()
    assert not router.z_loss_sum.any()


def test_jitter_draws_in_training_only() -> None:
    router = make(jitter=0.3)
    x = tokens()
    assert not torch.equal(router(x).probs, router(x).probs)
    router.eval()
    state = torch.get_rng_state()
    assert torch.equal(router(x).probs, router(x).probs)
    assert torch.equal(torch.get_rng_state(), state)


def test_jitter_is_not_rounded_to_the_model_s_type() -> None:
    router = make(jitter=0.3, dtype="bfloat16").to(torch.bfloat16)
    x = tokens().bfloat16()
    torch.manual_seed(0)
    found = router(x).probs
    torch.manual_seed(0)
    noisy = x.float() * torch.empty(x.shape).uniform_(0.7, 1.3)
    assert torch.equal(found, router.eval()(noisy).probs)


def test_scores_are_wide() -> None:
    narrow = make(dtype="bfloat16").to(torch.bfloat16)
    assert narrow(tokens().bfloat16()).probs.dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert make()(tokens()).probs.dtype is torch.float32
    double = make(dtype="float64").double()
    assert double(tokens().double()).probs.dtype is torch.float64
    assert double.expert_bias.dtype is torch.float64


def test_counters_and_bias_are_exact_after_a_cast_to_bfloat16() -> None:
    """Row 16: large counts stay exact integers and the bias keeps its bits, so no update flips its sign."""
    router = make(bias_rate=0.001)
    counts = torch.tensor([40840, 40841, 40839, 40843])
    bias = torch.tensor([0.1234567, -0.7654321, 1e-5, 3.0])
    router.expert_bias.copy_(bias)
    router.tokens_per_expert.copy_(counts)
    router.to(torch.bfloat16)
    router.count(torch.tensor([1, 0, 1, 0]))
    assert router.weight.dtype is torch.bfloat16
    assert router.tokens_per_expert.tolist() == [40841, 40841, 40840, 40843]
    assert torch.equal(router.expert_bias, bias)
    update_expert_bias(router)
    # mean 40841.25
    assert torch.equal(router.expert_bias, bias + torch.tensor([0.001, 0.001, 0.001, -0.001]))
    assert not router.tokens_per_expert.any()


def test_update_leaves_a_bias_that_is_off() -> None:
    router = make(expert_bias=False)
    router.count(torch.tensor([1, 2, 3, 4]))
    update_expert_bias(router)
    assert not router.expert_bias.any()
    assert not router.tokens_per_expert.any()
