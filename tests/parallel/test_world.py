from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from overlap.parallel.layout import ParallelLayout
from overlap.parallel.world import SOLO, close_world, launched_processes, open_world
from recompute.errors import ConfigError
from tests.distributed.ranks import RankPool


def members() -> dict[str, list[int]]:
    layout = ParallelLayout(world_size=4, ep=2)
    world = open_world(layout, timeout=timedelta(seconds=20))
    groups = world.formed
    found = {
        name: dist.get_process_group_ranks(group)
        for name, group in (
            ("ep", world.ep_group),
            ("data", world.data_group),
            ("expert_data", world.expert_data_group),
            ("pp", groups.pp),
            ("mesh_ep", world.mesh.get_group("ep")),
            ("mesh_expert_data", world.mesh.get_group("expert_data")),
            ("data_mesh", groups.data_mesh.get_group("data")),
        )
    }
    total = torch.tensor(world.rank)
    dist.all_reduce(total, group=world.expert_data_group)
    close_world()
    return {**found, "sum": [int(total)]}


@pytest.mark.distributed
def test_groups_and_meshes_agree_with_the_layout(ranks: RankPool) -> None:
    found = ranks(4, members)
    for rank, groups in enumerate(found):
        peers, replicas = ([0, 1], [2, 3])[rank // 2], ([0, 2], [1, 3])[rank % 2]
        assert groups == {
            "ep": peers, "mesh_ep": peers, "data": [0, 1, 2, 3], "data_mesh": [0, 1, 2, 3], "pp": [rank],
            "expert_data": replicas, "mesh_expert_data": replicas, "sum": [sum(replicas)],
        }  # fmt: skip


def test_alone_there_is_no_group() -> None:
    assert (SOLO.size, SOLO.rank, SOLO.data_rank, SOLO.groups) == (1, 0, 0, None)
    with pytest.raises(RuntimeError, match="no process group"):
        _ = SOLO.ep_group
    close_world()


def test_a_layout_for_other_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="the launcher started 2 processes"):
        open_world(ParallelLayout(world_size=4))
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        launched_processes()


@pytest.mark.parametrize(("backend", "rule"), [("nccl", "serves CUDA devices only"), ("mpi", "must be one of")])
def test_a_backend_that_cannot_serve_is_refused(backend: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        open_world(ParallelLayout(), backend=backend)
