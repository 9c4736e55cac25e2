"""Replay is decided by what trains, not by the input's flag: a frozen embedding still trains adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap import ModelChunk, Program, ProgramBuilder, reference_step, train_step
from overlap.contiguous import contiguous_step
from overlap.model import Decoder, Linear
from recompute import RecomputeConfig
from recompute.checkpoint import PlainLayer, checkpoint_layers
from tests.cases.model import NONE, B, U, Watcher, different, m0, make_feeds, run

RULES = [U(1), U(2), B(1), NONE]
WIDTH, RANK = 16, 2


class Adapted(nn.Module):
    """A frozen weight with a trainable update of rank 2."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.base = nn.Parameter(weight, requires_grad=False)
        self.down = nn.Parameter(torch.randn(RANK, weight.shape[1]) / 4)
        self.up = nn.Parameter(torch.randn(weight.shape[0], RANK) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base) + F.linear(F.linear(x, self.down), self.up)


class AdaptedModel(nn.Module):
    """Frozen embedding, layers of one adapted product, frozen head; written with ProgramBuilder."""

    def __init__(self, layers: int = 4, vocab: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(vocab, WIDTH), requires_grad=False)
        self.layers = nn.ModuleList(Adapted(torch.randn(WIDTH, WIDTH) / 4) for _ in range(layers))

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding)

    def post(self, update: Tensor, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(update)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(hidden.flatten(0, 1) @ self.embedding.t(), labels.flatten())

    def program(self) -> Program:
        b = ProgramBuilder()
        ids, labels = b.input("ids"), b.input("labels")
        (hidden,) = b.compute("embed", self.embed, ids, outputs=("embedded",), parameters=(self.embedding,))
        for index, layer in enumerate(self.layers):
            with b.layer(index):
                (update,) = b.compute("attn", layer, hidden, outputs=("update",), parameters=layer.parameters())
                (hidden,) = b.compute("post", self.post, update, hidden, outputs=("hidden",))
        # The frozen embedding is read twice; only one stage may declare a parameter, and this use is frozen too.
        (loss,) = b.compute("head", self.loss, hidden, labels, outputs=("loss",))
        b.loss(loss)
        return b.build()


class PlainBlock(nn.Module):
    """One layer of AdaptedModel as a module."""

    def __init__(self, model: AdaptedModel, index: int) -> None:
        super().__init__()
        self.layer, self._post = model.layers[index], model.post

    def forward(self, hidden: Tensor) -> Tensor:
        return self._post(self.layer(hidden), hidden)


def adapted_m0() -> Decoder:
    """M0 whose every weight is frozen, with an adapter on every product outside the grouped experts."""
    model = Decoder(m0())
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear):
                setattr(module, name, Adapted(child.weight.detach()))
    return model


def assert_only_adapters_train(gradients: dict[str, Tensor | None]) -> None:
    for name, gradient in gradients.items():
        if name.endswith((".down", ".up")) and "experts" not in name:
            assert gradient is not None, name
            assert gradient.ne(0).any(), name
        else:
            assert gradient is None, name


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("build", [AdaptedModel, adapted_m0])
def test_adapters_train(build: Callable[[], nn.Module], rule: RecomputeConfig) -> None:
    """Row 20: adapters of every layer, the first included, get the reference's gradient; nothing frozen gets one."""
    torch.manual_seed(3)
    chunk, feeds = ModelChunk(build(), recompute=rule), make_feeds(1)
    expected = run(chunk, feeds, reference_step)
    assert_only_adapters_train(expected.gradients)
    watcher = Watcher()
    assert different(expected, run(chunk, feeds, observers=(watcher,))) == []
    layers = {segment.first for segment in chunk.planner.side(rule, chunk.program.trained()).segments}
    assert layers <= set(watcher.replayed_layers(0))
    assert different(expected, run(chunk, feeds, contiguous_step)) == []


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_adapters_train_with_checkpoint_layers(rule: RecomputeConfig) -> None:
    """Row 20: the same through checkpoint_layers(): its input needs no gradient, the adapters do."""
    torch.manual_seed(3)
    model = AdaptedModel()
    (feeds,) = make_feeds(1)

    def gradients(forward: Callable[[Sequence[nn.Module], Tensor], Tensor]) -> dict[str, Tensor | None]:
        model.zero_grad()
        hidden = model.embed(feeds["ids"])
        assert not hidden.requires_grad
        model.loss(forward([PlainBlock(model, i) for i in range(4)], hidden), feeds["labels"]).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    expected = gradients(lambda layers, hidden: nn.Sequential(*layers)(hidden))
    assert_only_adapters_train(expected)
    found = gradients(
        lambda layers, hidden: checkpoint_layers([PlainLayer(module=layer) for layer in layers], hidden, rule)[0]
    )
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        other = found[name]
        assert (other is None) == (gradient is None)
        assert gradient is None or (other is not None and torch.equal(gradient, other)), name


def test_nothing_trains() -> None:
    """Row 20: the other side: with no trainable parameter nothing is replayed and no gradient appears."""
    chunk, watcher = ModelChunk(AdaptedModel().requires_grad_(False), recompute=U(1)), Watcher()
    train_step(chunk, make_feeds(1), observers=(watcher,))
    assert watcher.replayed_layers(0) == []
    assert all(p.grad is None for p in chunk.parameters())


def test_layers_before_the_first_trainable_one_are_not_replayed() -> None:
    """Row 20: replay begins where training does."""
    model = AdaptedModel()
    for layer in (0, 1):
        model.layers[layer].requires_grad_(False)
    chunk, feeds, watcher = ModelChunk(model, recompute=U(1)), make_feeds(1), Watcher()
    assert different(run(chunk, feeds, reference_step), run(chunk, feeds, observers=(watcher,))) == []
    assert watcher.replayed_layers(0) == [3, 2]
