"""Try every piece of the Transformer Engine backend by itself and print what fails, with its traceback; goes on after.

Run before the tests, on a GPU: `python tests/gpu/te_probe.py`. Exit status: how many sections failed.
"""

from __future__ import annotations

import copy
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap import ModelChunk, get_order
from overlap.backends import load_backend
from overlap.check import same_bits
from overlap.dispatch import make_routing
from overlap.model import Decoder, GroupedExperts, ModelConfig
from overlap.model.fp8 import Fp8Config
from overlap.model.linear import Linear
from overlap.step import train_step
from overlap.streams import StreamLanes
from overlap.verify import verify
from recompute import RecomputeConfig, Replay
from recompute.wgrad import WeightGradients, adding_in_place, collect_weight_gradients, weights_left_out
from tests.gpu.te_probe_attention import attention, check, say

CUDA = torch.device("cuda")
RECIPES = (None, "block", "current", "delayed")
WAYS = [("te", recipe) for recipe in RECIPES[1:]] + [("te-modules", recipe) for recipe in RECIPES]
"""By kernels, which are for 8 bits only, and by Transformer Engine's modules."""
SECTIONS: list[Callable[[], None]] = []
SHAPE: dict[str, Any] = {
    "layers": 3, "hidden": 256, "heads": 4, "kv_rank": 64, "nope_dim": 64, "rope_dim": 32, "value_dim": 64,
    "ffn_width": 256, "experts": 8, "topk": 2, "expert_width": 128, "shared_width": 128, "max_seq": 128,
    "dtype": "bfloat16",
}  # fmt: skip


def section(run: Callable[[], None]) -> Callable[[], None]:
    SECTIONS.append(run)
    return run


def backend(recipe: str | None, name: str = "te") -> Any:
    fp8 = None if recipe is None else Fp8Config(recipe=recipe)
    return load_backend(name, fp8)


def context(made: Any) -> Any:
    factory = made.context(0, 1)
    return torch.autograd.set_detect_anomaly(False) if factory is None else factory()


def layers_of(made: Any) -> Any:
    return import_module("overlap.backends.te_layers"), made._recipe_of(0, 1)


@section
def versions() -> None:
    te, tex = import_module("transformer_engine.pytorch"), import_module("transformer_engine_torch")
    say("torch", torch.__version__, "cuda", torch.version.cuda)
    try:
        say("cudnn", torch.backends.cudnn.version())
    except RuntimeError as error:
        # The loaded one is older than the one torch was compiled with.
        say("cudnn", error)
    say("cudnn as Transformer Engine sees it", import_module("transformer_engine.pytorch.utils").get_cudnn_version())
    say("transformer_engine", import_module("transformer_engine").__version__, "cublasLt", tex.get_cublasLt_version())
    for name in ("is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available"):
        say(name, getattr(te, name)(return_reason=True))
    for name in ("onnxscript", "einops", "flash_attn"):
        try:
            say(name, getattr(import_module(name), "__version__", "there"))
        except ImportError:
            say(name, "missing")


@section
def mxfp8_is_refused_by_name() -> None:
    try:
        backend("mxfp8")
    except Exception as error:
        say(type(error).__name__, error)
        check("names mxfp8", "mxfp8" in str(error))
    else:
        say("this device can do MXFP8")


@section
def amax_is_a_running_maximum() -> None:
    te = import_module("transformer_engine.pytorch")
    dtype = import_module("transformer_engine.pytorch.constants").DType.kFloat8E4M3
    scale, amax = torch.ones(2, device=CUDA), torch.zeros(2, device=CUDA)
    quantizer = te.Float8Quantizer(scale[0], amax[0:1], dtype)
    seen = []
    for size in (3.0, 7.0, 5.0):
        quantizer(torch.full((32, 32), size, device=CUDA, dtype=torch.bfloat16))
        seen.append(amax.tolist())
    say("amax after casts of 3, 7, 5:", seen)
    check("a later, smaller cast leaves the maximum", seen[-1] == [7.0, 0.0])


@section
def norm() -> None:
    module = import_module("overlap.backends.te_attention")
    for width in (64, 256, 512, 2048):
        weight = nn.Parameter(torch.randn(width, device=CUDA, dtype=torch.bfloat16))
        x = torch.randn(4, 33, width, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
        layer = module.TENorm(weight, 1e-6)
        grads = []
        for _ in range(2):
            y = layer(x)
            y.backward(torch.ones_like(y))
            grads.append((y.detach(), x.grad, weight.grad))
            x.grad = weight.grad = None
        check(f"width {width} reproduces itself", all(same_bits(a, b) for a, b in zip(*grads, strict=True)))
        want = F.rms_norm(x.detach(), (width,), weight.detach(), 1e-6)
        say("largest difference to torch", float((grads[0][0] - want).abs().max()))


section(attention)


@section
def linear() -> None:
    for way in WAYS:
        for inner, outer, rows in ((256, 576, (2, 64)), (2048, 576, (1, 4096)), (512, 3072, (1, 4096))):
            try:
                _linear(way, inner, outer, rows)
            except Exception:
                say("BAD ", way, inner, outer)
                traceback.print_exc()


def _linear(way: tuple[str, str | None], inner: int, outer: int, rows: tuple[int, int]) -> None:
    name, recipe = way
    made = backend(recipe, name)
    module, te_recipe = layers_of(made)
    torch.manual_seed(0)
    plain = Linear(inner, outer).to(CUDA, torch.bfloat16)
    with torch.no_grad():
        plain.weight.normal_(std=inner**-0.5)
    kind = module.TEModuleLinear if made.modules else module.TELinear
    layer = kind(nn.Parameter(plain.weight.detach().clone()), te_recipe)
    x = torch.randn(*rows, inner, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    runs = [_run_linear(made, layer, x, late) for late in (False, False, True)]
    say(way, (inner, outer), "peak of x grad", float(runs[0][1].abs().max()))
    check("reproduces itself", all(same_bits(a, b) for a, b in zip(runs[0], runs[1], strict=True)))
    check("late weight gradient is the same", all(same_bits(a, b) for a, b in zip(runs[0], runs[2], strict=True)))
    with torch.no_grad(), context(made):
        check("forward without graph is the same", same_bits(layer(x), runs[0][0]))
    want = _run_linear(made, plain, x, False)
    for name, a, b in zip(("output", "x grad", "weight grad"), runs[0], want, strict=True):
        say(name, "relative difference to torch", float((a - b).norm() / b.norm()))


def _run_linear(made: Any, layer: Any, x: Tensor, late: bool) -> tuple[Any, ...]:
    weight = layer.weight
    x.grad = weight.grad = None
    pending = WeightGradients()
    with context(made):
        if late:
            with weights_left_out():
                y = layer(x)
        else:
            y = layer(x)
    seed = torch.linspace(-1, 1, y.numel(), device=CUDA, dtype=torch.float32).to(y.dtype).view_as(y)
    if late:
        with collect_weight_gradients(pending):
            y.backward(seed)
        check("weight has no gradient before its slot", weight.grad is None)
        ((found, gradient),) = pending.drain()
        check("the pending weight is the parameter", found is weight)
    else:
        y.backward(seed)
        gradient = weight.grad
    return y.detach(), x.grad, gradient


@section
def experts() -> None:
    for way in WAYS:
        for ids in ([0, 1, 2, 3], [1, 2, 3, 3], [0, 0, 0, 0]):
            try:
                _experts(way, ids)
            except Exception:
                say("BAD ", way, ids)
                traceback.print_exc()


def _experts(way: tuple[str, str | None], ids: list[int]) -> None:
    name, recipe = way
    made = backend(recipe, name)
    module, te_recipe = layers_of(made)
    torch.manual_seed(0)
    counts = torch.tensor(ids, device=CUDA).repeat(50)[:150].view(-1, 1)
    routing = make_routing(counts, 4)
    multiple = 1 if recipe is None else 16
    plain = GroupedExperts(4, 256, 256).to(CUDA, torch.bfloat16)
    with torch.no_grad():
        for weight in plain.parameters():
            weight.normal_(std=1 / 16)
    layer = module.from_torch_experts(plain, te_recipe, multiple, made.modules)
    rows = torch.randn(150, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(150, device=CUDA, requires_grad=True)
    runs = [_run_experts(made, layer, rows, probs, routing, how) for how in ("now", "now", "late", "in place")]
    say(way, ids, "splits", routing.counts.tolist(), "output", float(runs[0][0].float().norm()))
    for how, run in zip(("again", "late", "in place"), runs[1:], strict=True):
        check(f"same {how}", all(same_bits(a, b) for a, b in zip(runs[0], run, strict=True)))
    with torch.no_grad(), context(made):
        check("forward without graph is the same", same_bits(layer(rows, probs, routing), runs[0][0]))
    check("idle experts have zero gradients", not any(bool(runs[0][3][e].any()) for e in range(4) if e not in ids))
    check("all is finite", all(bool(torch.isfinite(t).all()) for t in runs[0]))


def _run_experts(made: Any, layer: Any, rows: Tensor, probs: Tensor, routing: Any, how: str) -> tuple[Any, ...]:
    weights = (layer.gate_up, layer.down)
    for leaf in (rows, probs, *weights):
        leaf.grad = None
    pending = WeightGradients()
    with context(made):
        if how == "late":
            with weights_left_out():
                y = layer(rows, probs, routing)
        else:
            y = layer(rows, probs, routing)
    seed = torch.linspace(-1, 1, y.numel(), device=CUDA, dtype=torch.float32).to(y.dtype).view_as(y)
    if how == "late":
        with collect_weight_gradients(pending):
            y.backward(seed)
        gradients = {id(weight): gradient for weight, gradient in pending.drain()}
    elif how == "in place":
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        with adding_in_place():
            y.backward(seed)
        gradients = {id(weight): weight.grad for weight in weights}
    else:
        y.backward(seed)
        gradients = {id(weight): weight.grad for weight in weights}
    return y.detach(), rows.grad, probs.grad, gradients[id(layer.gate_up)], gradients[id(layer.down)]


def small_chunk(recipe: str | None, rule: RecomputeConfig, *, delay: bool = False, **changes: Any) -> ModelChunk:
    model = Decoder(ModelConfig(**{**SHAPE, **changes})).to(CUDA)
    return ModelChunk(
        backend(recipe).convert(model), recompute=rule, order=get_order("multi_queue", rule.replay), delay_wgrad=delay,
        lanes=StreamLanes(CUDA),
    )  # fmt: skip


def batches(steps: int = 2) -> list[list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(1)

    def draw() -> dict[str, Tensor]:
        tokens = torch.randint(256, (2, 65), generator=generator).to(CUDA)
        return {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    return [[draw() for _ in range(3)] for _ in range(steps)]


@section
def copies_of_a_model() -> None:
    chunk = small_chunk("delayed", RecomputeConfig.uniform(1))
    other = copy.deepcopy(chunk)
    parts = [dict(side.named_buffers()) for side in (chunk, other)]
    check("same buffers", parts[0].keys() == parts[1].keys())
    check("of their own", all(parts[0][name] is not parts[1][name] for name in parts[0]))
    query: Any = other.module.get_submodule("layers.0.attn.attention.query")
    quantizer = query._product._casts.inputs[0]
    check("bound to the copy", quantizer.amax.data_ptr() == query.scaling[0].amax_forward.data_ptr())


@section
def whole_steps() -> None:
    torch.use_deterministic_algorithms(True)
    hidden = RecomputeConfig.uniform(1, replay=Replay.HIDDEN)
    for recipe in RECIPES:
        for rule, delay in ((RecomputeConfig.uniform(1), False), (RecomputeConfig.uniform(2), True), (hidden, False)):
            try:
                verdict = verify(small_chunk(recipe, rule, delay=delay), batches())
                say(recipe, rule, "delay", delay, "equal", verdict.equal)
                if not verdict.equal:
                    say("BAD ", verdict.gradients.different[:8], verdict.buffers.different[:8])
            except Exception:
                say("BAD ", recipe, rule, delay)
                traceback.print_exc()
    torch.use_deterministic_algorithms(False)


@section
def delayed_scales_move() -> None:
    chunk = small_chunk("delayed", RecomputeConfig.uniform(1))
    state: Any = chunk.module.get_submodule("layers.0.attn.attention.query.scaling.0")
    for step in range(3):
        train_step(chunk, batches()[0])
        say(step, "scales", state.scale_forward.tolist(), state.scale_backward.tolist())
        say("newest entries", state.history_forward[-1].tolist(), "amax now", state.amax_forward.tolist())
    check("scales moved", state.scale_forward.tolist() != [1.0] * 3)
    check("maxima are at rest", not bool(state.amax_forward.any()))


@section
def host_cost() -> None:
    x = torch.randn(1, 256, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    plain = Linear(256, 256).to(CUDA, torch.bfloat16)
    for name, recipe in (("torch", None), *WAYS):
        made = backend(recipe, "te" if name == "torch" else name)
        module, te_recipe = layers_of(made)
        kind = module.TEModuleLinear if made.modules else module.TELinear
        layer = plain if name == "torch" else kind(plain.weight, te_recipe)
        seconds = []
        for _ in range(60):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            with context(made):
                y = layer(x)
            y.backward(y.detach())
            seconds.append(time.perf_counter() - begin)
        say(name, recipe, f"forward and backward of one linear: {sorted(seconds)[30] * 1e6:.0f} us of host time")


def main() -> int:
    wanted = sys.argv[1:]
    failed = []
    for run in SECTIONS:
        if wanted and run.__name__ not in wanted:
            continue
        print(f"== {run.__name__}", flush=True)
        try:
            run()
            torch.cuda.synchronize()
        except Exception:
            traceback.print_exc(file=sys.stdout)
            failed.append(run.__name__)
    print("failed sections:", failed)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
