"""Checkpoints of several ranks: bitwise on the same layout and across layouts, and never half there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from overlap.chunk import ModelChunk
from overlap.model import Decoder, ModelConfig
from overlap.parallel.attach import DataSettings
from overlap.parallel.world import World
from overlap.training import sharded_checkpoint
from overlap.training.sharded_checkpoint import LATEST, latest_version, load_folder, publish, save_folder
from overlap.training.trainer import Trainer
from overlap.verify import compare
from recompute import ConfigError
from tests.distributed.ranks import RankPool
from tests.parallel.models import experts_of_all, feeds_of, parallel_chunk, whole, world_of

CONFIG: dict[str, object] = {"layers": 3, "widths": ()}
FSDP, REPLICAS = DataSettings(fsdp=True), DataSettings()
Whole = dict[str, Tensor]


def trainer_of(world: World, data: DataSettings, model: dict[str, Any] | None = None) -> Trainer:
    chunk = parallel_chunk(world, data, model)
    return Trainer(chunk, lambda step: feeds_of(world.rank, 2, step))


def everything(trainer: Trainer) -> Whole:
    """All weights, buffers and optimizer state, put together from all ranks."""
    chunk = trainer.chunk
    found: dict[str, Tensor | None] = dict(chunk.module.state_dict())
    for name, parameter in chunk.module.named_parameters():
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            found[f"{key} of {name}" if key == "step" else f"{name} {key}"] = value
    return experts_of_all(chunk, whole(found, chunk.world))


def interrupted(folder: str, size_of: tuple[int, bool], then: tuple[int, bool]) -> tuple[Any, ...]:
    """Two steps, saved, and one more; against a run on another layout that goes on from there."""
    (ep, fsdp), (other_ep, other_fsdp) = size_of, then
    first = trainer_of(world_of(ep=ep), DataSettings(fsdp=fsdp), {"layers": 2})
    for _ in range(2):
        first.step()
    save_folder(Path(folder), first.chunk, first.optimizer, CONFIG)
    saved = everything(first)
    second = trainer_of(world_of(ep=other_ep), DataSettings(fsdp=other_fsdp), {"layers": 2})
    second.step()
    load_folder(Path(folder), second.chunk, second.optimizer, CONFIG)
    loaded = everything(second)
    assert second.chunk.steps_done == 2
    first.step()
    second.step()
    after = compare(everything(first), everything(second))
    return compare(saved, loaded), after, len(saved)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("size", "saved", "resumed"),
    [
        (2, (1, True), (1, True)),
        (2, (1, False), (1, True)),
        (2, (1, True), (2, True)),
        (2, (2, False), (1, False)),
        (4, (2, True), (4, True)),
        (4, (4, False), (2, True)),
    ],
)
def test_a_run_resumes_on_this_and_another_layout(
    ranks: RankPool, tmp_path: Path, size: int, saved: tuple[int, bool], resumed: tuple[int, bool]
) -> None:
    for loaded, after, count in ranks(size, interrupted, str(tmp_path / "run"), saved, resumed):
        assert loaded.different == ()
        assert loaded.compared == count >= 100
        if saved == resumed:
            assert after.different == ()


def frozen(folder: str) -> tuple[str, ...]:
    """A parameter without optimizer state."""
    pair = [trainer_of(world_of(), data) for data in (FSDP, REPLICAS)]
    for trainer in pair:
        trainer.chunk.module.get_parameter("layers.0.attn.norm.weight").requires_grad_(False)
    pair[0].step()
    save_folder(Path(folder), pair[0].chunk, pair[0].optimizer, CONFIG)
    load_folder(Path(folder), pair[1].chunk, pair[1].optimizer, CONFIG)
    return compare(everything(pair[0]), everything(pair[1])).different


@pytest.mark.distributed
def test_frozen_parameters_have_no_optimizer_state(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, frozen, str(tmp_path / "run")) == [(), ()]


def save_then_crash(folder: str, where: str) -> None:
    """A second save stops: on rank 1 while it writes, or on rank 0 just before the new version is named."""
    world = world_of(seconds=2.0)
    trainer = trainer_of(world, FSDP)
    trainer.step()
    save_folder(Path(folder), trainer.chunk, trainer.optimizer, CONFIG)
    saved = everything(trainer)
    if world.rank == 0:
        torch.save(saved, Path(folder, "wanted"))
    trainer.step()

    def stop(path: Path, version: str) -> None:
        raise OSError("disk full")

    def half(tensors: Any, *, checkpoint_id: Path, no_dist: bool) -> None:
        checkpoint_id.mkdir(exist_ok=True)
        Path(checkpoint_id, f"__{world.rank}_0.distcp").write_bytes(b"half")
        if world.rank == 1:
            stop(checkpoint_id, "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_checkpoint, *(("save", half) if where == "writing" else ("publish", stop)))
        if where == "writing":
            # the real one waits for all ranks before it returns
            patch.setattr(sharded_checkpoint, "publish", lambda path, version: dist.barrier())
        save_folder(Path(folder), trainer.chunk, trainer.optimizer, CONFIG)


def load_again(folder: str) -> tuple[tuple[str, ...], str]:
    """What differs from the first save; and the name of the version that a third save makes."""
    trainer = trainer_of(world_of(), REPLICAS)
    load_folder(Path(folder), trainer.chunk, trainer.optimizer, CONFIG)
    wanted = torch.load(Path(folder, "wanted"))
    different = compare(wanted, everything(trainer)).different
    trainer.step()
    save_folder(Path(folder), trainer.chunk, trainer.optimizer, CONFIG)
    return different, latest_version(Path(folder)).name


@pytest.mark.distributed
@pytest.mark.parametrize("where", ["writing", "naming"])
def test_a_save_that_stops_leaves_the_version_before(ranks: RankPool, tmp_path: Path, where: str) -> None:
    outcome = ranks.outcome(2, save_then_crash, str(tmp_path), where, timeout=2.0, limit=30.0)
    assert len(outcome.failures) == 2
    assert any(failure.message == "disk full" for failure in outcome.failures.values())
    assert latest_version(tmp_path).name == "step-1.0"
    assert (tmp_path / "step-2.0").is_dir()
    # what the failed save left is neither read nor written into, and removed by the next one
    assert ranks(2, load_again, str(tmp_path)) == [((), "step-2.1")] * 2
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-2.1"]


def test_a_version_is_named_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("step-1.0", "step-2.0"):
        (tmp_path / name).mkdir()
    publish(tmp_path, "step-1.0")
    assert not (tmp_path / "step-2.0").exists()
    (tmp_path / "step-2.0").mkdir()

    def crash(*_: Any) -> None:
        raise OSError("killed")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="killed"):
        publish(tmp_path, "step-2.0")
    assert latest_version(tmp_path) == tmp_path / "step-1.0"
    assert (tmp_path / "step-1.0").is_dir()


def refusals(folder: str) -> list[str]:
    world = world_of()
    trainer = trainer_of(world, FSDP)
    trainer.step()
    save_folder(Path(folder), trainer.chunk, trainer.optimizer, CONFIG)
    other = trainer_of(world, FSDP, {"layers": 2})
    found = []
    for one, config, path in (
        (trainer, {**CONFIG, "layers": 4}, folder),
        (other, CONFIG, folder),
        (trainer, CONFIG, folder + "-missing"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_folder(Path(path), one.chunk, one.optimizer, config)
        found.append(str(caught.value))
    run = Path(latest_version(Path(folder)), "run.json")
    dist.barrier()
    if world.rank == 0:
        run.write_text(json.dumps({"format": 1}))
    dist.barrier()
    with pytest.raises(ConfigError) as caught:
        load_folder(Path(folder), trainer.chunk, trainer.optimizer, CONFIG)
    return [*found, str(caught.value)]


@pytest.mark.distributed
def test_other_runs_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    for layers, model, missing, version in ranks(2, refusals, str(tmp_path / "run")):
        assert "layers=4" in layers
        assert "made with layers=3" in layers
        assert "holds another model: model.layers.2." in model
        assert "must be a folder with a complete checkpoint" in missing
        assert "format 2" in version


@pytest.mark.parametrize("text", ["", "no json", "[1]", "null", None])
def test_a_version_that_says_nothing_of_its_run(text: str | None, tmp_path: Path) -> None:
    chunk = ModelChunk(Decoder(ModelConfig(layers=1)))
    (tmp_path / LATEST).write_text("step-1")
    (tmp_path / "step-1").mkdir()
    if text is not None:
        (tmp_path / "step-1" / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^resume=.*: must be a (folder with a complete )?checkpoint"):
        load_folder(tmp_path, chunk, torch.optim.AdamW(chunk.parameters()), {})
