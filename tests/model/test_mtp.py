"""Multi-token prediction: targets on hand-written sequences, a depth against its formulas, losses and their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from overlap.ir import Program
from overlap.model import Decoder
from overlap.model.head import IGNORED, derived_labels, labels_ahead
from overlap.model.mtp import MTPDepth, MTPEntry
from overlap.model.sequences import Sequences
from tests.mtp.tools import LENGTH, feeds_for, tiny

Run = Callable[[Program, dict[str, Tensor]], dict[str, Any]]
X = IGNORED
IDS = torch.tensor([[11, 12, 13, 14, 15, 16, 17, 18]])
LABELS = torch.tensor([[12, 13, 14, 15, 16, 17, 18, 19]])
PACKED = Sequences(cu_seqlens=torch.tensor([0, 5, 8]))
PADDED = Sequences(padding_mask=torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]], dtype=torch.bool))


@pytest.mark.parametrize(
    ("sequences", "labels", "depth", "targets"),
    [
        # depth d at slot i predicts id[i + d + 1]: the label d places ahead
        (Sequences(), LABELS, 1, [13, 14, 15, 16, 17, 18, 19, X]),
        (Sequences(), LABELS, 3, [15, 16, 17, 18, 19, X, X, X]),
        (PACKED, torch.tensor([[12, 13, 14, 15, X, 17, 18, X]]), 1, [13, 14, 15, X, X, 18, X, X]),
        (PACKED, torch.tensor([[12, 13, 14, 15, X, 17, 18, X]]), 2, [14, 15, X, X, X, X, X, X]),
        (PADDED, torch.tensor([[12, 13, 14, 15, X, X, X, X]]), 2, [14, 15, X, X, X, X, X, X]),
    ],
)
def test_targets(sequences: Sequences, labels: Tensor, depth: int, targets: list[int]) -> None:
    assert labels_ahead(labels, sequences, depth).tolist() == [targets]


@pytest.mark.parametrize(
    ("sequences", "targets"),
    [
        (Sequences(), [12, 13, 14, 15, 16, 17, 18, X]),
        (PACKED, [12, 13, 14, 15, X, 17, 18, X]),
        (PADDED, [12, 13, 14, 15, X, X, X, X]),
    ],
)
def test_targets_without_labels(sequences: Sequences, targets: list[int]) -> None:
    assert derived_labels(IDS, sequences).tolist() == [targets]


def test_padding_in_front_carries_no_loss() -> None:
    front = Sequences(padding_mask=torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0]], dtype=torch.bool))
    labels = derived_labels(IDS, front)
    assert labels.tolist() == [[X, X, 14, 15, 16, 17, 18, X]]
    assert labels_ahead(labels, front, 1).tolist() == [[X, X, 15, 16, 17, 18, X, X]]


@pytest.mark.parametrize("mhc", [None, 2])
@pytest.mark.parametrize("depth", [1, 3])
def test_entry_equals_the_formula(mhc: int | None, depth: int) -> None:
    """Norm both, project side by side (embedding first) or each by itself; tokens are those `depth` places ahead."""
    model = Decoder(tiny(mtp=3, mhc=mhc, dtype="float64"))
    module = model.mtp[0]
    assert isinstance(module, MTPDepth)
    state = torch.randn(1, LENGTH, *((mhc,) if mhc else ()), 16, dtype=torch.float64)
    joined, _ = MTPEntry(module, depth, torch.nn.Identity())(state, IDS, model.embedding)

    def normed(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    for s in range(LENGTH):
        token = int(IDS[0, s + depth]) if s + depth < LENGTH else 0
        e = normed(model.embedding[token])
        h = normed(state[0, s])
        if mhc:
            own = {name: p for name, p in module.join.named_parameters() if "projection" in name}
            expected = own["token_projection.weight"] @ e + h @ own["hidden_projection.weight"].T
        else:
            expected = module.get_parameter("join.projection.weight") @ torch.cat((e, h))
        torch.testing.assert_close(joined[0, s], expected)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("settings", [{}, {"mhc": 2}, {"tied": True}, {"mtp_repeat": True}, {"packed": True}])
def test_losses_equal_the_formula(per_token: bool, settings: dict[str, Any], run_program: Run) -> None:
    """Lambda / D * mean over a depth's own targets; per token: times the tokens of the main loss."""
    config = tiny(mtp=2, per_token_loss=per_token, dtype="float64", mtp_scale=0.3, **settings)
    model = Decoder(config)
    program = model.program()
    weights = {loss.value: loss.weight for loss in program.losses}
    assert {name: weights[name] for name in ("loss", "mtp1_loss", "mtp2_loss")} == {
        "loss": 1.0, "mtp1_loss": 0.15, "mtp2_loss": 0.15,
    }  # fmt: skip
    (feeds,) = feeds_for(config, 1)
    values = run_program(program, dict(feeds))
    matrix = model.embedding if config.tied else model.get_parameter("head.projection.weight")
    sequences = Sequences(cu_seqlens=feeds.get("cu_seqlens"))
    for depth in (1, 2):
        logits = values[f"{config.layers + depth - 1}.output"] @ matrix.T
        targets = labels_ahead(feeds["labels"], sequences, depth)
        mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=X)
        factor = (feeds["labels"] != X).sum() if per_token else 1
        torch.testing.assert_close(values[f"mtp{depth}_loss"], mean * factor)


def test_a_depth_without_targets_has_no_loss(run_program: Run) -> None:
    config = tiny(mtp=2, packed=True)
    ends = torch.arange(0, LENGTH + 1, 2)
    feeds = {
        "ids": IDS, "labels": torch.tensor([[12, X, 14, X, 16, X, 18, X]]), "cu_seqlens": ends,
        "positions": torch.tensor([[0, 1] * 4]),
    }  # fmt: skip
    values = run_program(Decoder(config).program(), feeds)
    assert values["mtp1_loss"] == 0
    assert values["mtp2_loss"] == 0


def test_without_streams_depth_one_starts_from_the_final_norm(run_program: Run) -> None:
    """Section 4.2: h_0 is the final-normed output of the decoder; with streams it is the streams."""
    model = Decoder(tiny(mtp=1, dtype="float64"))
    values = run_program(model.program(), dict(feeds_for(model.config, 1)[0]))
    with torch.no_grad():
        model.head.norm.weight.mul_(2).add_(torch.randn(16, dtype=torch.float64))
    again = run_program(model.program(), dict(feeds_for(model.config, 1)[0]))
    assert torch.equal(values["1.hidden"], again["1.hidden"])
    assert not torch.equal(values["2.output"], again["2.output"])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mhc", [None, 2])
@pytest.mark.parametrize("repeat", [False, True])
def test_detached_depths_train_themselves_alone(tied: bool, mhc: int | None, repeat: bool, run_program: Run) -> None:
    config = tiny(mtp=2, mhc=mhc, mtp_detach=True, tied=tied, mtp_repeat=repeat)
    model = Decoder(config)
    values = run_program(model.program(), dict(feeds_for(config, 1)[0]))
    torch.stack([values["mtp1_loss"], values["mtp2_loss"]]).sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert trained == {name for name in trained if name.startswith("mtp.")}
    assert {name for name, p in model.named_parameters() if name.startswith("mtp.") and "router" not in name} <= {
        name for name, p in model.named_parameters() if p.grad is not None
    }
    # each depth trains itself, not the one before
    if not repeat:
        fresh = Decoder(config)
        run_program(fresh.program(), dict(feeds_for(config, 1)[0]))["mtp2_loss"].backward()
        assert all(
            p.grad is None or not p.grad.any() for name, p in fresh.named_parameters() if name.startswith("mtp.0")
        )


def test_widths_and_dense_depths() -> None:
    model = Decoder(tiny(mtp=2, mtp_dense=True, mtp_widths=(4, 12)))
    shapes = [model.get_parameter(f"mtp.{depth}.layer.ffn.down.weight").shape for depth in range(2)]
    assert shapes == [(16, 4), (16, 12)]
    assert len(Decoder(tiny(mtp=3, mtp_repeat=True)).mtp) == 1
    assert [s.name for s in model.program().layer_stages[2]] == ["attn", "experts", "post", "mtp_post"]


def test_final_norm_in_a_chunk_without_decoder_layers(run_program: Run) -> None:
    """Row B28: the norm is applied once to the embedding itself, whether or not there are depths."""
    for mtp in (0, 1):
        model = Decoder(tiny(layers=0, mtp=mtp, dtype="float64"))
        (feeds,) = feeds_for(model.config, 1)
        hidden = model.embedding[feeds["ids"]]
        normed = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        logits = normed @ model.get_parameter("head.projection.weight").T
        expected = F.cross_entropy(logits.flatten(0, 1), feeds["labels"].flatten())
        torch.testing.assert_close(run_program(model.program(), dict(feeds))["loss"], expected)


@pytest.mark.parametrize("dense", [0, 1, 2])
@pytest.mark.parametrize("mtp", [0, 1])
def test_the_head_gets_one_stream(dense: int, mtp: int, run_program: Run) -> None:
    """Row B23: also where the last decoder layer is dense."""
    model = Decoder(tiny(mhc=3, dense_layers=dense, mtp=mtp))
    shapes: list[torch.Size] = []
    model.head.norm.register_forward_hook(lambda module, args, out: shapes.append(args[0].shape))
    values = run_program(model.program(), dict(feeds_for(model.config, 1)[0]))
    assert shapes == [(2, LENGTH, 16)]
    assert values["1.hidden"].shape == (2, LENGTH, 3, 16)
    if mtp:
        assert values["2.output"].shape == (2, LENGTH, 16)
