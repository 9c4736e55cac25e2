from __future__ import annotations

from typing import Any

import torch

from overlap.parallel.buckets import Reduction, make_buckets, start_reduction
from tests.parallel.models import small_chunk

ALONE = Reduction(group=None, divide=4, dtype=None)
OTHER = Reduction(group=None, divide=2, dtype=None)


def test_buckets_hold_every_trainable_parameter_once_last_stage_first() -> None:
    chunk = small_chunk({"tied": True})
    frozen = chunk.module.get_parameter("head.norm.weight").requires_grad_(False)
    buckets = make_buckets(chunk.program, lambda _: ALONE, 4000)
    inside = [p for bucket in buckets for p in bucket.parameters]
    assert len(buckets) > 3
    assert {id(p) for p in inside} == {id(p) for p in chunk.module.parameters() if p is not frozen}
    assert len(inside) == len({id(p) for p in inside})
    assert (None, "weights") in buckets[-1].stages
    assert buckets[-1].parameters[-1] is chunk.module.get_parameter("embedding")
    sizes = [sum(p.numel() * p.element_size() for p in b.parameters) for b in buckets[:-1]]
    assert all(size >= 4000 for size in sizes)
    assert all(size - b.parameters[-1].numel() * 4 < 4000 for size, b in zip(sizes, buckets, strict=False))


def test_buckets_do_not_depend_on_order_or_delay() -> None:
    names = []
    for settings in ({}, {"delay_wgrad": True}, {"order": "plain"}):
        chunk = small_chunk(**settings)
        of = {id(p): name for name, p in chunk.module.named_parameters()}
        buckets = make_buckets(chunk.program, lambda _: ALONE, 4000)
        names.append([[of[id(p)] for p in bucket.parameters] for bucket in buckets])
    assert names[0] == names[1] == names[2]


def test_kinds_of_reduction_do_not_share_a_bucket() -> None:
    chunk = small_chunk()
    experts = {id(p) for name, p in chunk.module.named_parameters() if ".experts." in name}
    buckets = make_buckets(chunk.program, lambda p: OTHER if id(p) in experts else ALONE)
    assert [{id(p) in experts for p in bucket.parameters} for bucket in buckets] in (
        [{True}, {False}],
        [{False}, {True}],
    )
    assert make_buckets(chunk.program, lambda _: None) == ()


def test_types_of_gradients_do_not_share_a_bucket() -> None:
    chunk = small_chunk()
    wide = chunk.module.get_parameter("head.norm.weight")
    wide.data = wide.data.double()
    buckets = make_buckets(chunk.program, lambda _: ALONE)
    assert sorted(str(bucket.parameters[0].dtype) for bucket in buckets) == ["torch.float32", "torch.float64"]
    assert all(len({parameter.dtype for parameter in bucket.parameters}) == 1 for bucket in buckets)


def test_a_reduction_divides_and_a_parameter_without_gradient_ends_with_zeros() -> None:
    chunk = small_chunk()
    (bucket,) = make_buckets(chunk.program, lambda _: ALONE)
    first = bucket.parameters[0]
    gradient = torch.randn_like(first)
    first.grad = gradient.clone()
    pending = start_reduction(bucket)
    assert [p.grad for p in bucket.parameters] == [None] * len(bucket.parameters)
    pending.finish()
    found: list[Any] = [p.grad for p in bucket.parameters]
    assert torch.equal(found[0], gradient / 4)
    assert all(torch.equal(grad, torch.zeros_like(p)) for grad, p in zip(found[1:], bucket.parameters[1:], strict=True))


def test_sums_may_be_wider_than_gradients() -> None:
    chunk = small_chunk({"dtype": "bfloat16"})
    (bucket,) = make_buckets(chunk.program, lambda _: Reduction(group=None, divide=3, dtype=torch.float32))
    for parameter in bucket.parameters:
        parameter.grad = torch.full_like(parameter, 1.0)
    pending = start_reduction(bucket)
    assert pending.flat.dtype is torch.float32
    pending.finish()
    gradient: Any = bucket.parameters[0].grad
    assert gradient.dtype is torch.bfloat16
