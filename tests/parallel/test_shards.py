"""Parameters apart by how they lie over ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from overlap.parallel.shards import laid_out, local, parameter_groups
from tests.pipelining.models import alone


def test_parameters_of_one_mesh_and_placement_are_a_group() -> None:
    with alone():
        mesh = init_device_mesh("cpu", (1,))
        module = nn.ParameterDict({"plain": nn.Parameter(torch.zeros(2))})
        for name, placement in (("a", Shard(0)), ("b", Replicate()), ("c", Shard(0)), ("d", Shard(1))):
            module[name] = nn.Parameter(DTensor.from_local(torch.zeros(2, 2), mesh, [placement]))
        groups = [[id(p) for p in group["params"]] for group in parameter_groups(module)]
        wanted = [["plain"], ["a", "c"], ["b"], ["d"]]
        assert sorted(groups) == sorted([[id(module[name]) for name in names] for names in wanted])
        part = local(module["a"])
        assert type(part) is torch.Tensor
        again = laid_out(part, module["a"])
        assert isinstance(again, DTensor)
        assert again.placements == (Shard(0),)
        assert laid_out(part, module["plain"]) is part
