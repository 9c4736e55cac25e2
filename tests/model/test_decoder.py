"""Decoder: its program runs, trains every parameter, and depends on nothing global."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from overlap.chunk import ModelChunk
from overlap.dispatch import LocalTransport
from overlap.ir import Program
from overlap.model import Decoder, ModelConfig, init_weights
from overlap.model.cut import Cut
from overlap.model.head import IGNORED, Head
from overlap.step import train_step
from overlap.training.rows import cut_rows
from recompute.errors import ConfigError

Run = Callable[[Program, dict[str, Tensor]], dict[str, Any]]
MODELS: dict[str, dict[str, Any]] = {
    "default": {},
    "gqa": {"attention": "gqa", "score": "softmax"},
    "tied": {"tied": True, "dense_layers": 1, "q_rank": 8, "layers": 2},
    "draws": {"dropout": 0.1, "attention_dropout": 0.1, "jitter": 0.1},
    "groups": {"experts": 8, "expert_groups": 4, "topk_groups": 2, "shared_width": 0},
    "per_token": {"per_token_loss": True, "aux_coefficient": 0.0, "z_coefficient": 0.0},
    "one_expert": {"experts": 1, "topk": 1},
    "no_layers": {"layers": 0},
    "no_layers_tied": {"layers": 0, "tied": True},
    "streams": {"mhc": 3, "mhc_iterations": 3, "dense_layers": 1, "layers": 2},
    "one_stream": {"mhc": 1, "mhc_iterations": 3},
    "depths": {"mtp": 2, "mtp_dense": True},
    "repeated": {"mtp": 2, "mtp_repeat": True, "tied": True, "mhc": 2, "mhc_iterations": 3},
    "depths_alone": {"layers": 0, "mtp": 1, "mhc": 2, "mhc_iterations": 3},
    "cut": {"padding": True, "packed": True, "mtp": 1, "labels": False},
}


def total_loss(program: Program, values: dict[str, Any]) -> Tensor:
    return torch.stack([values[loss.value] * loss.weight for loss in program.losses]).sum()


def feeds_of(settings: dict[str, Any], feeds: dict[str, Tensor]) -> dict[str, Tensor]:
    """Feeds for a model of MODELS."""
    cut = cut_rows(feeds, ModelConfig(**settings), torch.Generator().manual_seed(0))
    return {name: value for name, value in cut.items() if name != "labels" or settings.get("labels", True)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_finite_gradient(name: str, dtype: str, run_program: Run, make_feeds: Any) -> None:
    model = Decoder(ModelConfig(**{"layers": 2, "dtype": dtype, **MODELS[name]}))
    program = model.program()
    values = run_program(program, feeds_of(MODELS[name], make_feeds()))
    loss = total_loss(program, values)
    assert loss.isfinite()
    assert values["loss"].dtype is (torch.float64 if dtype == "float64" else torch.float32)
    loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert str(parameter.dtype) == f"torch.{dtype}"
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name


@pytest.mark.parametrize("name", MODELS)
def test_runs_on_fake_tensors(name: str, run_program: Run, make_feeds: Any) -> None:
    """Sizes never depend on data (R18)."""
    with FakeTensorMode():
        model = Decoder(ModelConfig(**{"layers": 1, "dtype": "bfloat16", **MODELS[name]}))
        program = model.program()
        kinds: dict[str, Any] = {"padding_mask": ((2, 8), torch.bool), "cu_seqlens": ((4,), torch.int64)}
        feeds = {
            source.name: torch.zeros(shape, dtype=dtype)
            for source in program.inputs
            for shape, dtype in [kinds.get(source.name, ((2, 8), torch.int64))]
        }
        loss = total_loss(program, run_program(program, feeds))
        loss.backward()
        assert isinstance(loss, FakeTensor)
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_a_step_of_descent_lowers_the_loss(run_program: Run, make_feeds: Any) -> None:
    model = Decoder(ModelConfig(layers=2))
    program, feeds = model.program(), make_feeds()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        values = run_program(program, feeds)
        total_loss(program, values).backward()
        optimizer.step()
        losses.append(values["loss"].item())
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mhc": 2, "mhc_iterations": 4},
        {"mtp": 2, "mtp_repeat": True, "tied": True},
        {"mtp": 1, "mhc": 2, "mhc_iterations": 4, "per_token_loss": True},
        {"mtp": 1, "padding": True, "packed": True},
        {"padding": True, "aux_coefficient": 3.0, "z_coefficient": 2.0, "per_token_loss": True},
        {"aux_coefficient": 3.0, "z_coefficient": 2.0, "score": "softmax"},
    ],
)
def test_gradients_of_a_whole_model(settings: dict[str, Any], run_program: Run, make_feeds: Any) -> None:
    """Finite differences, float64; the choice of experts does not flip within their step."""
    shape: dict[str, Any] = {"layers": 2, "dense_layers": 1, "hidden": 8, "kv_rank": 4, "expert_width": 4}
    config = ModelConfig(dtype="float64", **shape, **settings)
    model = Decoder(config)
    program, feeds = model.program(), feeds_of(settings, make_feeds(2, 5))

    def loss(*parameters: Tensor) -> Tensor:
        return total_loss(program, run_program(program, feeds))

    assert torch.autograd.gradcheck(loss, tuple(model.parameters()), fast_mode=True)


def test_weights_depend_on_the_seed_alone() -> None:
    state = torch.get_rng_state()
    first = Decoder(ModelConfig(layers=1), seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    again, other = Decoder(ModelConfig(layers=1), seed=5), Decoder(ModelConfig(layers=1), seed=6)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embedding, other.embedding)
    narrow = Decoder(ModelConfig(layers=1, dtype="bfloat16"), seed=5)
    assert torch.equal(narrow.embedding, first.embedding.bfloat16())


def test_undeclared_stages_leave_generators_and_buffers_alone(run_program: Run, make_feeds: Any) -> None:
    model = Decoder(ModelConfig(layers=2))
    program, feeds = model.program(), make_feeds()
    state = torch.get_rng_state()
    versions = [buffer._version for buffer in model.buffers()]
    run_program(program, feeds)
    assert torch.equal(torch.get_rng_state(), state)
    assert [buffer._version for buffer in model.buffers()] == versions


def test_cast_keeps_router_state_wide() -> None:
    model = Decoder(ModelConfig(layers=1)).to(torch.bfloat16)
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32, torch.int64}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_default_type_is_left_as_it_was() -> None:
    Decoder(ModelConfig(layers=1, dtype="float64"))
    assert torch.get_default_dtype() is torch.float32


def test_sequence_longer_than_the_tables(run_program: Run, make_feeds: Any) -> None:
    model = Decoder(ModelConfig(layers=1, max_seq=7))
    with pytest.raises(ConfigError, match=r"max_seq=7: .*\(8\)"):
        run_program(model.program(), make_feeds(1, 8))


@pytest.mark.parametrize(
    "bad",
    [
        {"config": None}, {"config": ModelConfig}, {"transport": LocalTransport}, {"transport": None}, {"seed": None},
        {"seed": 1.0}, {"cut": (0, 1)}, {"border": None}, {"cut": Cut(first=0, end=2, opens=True, closes=True)},
    ],
    ids=str,
)  # fmt: skip
def test_arguments(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(ConfigError, match=f"^{name}=.*: must "):
        Decoder(**{"config": ModelConfig(layers=1), **bad})


@pytest.mark.parametrize(
    "bad", [{"first": None}, {"first": 2}, {"end": 1.0}, {"end": True}, {"opens": 1}, {"closes": "no"}]
)
def test_cuts(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be "):
        Cut(**{"first": 0, "end": 1, "opens": True, "closes": True, **bad})


class Doubled(nn.Module):
    """Stands in for an adapter: not a plain projection, so the head goes through logits."""

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = 2 * self.projection(x)
        return doubled


@pytest.mark.parametrize("adapted", [False, True])
def test_head_loss(adapted: bool) -> None:
    head = Head(ModelConfig(hidden=4, vocab=5))
    init_weights(head, 0)
    hidden, factor = torch.randn(2, 3, 4), 2 if adapted else 1
    logits = factor * hidden @ head.projection.weight.T
    if adapted:
        head.register_module("projection", Doubled(head.projection))
    labels = torch.tensor([[0, IGNORED, 2], [IGNORED, 4, 1]])
    terms = [-logits[b, s].log_softmax(-1)[labels[b, s]] for b in range(2) for s in range(3) if labels[b, s] != IGNORED]
    total = head.total_loss(hidden.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(total, torch.stack(terms).sum())
    detached = head.total_loss(hidden.requires_grad_().flatten(0, 1), labels.flatten(), detach=True)
    (gradient,) = torch.autograd.grad(detached, list(head.projection.parameters()), allow_unused=True)
    assert gradient is None


def adapted_head() -> Head:
    head = Head(ModelConfig(hidden=4, vocab=5))
    init_weights(head, 0)
    head.register_module("projection", Doubled(head.projection))
    return head


def test_loss_through_logits_is_torchs_to_the_bit() -> None:
    head, hidden = adapted_head(), torch.randn(6, 4, requires_grad=True)
    labels = torch.tensor([0, IGNORED, 2, IGNORED, 4, 1])
    reads = (hidden, *head.projection.parameters())
    expected = F.cross_entropy(head.projection(hidden), labels, ignore_index=IGNORED, reduction="sum")
    found = head.total_loss(hidden, labels)
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(loss * 0.3, reads) for loss in (found, expected)]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("label", [5, -1, -99, 10**12, -(10**12)])
def test_loss_through_logits_of_a_label_outside_the_vocabulary(label: int) -> None:
    """NaN, as without logits: torch's own check would end the process on a device."""
    head, hidden = adapted_head(), torch.randn(3, 4, requires_grad=True)
    (weight,) = head.projection.parameters()
    total = head.total_loss(hidden, torch.tensor([0, label, IGNORED]))
    assert total.isnan()
    of_hidden, of_weight = torch.autograd.grad(total, (hidden, weight))
    assert of_hidden[1].isnan().all()
    assert of_weight.isnan().all()
    assert head.total_loss(hidden, torch.tensor([0, label, IGNORED]), detach=True).isnan()


def test_a_step_with_an_adapter_and_a_label_that_nobody_could_check(
    monkeypatch: pytest.MonkeyPatch, make_feeds: Any
) -> None:
    model = Decoder(ModelConfig(layers=1))
    model.head.register_module("projection", Doubled(model.head.projection))
    feeds = make_feeds()
    feeds["labels"][0, 0] = 256
    chunk = ModelChunk(model)
    with pytest.raises(ConfigError, match="labels"):
        train_step(chunk, [feeds])
    monkeypatch.setattr("overlap.model.feeds._on_host", lambda tensor: False)
    assert train_step(chunk, [feeds])[0]["loss"].isnan()


def test_loss_is_wide() -> None:
    head = Head(ModelConfig(hidden=4, vocab=5)).bfloat16()
    init_weights(head, 0)
    assert head.total_loss(torch.randn(3, 4).bfloat16(), torch.tensor([0, 1, 2])).dtype is torch.float32
