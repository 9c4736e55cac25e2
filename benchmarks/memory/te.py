"""The same cases with Transformer Engine's layers, in bf16 and in 8 bits, beside torch's."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.memory.cases import PROXIES, Case, Path, hidden
from benchmarks.memory.measure import DEVICE, Bench, Measured
from benchmarks.memory.turns import in_turns
from overlap.backends import load_backend
from overlap.model.fp8 import Fp8Config
from recompute import RecomputeConfig

ARMS: dict[str, tuple[str, Fp8Config | None]] = {
    "torch bf16": ("torch", None),
    "te bf16": ("te", None),
    "te fp8 block": ("te", Fp8Config(recipe="block")),  # type: ignore[arg-type]  # takes its text
    "te fp8 current": ("te", Fp8Config(recipe="current")),  # type: ignore[arg-type]
}


class BackendBench(Bench):
    """A model with a backend's layers.

    Args:
        proxy: Name of its shape.
        arm: One of ARMS.
    """

    def __init__(self, proxy: str, arm: str) -> None:
        super().__init__(proxy)
        name, fp8 = ARMS[arm]
        self.arm = arm
        load_backend(name, fp8).convert(self._model)
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)


def te() -> list[dict[str, Any]]:
    """Activation peaks and step times per proxy, arm and rule; then steps of all arms in turns."""
    results: list[Measured] = []
    for proxy in PROXIES:
        for arm in ARMS:
            bench = BackendBench(proxy, arm)
            for case in _cases(proxy):
                measured = bench.measure(case)
                results.append(replace(measured, name=f"{arm}, {measured.name}"))
                _report(results[-1])
            del bench
            gc.collect()
            torch.cuda.empty_cache()
        results += _in_turns(Case(proxy=proxy, recompute=RecomputeConfig.uniform(1)), tuple(ARMS))
    return [asdict(result) for result in results]


def te_light() -> list[dict[str, Any]]:
    """Uniform 1 with exposed and hidden replay, few steps; then torch's and its steps in bf16, in turns.

    Those as CUDA graphs too, which take the host's time out of the comparison: last, for what they record for, stays.
    """
    results: list[Measured] = []
    one = RecomputeConfig.uniform(1)
    attention = _torch_attention()
    for proxy in PROXIES:
        for arm in ("te bf16", "te fp8 block", "torch bf16"):
            bench = BackendBench(proxy, arm)
            for rule in (one, hidden(one)):
                with sdpa_kernel(attention):
                    measured = bench.measure(Case(proxy=proxy, recompute=rule), steps=2)
                results.append(replace(measured, name=f"{arm}, {measured.name}"))
                _report(results[-1])
            del bench
            gc.collect()
            torch.cuda.empty_cache()
    with sdpa_kernel(attention):
        for graph in (False, True):
            for proxy in PROXIES:
                results += _in_turns(Case(proxy=proxy, recompute=one, graph=graph), ("torch bf16", "te bf16"))
    print(f"torch's attention is by {attention.name}")
    return [asdict(result) for result in results]


def _torch_attention() -> SDPBackend:
    """The fastest of torch's own that runs here: beside another cuDNN than it was built with, that one may not."""
    query = torch.randn(1, 16, 256, 192, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    value = torch.randn(1, 16, 256, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.autograd.backward(F.scaled_dot_product_attention(query, query, value, is_causal=True).sum())
        torch.cuda.synchronize()
    except RuntimeError:
        return SDPBackend.EFFICIENT_ATTENTION
    return SDPBackend.CUDNN_ATTENTION


def _cases(proxy: str) -> list[Case]:
    one = RecomputeConfig.uniform(1)
    return [
        Case(proxy=proxy),
        Case(proxy=proxy, recompute=one, path=Path.CONTIGUOUS),
        Case(proxy=proxy, recompute=one),
        Case(proxy=proxy, recompute=hidden(one)),
        Case(proxy=proxy, recompute=one, order="single_queue", delay_wgrad=True),
        Case(proxy=proxy, recompute=RecomputeConfig.uniform(4)),
    ]


def _in_turns(case: Case, arms: Sequence[str]) -> list[Measured]:
    """Steps of several arms one after another, so that drift hits all alike; memory is not comparable."""
    benches = [BackendBench(case.proxy, arm) for arm in arms]
    results = in_turns([(f"in turns, {bench.arm}, {case.name}", bench.step_of(case)) for bench in benches])
    for result in results:
        _report(result)
    del benches
    gc.collect()
    torch.cuda.empty_cache()
    return results


def _report(result: Measured) -> None:
    line = f"{result.name:80s} peak {result.activation_peak:8.1f} MiB  reserved {result.reserved:8.0f}"
    print(f"{line}  step {result.step:8.1f} ms", flush=True)
