"""Which parameters expert parallelism splits: they are replicated over other ranks than the dense ones."""

from __future__ import annotations

from torch import nn

from overlap.model.experts import GroupedExperts


def expert_parameters(module: nn.Module) -> frozenset[int]:
    """The ids of the parameters of which each rank of an expert group holds another part."""
    return frozenset(id(p) for m in module.modules() if isinstance(m, GroupedExperts) for p in m.parameters())
