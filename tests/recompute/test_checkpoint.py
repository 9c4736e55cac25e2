"""checkpoint_layers(): plain autograd's numbers, with only segment inputs kept in between."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recompute import ConfigError, RecomputeConfig, RecomputeError, Replay, rng
from recompute.checkpoint import Draws, LayerResult, PlainLayer, Replayable, checkpoint_layers
from recompute.rng import default_generators, seeded, stage_seed

LAYERS, WIDTH = 5, 8
NONE = RecomputeConfig.none()
RULES = [
    RecomputeConfig.uniform(1),
    RecomputeConfig.uniform(2),
    RecomputeConfig.uniform(9),
    RecomputeConfig.block(3),
    RecomputeConfig.block(9),
]
Gradients = dict[str, Tensor | None]


class Block(nn.Module):
    """Residual product, optionally with dropout and BatchNorm."""

    def __init__(self, dropout: float = 0.0, *, norm: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.linear(self.norm(x))), self.dropout, self.training)


class Routed:
    """A layer that chooses a column per row and must not choose again: pins, an effect, two losses, a counter."""

    draws_rng = False
    state: Sequence[Tensor] = ()

    def __init__(self) -> None:
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.counted = torch.zeros(WIDTH)
        self.choices = 0
        self.effects = 0

    def parameters(self) -> Sequence[nn.Parameter]:
        return tuple(self.linear.parameters())

    def __call__(self, hidden: Tensor, pinned: Any) -> LayerResult:
        scores = self.linear(hidden)
        if pinned is None:
            pinned = scores.argmax(-1) if self.choices % 2 == 0 else scores.argmin(-1)
            self.choices += 1
        chosen = scores.gather(-1, pinned.unsqueeze(-1))

        def count() -> None:
            self.effects += 1
            self.counted += torch.bincount(pinned, minlength=WIDTH)

        losses = (scores.square().mean(), scores.logsumexp(-1).mean())
        return LayerResult(hidden=hidden + chosen.tanh(), losses=losses, pinned=pinned, effects=count)


def gradients_of(modules: Sequence[nn.Module]) -> Gradients:
    return {f"{i}.{name}": p.grad for i, module in enumerate(modules) for name, p in module.named_parameters()}


def same(expected: Gradients, found: Gradients) -> bool:
    """Bitwise, None and zero being different."""
    if expected.keys() != found.keys():
        return False
    pairs = [(value, found[name]) for name, value in expected.items()]
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def run_blocks(run: Callable[[list[Block], Tensor], Tensor], **settings: Any) -> tuple[Gradients, Tensor]:
    """Gradients of fresh blocks and of their input."""
    torch.manual_seed(0)
    blocks = [Block(**settings) for _ in range(LAYERS)]
    x = torch.randn(6, WIDTH, requires_grad=True)
    torch.manual_seed(1)
    run(blocks, x).square().sum().backward()
    state = {f"buffer {i} {n}": b for i, block in enumerate(blocks) for n, b in block.named_buffers()}
    return {**gradients_of(blocks), "input": x.grad, **state}, torch.get_rng_state()


def with_rule(rule: RecomputeConfig, **settings: Any) -> Callable[[list[Block], Tensor], Tensor]:
    def run(blocks: list[Block], x: Tensor) -> Tensor:
        layers = [
            PlainLayer(module=block, draws_rng=settings.get("draws_rng", False), state=tuple(block.buffers()))
            for block in blocks
        ]
        return checkpoint_layers(layers, x, rule, draws=settings.get("draws"))[0]

    return run


@pytest.mark.parametrize("rule", [NONE, *RULES], ids=str)
def test_equals_plain_autograd(rule: RecomputeConfig) -> None:
    expected, _ = run_blocks(lambda blocks, x: nn.Sequential(*blocks)(x))
    found, _ = run_blocks(with_rule(rule))
    assert len(expected) == 2 * LAYERS + 1
    assert same(expected, found)
    other, _ = run_blocks(lambda blocks, x: nn.Sequential(*blocks[::-1])(x))
    assert not same(expected, other), "the comparison sees another order of layers"


def seeded_plain(blocks: list[Block], x: Tensor) -> Tensor:
    """Plain autograd, each layer drawing from the seed of its place."""
    for number, block in enumerate(blocks):
        with seeded(stage_seed(3, 1, 2, number, "layer"), default_generators(x.device)):
            x = block(x)
    return x


@pytest.mark.parametrize("rule", [NONE, *RULES], ids=str)
def test_draws_are_those_of_the_first_pass(rule: RecomputeConfig) -> None:
    """Row 1: with dropout, gradients are plain autograd's with the same seeds; the live generator stays."""
    draws = Draws(run_seed=3, step=1, microbatch=2)
    expected, before = run_blocks(seeded_plain, dropout=0.3)
    found, after = run_blocks(with_rule(rule, draws_rng=True, draws=draws), dropout=0.3)
    assert same(expected, found)
    assert torch.equal(before, after)
    other, _ = run_blocks(with_rule(rule, draws_rng=True, draws=Draws(run_seed=4)), dropout=0.3)
    assert not same(expected, other)


def test_two_microbatches_in_flight_draw_their_own() -> None:
    """Row 3: the second forward runs between forward and backward of the first."""

    def gradients(rule: RecomputeConfig, microbatches: Sequence[int] = (0, 1)) -> Gradients:
        torch.manual_seed(0)
        blocks = [Block(0.3) for _ in range(LAYERS)]
        layers = [PlainLayer(module=block, draws_rng=True) for block in blocks]
        data = torch.randn(2, 6, WIDTH)
        outputs = [
            checkpoint_layers(layers, x, rule, draws=Draws(microbatch=mb))[0]
            for x, mb in zip(data, microbatches, strict=True)
        ]
        for output in outputs:
            output.square().sum().backward()
        return gradients_of(blocks)

    expected = gradients(NONE)
    for rule in RULES:
        assert same(expected, gradients(rule))
        assert not same(expected, gradients(rule, (0, 0)))


def test_a_layer_that_draws_and_does_not_say_so() -> None:
    """Row 1: refused where it would be replayed: the replay would draw anew, and gradients be of two masks."""
    expected, before = run_blocks(lambda blocks, x: nn.Sequential(*blocks)(x), dropout=0.3)
    found, after = run_blocks(with_rule(NONE), dropout=0.3)
    assert same(expected, found)
    assert torch.equal(before, after), "live draws, where nothing is replayed"
    for rule, number in ((RecomputeConfig.uniform(1), 0), (RecomputeConfig.block(3), 0)):
        with pytest.raises(RecomputeError, match=f"layer {number} drew random numbers, .*: set its draws_rng"):
            run_blocks(with_rule(rule), dropout=0.3)


def test_without_the_check_undeclared_draws_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 1: negative control of determinism: what the refusal above prevents."""
    monkeypatch.setattr(rng, "positions", lambda generators: ())
    expected, _ = run_blocks(with_rule(NONE), dropout=0.3)
    found, _ = run_blocks(with_rule(RecomputeConfig.uniform(1)), dropout=0.3)
    assert not same(expected, found)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_state_advances_once(rule: RecomputeConfig) -> None:
    """Row 14: running statistics of declared state."""
    expected, _ = run_blocks(lambda blocks, x: nn.Sequential(*blocks)(x), norm=True)
    found, _ = run_blocks(with_rule(rule), norm=True)
    assert same(expected, found)
    assert found["buffer 0 norm.num_batches_tracked"] == 1


def run_routed(rule: RecomputeConfig, *, losses: bool = True) -> tuple[list[Routed], Gradients]:
    torch.manual_seed(0)
    layers = [Routed() for _ in range(LAYERS)]
    hidden, found = checkpoint_layers(layers, torch.randn(6, WIDTH), rule)
    assert len(found) == 2 * LAYERS
    total = hidden.square().sum()
    (total + torch.stack(found).sum() if losses else total).backward()
    return layers, gradients_of([layer.linear for layer in layers])


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_effects_once_and_choices_pinned(rule: RecomputeConfig) -> None:
    """Rows 11, 12 and 17: one effect and one choice per layer, losses and gradients plain autograd's."""
    plain, expected = run_routed(NONE)
    layers, found = run_routed(rule)
    assert same(expected, found)
    assert [(layer.effects, layer.choices) for layer in layers] == [(1, 1)] * LAYERS
    assert all(torch.equal(a.counted, b.counted) for a, b in zip(plain, layers, strict=True))
    assert all(layer.counted.sum() == 6 for layer in layers)
    assert not same(expected, run_routed(rule, losses=False)[1])


class Forgetful(Routed):
    """Control: chooses again in the replay."""

    def __call__(self, hidden: Tensor, pinned: Any) -> LayerResult:
        return super().__call__(hidden, None)


def test_a_choice_made_again_is_seen() -> None:
    """Row 17: negative control."""

    def gradients(rule: RecomputeConfig) -> Gradients:
        torch.manual_seed(0)
        layers = [Forgetful() for _ in range(LAYERS)]
        hidden, _ = checkpoint_layers(layers, torch.randn(6, WIDTH), rule)
        hidden.square().sum().backward()
        return gradients_of([layer.linear for layer in layers])

    assert not same(gradients(NONE), gradients(RecomputeConfig.uniform(1)))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_an_unused_loss_gives_no_gradient(rule: RecomputeConfig) -> None:
    """A parameter that only an unused loss reaches has no gradient, rather than one of zeros."""

    class Side(Routed):
        def __call__(self, hidden: Tensor, pinned: Any) -> LayerResult:
            return LayerResult(hidden=hidden * 2, losses=(self.linear(hidden).sum(),))

    for config in (NONE, rule):
        layers: list[Replayable] = [PlainLayer(module=Block()), Side(), PlainLayer(module=Block())]
        hidden, _ = checkpoint_layers(layers, torch.randn(6, WIDTH), config)
        hidden.sum().backward()
        assert all(p.grad is None for p in layers[1].parameters())
        assert all(p.grad is not None for layer in (layers[0], layers[2]) for p in layer.parameters())


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_layer_may_hand_its_input_through(rule: RecomputeConfig) -> None:
    """Row 44: an output that is the input itself, or a view of it."""

    def gradient(config: RecomputeConfig, last: nn.Module) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(6, WIDTH, requires_grad=True)
        first = Block()
        hidden, _ = checkpoint_layers([PlainLayer(module=m) for m in (first, nn.Identity(), last)], x * 1, config)
        hidden.square().sum().backward()
        assert x.grad is not None
        return x.grad

    for last in (nn.Identity(), nn.Flatten(0)):
        assert torch.equal(gradient(NONE, last), gradient(rule, last))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_frozen_input_and_frozen_layers(rule: RecomputeConfig) -> None:
    """Row 20: only layers 1 and 3 train, and the input needs no gradient."""

    def gradients(config: RecomputeConfig) -> Gradients:
        torch.manual_seed(0)
        blocks = [Block().requires_grad_(i in (1, 3)) for i in range(LAYERS)]
        hidden, _ = checkpoint_layers([PlainLayer(module=b) for b in blocks], torch.randn(6, WIDTH), config)
        hidden.square().sum().backward()
        return gradients_of(blocks)

    expected, found = gradients(NONE), gradients(rule)
    assert same(expected, found)
    assert [name for name, g in found.items() if g is not None] == [
        "1.linear.weight", "1.linear.bias", "3.linear.weight", "3.linear.bias",
    ]  # fmt: skip


def test_no_gradients_means_no_replay() -> None:
    """Row 66: under no_grad, or with nothing to train, layers run once and the output needs no gradient."""
    for grad in (False, True):
        layers = [Routed() for _ in range(2)]
        if grad:
            for layer in layers:
                layer.linear.requires_grad_(False)
        with torch.set_grad_enabled(grad):
            hidden, _ = checkpoint_layers(layers, torch.randn(6, WIDTH), RecomputeConfig.uniform(1))
        assert not hidden.requires_grad
        assert [layer.effects for layer in layers] == [1, 1]


class Box:
    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (RecomputeConfig.uniform(1), 5),
        (RecomputeConfig.uniform(2), 3),
        (RecomputeConfig.uniform(9), 1),
        (RecomputeConfig.block(9), 5),
    ],
    ids=str,
)
def test_only_segment_inputs_are_kept(rule: RecomputeConfig, kept: int) -> None:
    """Between forward and backward one tensor per segment is saved, and intermediates are dead."""
    blocks = [Block() for _ in range(LAYERS)]
    saved: list[weakref.ref[Box]] = []
    inner: list[weakref.ref[Tensor]] = []

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor)
        saved.append(weakref.ref(box))
        return box

    for block in blocks:
        block.linear.register_forward_hook(lambda _m, _i, output: inner.append(weakref.ref(output)))
    x = torch.randn(6, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        hidden, _ = checkpoint_layers([PlainLayer(module=b) for b in blocks], x * 1, rule)
    assert len([ref for ref in saved if ref() is not None]) == kept
    assert len(inner) == LAYERS
    assert all(ref() is None for ref in inner)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        hidden.sum().backward()
    assert [ref for ref in saved if ref() is not None] == []
    assert len(saved) > kept + LAYERS
    plain: list[Box] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: plain.append(Box(t)), lambda box: box.tensor):
        nn.Sequential(*blocks)(x * 1)
    assert len(plain) > 2 * LAYERS, "plain autograd keeps more"


def test_one_segment_is_live_at_a_time() -> None:
    """The replay of a segment begins when the graph of the one behind it is gone."""
    blocks = [Block() for _ in range(LAYERS)]
    alive_at_replay: list[int] = []
    saved: list[weakref.ref[Box]] = []

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor)
        saved.append(weakref.ref(box))
        return box

    def begin(*_: object) -> None:
        if torch.is_grad_enabled():
            alive_at_replay.append(sum(ref() is not None for ref in saved))

    for block in blocks:
        block.register_forward_pre_hook(begin)
    hidden, _ = checkpoint_layers([PlainLayer(module=b) for b in blocks], torch.randn(6, WIDTH), RULES[0])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        hidden.sum().backward()
    assert alive_at_replay == [0] * LAYERS


def test_mtp_layers_are_their_own_segments() -> None:
    """Two decoder layers in one segment, two MTP depths alone: replays run one segment at a time."""
    order: list[int] = []
    blocks = [Block() for _ in range(4)]
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, number=number: order.append(number))
    layers = [PlainLayer(module=b) for b in blocks]
    hidden, _ = checkpoint_layers(layers, torch.randn(6, WIDTH), RecomputeConfig.uniform(2), num_mtp_layers=2)
    hidden.sum().backward()
    assert order == [0, 1, 2, 3, 3, 2, 0, 1]


def test_no_layers() -> None:
    x = torch.randn(3)
    hidden, losses = checkpoint_layers([], x, RecomputeConfig.uniform(1))
    assert hidden is x
    assert losses == []


def test_hidden_replay_is_refused() -> None:
    """R16: autograd replays one segment at a time here; the setting would have no effect."""
    config = RecomputeConfig.uniform(1, replay=Replay.HIDDEN)
    with pytest.raises(ConfigError, match="replay='hidden': has no effect without overlap"):
        checkpoint_layers([], torch.zeros(1), config)
