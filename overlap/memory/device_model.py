"""DeviceModel: an accelerator as the planner sees it: peak rates and the share of them that real kernels reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

_GIGA = 1e9
_WIDE = frozenset({torch.float32, torch.float64})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """Rates of one device. Bytes and floating-point operations per second, counted in units of 10^9."""

    name: str
    tensor_gflops: float
    """Dense bfloat16 matrix products, peak."""
    wide_gflops: float
    """Float32 matrix products, peak."""
    memory_gbytes: float
    """Device memory, peak."""
    network_gbytes: float
    """All-to-all of a rank across hosts, each way, peak."""
    host_gbytes: float = 64.0
    """Between device and host memory, each way, peak: sixteen lanes of PCIe 5."""
    link_gbytes: float = 450.0
    """Between devices of one host, each way, peak: NVLink of the fourth generation."""
    matmul_share: float = 0.6
    """Of the peak, reached by matrix products."""
    memory_share: float = 0.75
    """Of the peak, reached by other kernels."""
    network_share: float = 0.8
    """Of the peak, reached by an all-to-all."""
    host_share: float = 0.8
    """Of the peak, reached by a copy to or from pinned host memory."""
    link_share: float = 0.8
    """Of the peak, reached by a gather within a host."""
    kernel_microseconds: float = 3.0
    """Least time of a kernel."""
    workspace: int = 81 * 2**20
    """Bytes that stay allocated beside tensors: workspaces, and parts of blocks that were not split. On one H200 the
    peaks of the memory benchmark exceed what tensors hold by 81 MiB (proxy-8) and 92 MiB (proxy-16), whatever the rule.
    """

    def milliseconds(self, flops: float, traffic: float, dtype: torch.dtype) -> float:
        """Of one kernel: the longer of arithmetic and memory traffic."""
        peak = self.wide_gflops if dtype in _WIDE else self.tensor_gflops
        seconds = max(
            flops / (peak * self.matmul_share * _GIGA),
            traffic / (self.memory_gbytes * self.memory_share * _GIGA),
            self.kernel_microseconds * 1e-6,
        )
        return seconds * 1e3

    def transfer_milliseconds(self, nbytes: float) -> float:
        """Of an all-to-all or a send that moves `nbytes` out of a rank."""
        return nbytes / (self.network_gbytes * self.network_share * _GIGA) * 1e3

    def copy_milliseconds(self, nbytes: float) -> float:
        """Of a copy to or from host memory."""
        return nbytes / (self.host_gbytes * self.host_share * _GIGA) * 1e3

    def gather_milliseconds(self, nbytes: float) -> float:
        """Of a gather within a host that brings `nbytes` from the others."""
        return nbytes / (self.link_gbytes * self.link_share * _GIGA) * 1e3

    def as_json(self) -> dict[str, float | str]:
        """All fields."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


DEVICES: Mapping[str, DeviceModel] = MappingProxyType({
    "h200": DeviceModel(
        name="h200", tensor_gflops=989e3, wide_gflops=67e3, memory_gbytes=4800.0, network_gbytes=50.0
    ),
    "h100": DeviceModel(
        name="h100", tensor_gflops=989e3, wide_gflops=67e3, memory_gbytes=3350.0, network_gbytes=50.0
    ),
})  # fmt: skip
"""Data-sheet peaks; 50 GB/s is one 400 Gb/s network card per device."""
