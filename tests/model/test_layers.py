"""Layers: what their stages declare, and adjoints that equal autograd to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from overlap.ir import Lane, Program, Stage
from overlap.model import Decoder, ModelConfig

DTYPES = ["float32", "bfloat16", "float64"]
CUT = {"cut_attention": True, "dense_layers": 1, "mhc": 2}
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}


def program_of(**settings: Any) -> Program:
    return Decoder(ModelConfig(**{"layers": 1, **settings})).program()


def stage_of(name: str, **settings: Any) -> Stage:
    return program_of(**settings).by_key[0, name]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(BITS[a.dtype]), b.view(BITS[b.dtype]))


def names(program: Program) -> list[str]:
    return [stage.name for stage in program.layer_stages[0]]


def test_stage_names() -> None:
    assert names(program_of()) == ["attn", "shared", "dispatch", "experts", "combine", "post"]
    assert names(program_of(shared_width=0)) == ["attn", "dispatch", "experts", "combine", "post"]
    assert names(program_of(dense_layers=1)) == ["attn", "experts", "post"]
    cut = ["attn", "post_attn", "shared", "dispatch", "experts", "combine", "post"]
    assert names(program_of(cut_attention=True)) == cut
    assert names(program_of(cut_attention=True, dense_layers=1)) == ["attn", "post_attn", "experts", "post"]


def test_lanes_and_weight_gradients() -> None:
    stages = program_of().layer_stages[0]
    assert [s.name for s in stages if s.lane is Lane.COMM] == ["dispatch", "combine"]
    assert [s.name for s in stages if s.wgrad] == ["attn", "shared", "experts"]
    cut = program_of(cut_attention=True).layer_stages[0]
    assert [s.name for s in cut if s.wgrad] == ["attn", "post_attn", "shared", "experts"]
    assert [s.name for s in stages if s.adjoint is not None] == ["dispatch", "combine", "post"]
    assert [s.pins for s in stages if s.pins] == [("0.routing",), ("0.arrival",)]


@pytest.mark.parametrize(
    ("settings", "drawing"),
    [
        ({}, []),
        ({"dropout": 0.1}, ["attn", "post"]),
        ({"attention_dropout": 0.1}, ["attn"]),
        ({"jitter": 0.1}, ["attn"]),
        ({"jitter": 0.1, "dense_layers": 1}, []),
        ({"dropout": 0.1, "dense_layers": 1}, ["attn", "post"]),
        ({"dropout": 0.1, "cut_attention": True}, ["attn", "post"]),
        ({"jitter": 0.1, "cut_attention": True}, ["post_attn"]),
    ],
)
def test_who_draws(settings: dict[str, Any], drawing: list[str]) -> None:
    assert [s.name for s in program_of(**settings).layer_stages[0] if s.draws_rng] == drawing


@pytest.mark.parametrize("settings", [{}, {"shared_width": 0}, {"dense_layers": 1}, {"tied": True}, {"q_rank": 4}, CUT])
def test_every_parameter_is_declared_once(settings: dict[str, Any]) -> None:
    model = Decoder(ModelConfig(layers=2, **settings))
    declared = [id(p) for stage in model.program().stages for p in stage.parameters]
    assert sorted(declared) == sorted(id(p) for p in model.parameters())


def post_arguments(stage: Stage, routing: Any, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> list[Any]:
    batch, sequence, hidden, topk = sizes
    shapes = {"0.combined": (batch * sequence * topk, hidden)}
    return [
        routing
        if name == "0.routing"
        else torch.randn(shapes.get(name, (batch, sequence, hidden)), dtype=dtype, requires_grad=True)
        for name in stage.reads
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("settings", [{}, {"shared_width": 0}, {"topk": 1}, {"topk": 3}, {"dense_layers": 1}])
@pytest.mark.parametrize("transposed", [False, True])
def test_post_adjoint_is_autograd(dtype: str, dropout: float, settings: dict[str, Any], transposed: bool) -> None:
    """Same bits as backward through forward, the noise drawn again from the same generator state (R8)."""
    model = Decoder(ModelConfig(layers=1, dropout=dropout, dtype=dtype, **settings))
    stage = model.program().by_key[0, "post"]
    config = model.config
    hidden = torch.randn(10, config.hidden, dtype=model.embedding.dtype)
    dense = config.dense_layers == 1
    routing = None if dense else model.get_submodule("layers.0.router")(hidden).routing
    arguments = post_arguments(stage, routing, hidden.dtype, (2, 5, config.hidden, config.topk))
    grad = torch.randn(2, 5, config.hidden).to(hidden.dtype)
    if transposed:
        grad = grad.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    state = torch.get_rng_state()
    stage.forward(*arguments).backward(grad)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    assert stage.adjoint is not None
    results = stage.adjoint((grad,), () if dense else (routing,))
    assert torch.equal(torch.get_rng_state(), after)
    assert len(results) == len(stage.reads)
    for argument, result in zip(arguments, results, strict=True):
        if argument is routing:
            assert result is None
        else:
            assert same_bits(result.contiguous(), argument.grad.contiguous())


@pytest.mark.parametrize("settings", [{}, {"dense_layers": 1}])
def test_no_gradient_in_gives_none_out(settings: dict[str, Any]) -> None:
    stage = stage_of("post", **settings)
    assert stage.adjoint is not None
    assert stage.adjoint((None,), (None,)) == (None,) * len(stage.reads)


def test_post_draws_nothing_in_eval_mode() -> None:
    model = Decoder(ModelConfig(layers=1, dense_layers=1, dropout=0.5)).eval()
    stage = model.program().by_key[0, "post"]
    state = torch.get_rng_state()
    x = torch.ones(1, 2, 32)
    assert torch.equal(stage.forward(x, x), 2 * x)
    assert stage.adjoint is not None
    assert stage.adjoint((x,), ())[0] is x
    assert torch.equal(torch.get_rng_state(), state)


def test_communication_adjoints_align_with_reads() -> None:
    program = program_of()
    tokens, probs, rows = torch.randn(4, 2), torch.randn(4), torch.randn(4, 2)
    dispatch, combine = program.by_key[0, "dispatch"], program.by_key[0, "combine"]
    assert dispatch.adjoint is not None
    assert combine.adjoint is not None
    assert dispatch.adjoint((tokens, probs, None), (None, None)) == (tokens, probs, None)
    assert combine.adjoint((rows,), (None, None)) == (rows, None, None)


def test_replay_of_attn_at_pinned_routing_has_the_same_bits() -> None:
    stage = stage_of("attn", dropout=0.2, jitter=0.2, attention_dropout=0.2)
    hidden = torch.randn(2, 5, 32)
    state = torch.get_rng_state()
    with torch.no_grad():
        first = stage.forward(hidden, pinned=None)
    routing = first[stage.writes.index("0.routing")]
    torch.set_rng_state(state)
    again = stage.forward(hidden.requires_grad_(), pinned=(routing,))
    assert again[stage.writes.index("0.routing")] is routing
    for name, a, b in zip(stage.writes, first, again, strict=True):
        assert name == "0.routing" or torch.equal(a, b)
