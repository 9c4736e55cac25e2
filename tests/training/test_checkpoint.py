"""Checkpoints: all that the next step depends on, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap import ModelChunk, train_step
from overlap.model import Decoder, ModelConfig, update_expert_bias
from overlap.training.checkpoint import FORMAT, load_checkpoint, save_checkpoint
from recompute import ConfigError

CONFIG = {"layers": 2, "seed": 0}


def make(seed: int = 0) -> tuple[ModelChunk, torch.optim.Optimizer]:
    chunk = ModelChunk(Decoder(ModelConfig(layers=2, hidden=16, vocab=32, dropout=0.1), seed=seed))
    return chunk, torch.optim.AdamW(chunk.parameters(), lr=1e-2)


def feeds(step: int) -> list[dict[str, Tensor]]:
    drawn = torch.randint(32, (2, 2, 2, 8), generator=torch.Generator().manual_seed(step))
    return [{"ids": ids, "labels": labels} for ids, labels in drawn]


def step(chunk: ModelChunk, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    losses = train_step(chunk, feeds(chunk.steps_done))
    optimizer.step()
    optimizer.zero_grad()
    update_expert_bias(chunk)
    return [mb["loss"] for mb in losses]


def test_the_next_step_is_the_uninterrupted_one(tmp_path: Path) -> None:
    chunk, optimizer = make()
    for _ in range(2):
        step(chunk, optimizer)
    save_checkpoint(tmp_path / "deep" / "saved.pt", chunk, optimizer, CONFIG)
    drawn = torch.rand(3)
    expected = step(chunk, optimizer)
    resumed, its_optimizer = make(seed=1)
    torch.rand(10)
    load_checkpoint(tmp_path / "deep" / "saved.pt", resumed, its_optimizer, CONFIG)
    assert resumed.steps_done == 2
    assert torch.equal(torch.rand(3), drawn)
    found = step(resumed, its_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    left, right = chunk.state_dict(), resumed.state_dict()
    assert left.keys() == right.keys()
    tensors = [name for name, value in left.items() if torch.is_tensor(value)]
    assert any(name.endswith("expert_bias") and left[name].any() for name in tensors)
    assert all(torch.equal(left[name], right[name]) for name in tensors)


@pytest.mark.parametrize("left_out", ["optimizer", "steps"])
def test_each_part_matters(left_out: str, tmp_path: Path) -> None:
    """Negative control: without moments, or without the step count that seeds the draws, the run goes elsewhere."""
    chunk, optimizer = make()
    for _ in range(2):
        step(chunk, optimizer)
    save_checkpoint(tmp_path / "saved.pt", chunk, optimizer, CONFIG)
    step(chunk, optimizer)
    resumed, its_optimizer = make()
    load_checkpoint(tmp_path / "saved.pt", resumed, its_optimizer, CONFIG)
    if left_out == "optimizer":
        its_optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    else:
        resumed.steps_done = 0
    step(resumed, its_optimizer)
    assert not all(torch.equal(a, b) for a, b in zip(chunk.parameters(), resumed.parameters(), strict=True))


def test_another_config_names_the_field(tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    save_checkpoint(path, *make(), CONFIG)
    chunk, optimizer = make(seed=1)
    before = {name: p.clone() for name, p in chunk.named_parameters()}
    for config, field in (
        ({**CONFIG, "layers": 3}, "layers"),
        ({**CONFIG, "more": 1}, "more"),
        ({"seed": 0}, "layers"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_checkpoint(path, chunk, optimizer, config)
        assert caught.value.field == field
        assert str(path) in caught.value.rule
    assert all(torch.equal(p, before[name]) for name, p in chunk.named_parameters())


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    rubbish, other = tmp_path / "rubbish.pt", tmp_path / "other.pt"
    rubbish.write_bytes(b"rubbish")
    torch.save({"format": FORMAT + 1}, other)
    for path, rule in ((rubbish, "of this program"), (other, "of format"), (tmp_path / "missing", "readable")):
        with pytest.raises(ConfigError, match=rule):
            load_checkpoint(path, *make(), CONFIG)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "saved.pt"
    save_checkpoint(path, *make(), CONFIG)
    before = path.read_bytes()

    def fail(payload: object, where: Path) -> None:
        Path(where).write_bytes(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        with pytest.raises(OSError, match="disk full"):
            save_checkpoint(path, *make(seed=1), CONFIG)
    assert path.read_bytes() == before
    save_checkpoint(path, *make(seed=1), CONFIG)
    assert path.read_bytes() != before
    assert [item.name for item in tmp_path.iterdir()] == ["saved.pt"]


def test_parts_that_are_missing_or_of_another_model(tmp_path: Path) -> None:
    path, parts = tmp_path / "saved.pt", tmp_path / "parts.pt"
    chunk, optimizer = make()
    save_checkpoint(path, chunk, optimizer, CONFIG)
    payload = torch.load(path)
    torch.save({name: payload[name] for name in ("format", "config", "model")}, parts)
    with pytest.raises(ConfigError, match="must be a checkpoint of format 1"):
        load_checkpoint(parts, chunk, optimizer, CONFIG)
    del payload["model"]["module.embedding"]
    torch.save(payload, parts)
    with pytest.raises(ConfigError, match="holds another model: other parameters or buffers"):
        load_checkpoint(parts, chunk, optimizer, CONFIG)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """Nothing is written beside it."""
    with pytest.raises(ConfigError, match=r"^save=.*: must be a file to write, not a folder"):
        save_checkpoint(tmp_path / ".", *make(), CONFIG)
    assert list(tmp_path.parent.glob("*.partial")) == []


def test_arguments(tmp_path: Path) -> None:
    chunk, optimizer = make()
    bad: list[tuple[Any, Any, str]] = [
        (tmp_path / "saved.pt", chunk.module, "must be a ModelChunk"), (str(tmp_path / "x"), chunk, "must be a Path")
    ]  # fmt: skip
    for path, model, rule in bad:
        for use in (save_checkpoint, load_checkpoint):
            with pytest.raises(ConfigError, match=rule):
                use(path, model, optimizer, CONFIG)
    assert list(tmp_path.iterdir()) == []
