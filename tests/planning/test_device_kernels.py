"""On fake tensors a device's kernels keep and allocate what they would on a device."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from overlap.chunk import ModelChunk
from overlap.memory import fake_chunk, take_footprint
from overlap.memory.facts import Facts, Kind
from overlap.memory.inside import Inside
from overlap.memory.refs import Source
from overlap.memory.trace import highest
from overlap.model import Decoder, ModelConfig
from overlap.model.fused import fused, kernels
from overlap.planning.device_kernels import INSIDE, DeviceKernels

T, C, H, N, R, V, W, E, K = 6, 32, 2, 16, 8, 28, 40, 5, 3
"""Tokens, hidden, heads, widths without and with rotary and of values, inner width, experts, experts per token."""
BF16, F32 = 2, 4
CONFIG = ModelConfig(
    layers=1, dense_layers=0, hidden=C, heads=H, nope_dim=N, rope_dim=R, value_dim=V, kv_rank=12, q_rank=20,
    expert_width=W, shared_width=0, experts=E, topk=K, vocab=50, dtype="bfloat16",
)  # fmt: skip


def survey(inside: Inside) -> dict[Kind, Facts]:
    tokens = torch.zeros(1, T, dtype=torch.int64)
    with fake_chunk(lambda: ModelChunk(Decoder(CONFIG))) as chunk, DeviceKernels():
        found = take_footprint(chunk, {"ids": tokens, "labels": tokens}, (False,), inside=inside)
        return dict(found.facts[False])


@pytest.fixture(scope="module")
def facts() -> dict[Kind, Facts]:
    return survey(INSIDE)


def kind(name: str, source: Source, pinned: bool = False) -> Kind:
    return Kind((0, name), source, True, pinned)


def test_what_attention_and_router_keep(facts: dict[Kind, Facts]) -> None:
    """Heads of their own, where views of the expanded latent would keep all of it; of the scores the logits alone."""
    found = facts[kind("attn", Source.FORWARD)]
    kept = Counter(found.born[ref.place] for ref in found.tape if ref.source is Source.FORWARD)
    wanted = {
        T * H * (N + R) * BF16: 2,  # queries and keys
        T * H * V * BF16: 2,  # values and output
        T * H * (N + V) * BF16: 0,
        T * H * F32: 1,  # of attention, per row
        T * E * F32: 1,  # logits
    }
    assert {size: kept[size] for size in wanted} == wanted


def test_the_activation_takes_its_result_alone(facts: dict[Kind, Facts]) -> None:
    rows = T * K
    assert highest(facts[kind("experts", Source.FORWARD)].trace, 0, {}) == rows * (2 * W + W + C) * BF16


def test_token_copies_are_added_up_where_they_lie(facts: dict[Kind, Facts]) -> None:
    """Post makes the sums and the residual's, not the T*K rows of each token side by side."""
    post = Kind((0, "post"), Source.FORWARD, False, False)
    assert highest(facts[post].trace, 0, {}) == 2 * T * C * BF16


def test_attention_adds_up_the_gradient_of_queries_in_float32() -> None:
    backward = torch.ops.overlap.device_attention_backward.default
    with FakeTensorMode():
        query, value = torch.empty(1, H, T, N + R), torch.empty(1, H, T, V)
        inside = INSIDE[backward](value, query, query, value, value, query[..., 0])
    assert inside == T * H * (N + R) * F32 + T * H * F32
    slot = kind("attn", Source.BACKWARD)
    assert highest(survey({backward: lambda *args: 10**6})[slot].trace, 0, {}) > 10**6


def test_inside_of_operators() -> None:
    rows, narrow = torch.empty(8, 4, dtype=torch.bfloat16), torch.empty(8, 6, dtype=torch.bfloat16)[:, :4]
    weight, sizes = torch.empty(4, dtype=torch.bfloat16), torch.empty(8)
    norm, back = (torch.ops.overlap.device_rms_norm.default, torch.ops.overlap.device_rms_norm_backward.default)
    assert [INSIDE[norm](x, weight) for x in (rows, narrow)] == [0, 8 * 4 * BF16]
    assert [INSIDE[back](rows, x, weight, sizes) for x in (rows, narrow)] == [0, 8 * 4 * BF16]
    assert INSIDE[back](narrow, narrow, weight, sizes) == 2 * 8 * 4 * BF16
    embedding = torch.ops.aten.embedding_dense_backward.default
    ids = torch.zeros(1, 4096, dtype=torch.int64)
    grad = torch.empty(1, 4096, 16, dtype=torch.bfloat16)
    assert INSIDE[embedding](grad, ids, 32000, -1, False) == (4096 + 410) * 16 * F32
    assert INSIDE[embedding](grad, ids, 100, -1, False) == (100 + 410) * 16 * F32
    assert INSIDE[embedding](grad[:, :3072], ids[:, :3072], 32000, -1, False) == 0


@pytest.mark.parametrize(("dtype", "nbytes"), [(torch.bfloat16, 0), (torch.float32, 8 * 16 * F32)], ids=str)
def test_weight_gradients_of_experts_are_added_by_one_kernel(dtype, nbytes) -> None:
    """In bfloat16; else one expert at a time."""
    add = INSIDE[torch.ops.overlap.grouped_mm_wgrad_add.default]
    assert add(torch.empty(3, 8, 16, dtype=dtype), torch.empty(5, 8, dtype=dtype), None, None, True) == nbytes


def test_kernels_idle_inside_only() -> None:
    with FakeTensorMode():
        fake = torch.empty(2, dtype=torch.bfloat16)
        assert not fused(fake)
        with DeviceKernels():
            assert fused(fake)
            assert not fused(fake.double())
            idle = kernels("triton_swiglu")
            assert idle.swiglu_forward(fake, None, fake) is None
        assert not fused(fake)
    with DeviceKernels():
        real: Tensor = torch.empty(2)
        assert not fused(real), "a real tensor would stay empty"
