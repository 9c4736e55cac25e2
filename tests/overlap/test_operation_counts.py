"""How many operations a MoE layer's slots issue: short kernels are bound by the host, so no operation may creep in.

On fake tensors, with a device's kernels in place of torch's compositions: each kernel, product or view counts as one.
A number here may fall at any time. If it rises, a step on a device becomes slower by what the host does for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overlap import ModelChunk, train_step
from overlap.engine import MicrobatchState
from overlap.lower import Issue
from overlap.memory import fake_chunk
from overlap.model import Decoder, ModelConfig
from overlap.planning.device_kernels import DeviceKernels
from recompute import RecomputeConfig

SHAPE: dict[str, Any] = {
    "layers": 2, "hidden": 64, "heads": 2, "q_rank": 32, "kv_rank": 32, "nope_dim": 16, "rope_dim": 16,
    "value_dim": 16, "experts": 8, "topk": 4, "expert_width": 32, "shared_width": 0, "vocab": 64, "max_seq": 64,
    "dtype": "bfloat16",
}  # fmt: skip
MICROBATCHES = 3
KERNELS = ("grouped", "latent_heads", "permute", "scores", "swiglu")
"""Modules that launch kernels of our own."""
Found = Mapping[str, Counter[str]]


class Counting(TorchDispatchMode):
    """Counts what runs between before() and after(), by slot kind and stage."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Counter[str]] = {}
        self._now: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # what fake tensors ask about each other is no operation
        if func.namespace != "prim":
            self.ran("view" if func.is_view else str(func.overloadpacket))
        return func(*args, **(kwargs or {}))

    def ran(self, name: str) -> None:
        self._now[name] += 1

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        """An issue begins."""
        layer = "" if issue.stage.layer is None else str(issue.stage.layer)
        self._now = self.found.setdefault(f"{issue.slot.op.value} {layer} {issue.stage.name}", Counter())

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        """It has ended."""
        self._now = Counter()


class Kernels:
    """Stands for a kernel module: its kernels write nothing, and count."""

    def __init__(self, counting: Counting) -> None:
        self._counting = counting

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self._counting.ran(f"kernel {name}")


@pytest.fixture(scope="module")
def found() -> Found:
    """Of each slot kind and stage of the first layer, the operations of one slot."""
    counting = Counting()
    stub = Kernels(counting)
    with pytest.MonkeyPatch.context() as patch:
        for question in ("_direct", "_device_kernel"):
            patch.setattr(import_module("overlap.model.grouped"), question, lambda *args: True)
        for name in KERNELS:
            patch.setattr(import_module(f"overlap.model.{name}"), "kernels", lambda name: stub)
        build = lambda: ModelChunk(Decoder(ModelConfig(**SHAPE)), recompute=RecomputeConfig.uniform(1))  # noqa: E731
        with fake_chunk(build) as chunk, DeviceKernels():
            chunk.checked = True
            ids = torch.zeros(MICROBATCHES, 1, 64, dtype=torch.int64)
            with counting:
                train_step(chunk, [{"ids": one, "labels": one} for one in ids], observers=(counting,))
    assert all(total % MICROBATCHES == 0 for counter in counting.found.values() for total in counter.values())
    return {
        slot: Counter({name: total // MICROBATCHES for name, total in counter.items()})
        for slot, counter in counting.found.items()
    }


COUNTS = {
    "N 0 attn": (40, 31),
    "N 0 dispatch": (0, 2),
    "N 0 experts": (4, 2),
    "N 0 combine": (0, 1),
    "N 0 post": (3, 2),
    "R 0 attn": (26, 32),
    "R 0 dispatch": (0, 2),
    "R 0 experts": (4, 5),
    "B 0 post": (2, 1),
    "B 0 combine": (0, 0),
    "B 0 experts": (6, 6),
    "B 0 dispatch": (0, 0),
    "B 0 attn": (49, 21),
}
"""Operations that launch or allocate, and views."""


@pytest.mark.parametrize("slot", COUNTS)
def test_operations_of_a_slot(slot: str, found: Found) -> None:
    counter = found[slot]
    assert (counter.total() - counter["view"], counter["view"]) == COUNTS[slot], counter


def test_every_slot_of_a_layer_is_counted(found: Found) -> None:
    assert {slot for slot in found if " 0 " in slot} == set(COUNTS)


def test_what_the_choice_of_experts_decides_is_computed_with_it(found: Found) -> None:
    """Where each expert's rows end, and the token of each row: by the first pass, and by no product or gather."""
    derived = {"aten.searchsorted", "aten.cumsum", "aten.sort", "aten.scatter_", "aten.floor_divide"}
    assert {slot for slot, counter in found.items() if derived & set(counter)} == {"N 0 attn", "N 1 attn"}
