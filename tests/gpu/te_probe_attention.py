"""The probe's section on attention: which kernel is chosen, whether it repeats itself, and how far torch's is."""

from __future__ import annotations

import logging
import traceback
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from overlap.check import same_bits
from overlap.model import ModelConfig

CUDA = torch.device("cuda")


def say(*words: object) -> None:
    print("   ", *words, flush=True)


def check(what: str, good: object) -> None:
    say("ok  " if good else "BAD ", what)
    if not good:
        raise AssertionError(what)


def attention() -> None:
    logging.getLogger("DotProductAttention").setLevel(logging.INFO)
    module = import_module("overlap.backends.te_attention")
    shapes = {
        "mla": {"attention": "mla", "heads": 16, "nope_dim": 128, "rope_dim": 64, "value_dim": 128},
        "mla small": {"attention": "mla", "heads": 4, "nope_dim": 64, "rope_dim": 32, "value_dim": 64},
        "gqa": {"attention": "gqa", "heads": 8, "kv_heads": 2, "head_dim": 64},
    }
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        for name, widths in shapes.items():
            for drop in (0.0, 0.1):
                config = ModelConfig(**{"hidden": 256, "attention_dropout": drop, "dtype": "bfloat16", **widths})
                try:
                    _attention(module, config, f"{name} dropout {drop} deterministic {deterministic}")
                except Exception:
                    say("BAD ", name, drop, deterministic)
                    traceback.print_exc()
    torch.use_deterministic_algorithms(False)


def _attention(module: Any, config: ModelConfig, what: str) -> None:
    core = module.TECoreAttention(config, False)
    latent = config.attention == "mla"
    width, value_width = (config.nope_dim + config.rope_dim, config.value_dim) if latent else (config.head_dim,) * 2
    kv_heads = config.heads if latent else config.kv_heads

    def draw(heads: int, last: int) -> Tensor:
        return torch.randn(2, heads, 256, last, device=CUDA, dtype=torch.bfloat16, requires_grad=True)

    inputs = (draw(config.heads, width), draw(kv_heads, width), draw(kv_heads, value_width))
    # The same numbers as transposed views of contiguous [B, S, H, d], as the model's own kernels write them.
    views = tuple(x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs)
    state = torch.cuda.get_rng_state()
    strided, packed = (_attention_runs(core, leaves, config.attention_dropout) for leaves in (inputs, views))
    for name, runs in (("strided", strided), ("packed", packed)):
        same = [same_bits(a, b) for a, b in zip(*runs, strict=True)]
        say(what, name, "reproduces output, gradients:", same, "replay equals:", same_bits(runs[0][0], runs[0][1]))
    chosen = import_module("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
    names = ("use_flash_attention", "use_fused_attention", "fused_attention_backend", "use_unfused_attention")
    say("chosen:", {name: str(chosen._attention_backends.get(name)) for name in names})
    check("any strides are the same", all(same_bits(a, b) for a, b in zip(strided[0], packed[0], strict=True)))
    if config.attention_dropout:
        return
    torch.cuda.set_rng_state(state)
    with torch.no_grad():
        core(*inputs, 0.0, None)
    check("the generator stands still", torch.equal(torch.cuda.get_rng_state(), state))
    for kind in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        try:
            with sdpa_kernel(kind):
                want = _attention_run(module.CoreAttention(), inputs, 0.0)
        except RuntimeError as error:
            # The fused one takes no shared heads; the last one takes everything.
            say("torch's", kind.name, "refuses:", str(error).splitlines()[0])
            continue
        apart = [float((a.float() - b.float()).abs().max()) for a, b in zip(strided[0], want, strict=True)]
        say("largest difference to torch", kind.name, "output, gradients:", apart[1:])
    check("output is torch's but for rounding", apart[1] < 0.1)
    check("gradients are torch's but for rounding", max(apart[2:]) < 1.0)


def _attention_runs(core: Any, inputs: tuple[Tensor, ...], dropout: float) -> list[tuple[Any, ...]]:
    return [_attention_run(core, inputs, dropout) for _ in range(2)]


def _attention_run(core: Any, inputs: tuple[Tensor, ...], dropout: float) -> tuple[Any, ...]:
    torch.cuda.manual_seed(3)
    with torch.no_grad():
        first = core(*inputs, dropout, None)
    torch.cuda.manual_seed(3)
    y = core(*inputs, dropout, None)
    y.backward(torch.ones_like(y))
    gradients = tuple(x.grad for x in inputs)
    for x in inputs:
        x.grad = None
    return first, y.detach(), *gradients
