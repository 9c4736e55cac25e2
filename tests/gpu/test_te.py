"""The Transformer Engine backend on a GPU: the overlapped step equals the reference in every precision, bit for bit."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from overlap import ModelChunk, get_order, reference_step, train_step
from overlap.backends import load_backend
from overlap.controls import make_control
from overlap.dispatch.host_loopback import HostLoopback
from overlap.engine import Engine
from overlap.ir import Op
from overlap.memory.bins import Bin
from overlap.memory.profile import measure_step
from overlap.model import Decoder, ModelConfig
from overlap.model.fp8 import Fp8Config
from overlap.reproduce import reproduce
from overlap.streams import StreamLanes
from overlap.training.rows import cut_rows
from overlap.training.text import ByteText, default_text
from overlap.training.trainer import Trainer
from overlap.verify import verify
from recompute import ConfigError, RecomputeConfig, Replay

# Transformer Engine's own imports warn.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = torch.device("cuda")
SHAPE: dict[str, Any] = {
    "layers": 3, "hidden": 256, "heads": 4, "kv_rank": 64, "nope_dim": 64, "rope_dim": 32, "value_dim": 64,
    "ffn_width": 256, "experts": 8, "topk": 2, "expert_width": 128, "shared_width": 128, "max_seq": 256,
    "dtype": "bfloat16",
}  # fmt: skip
PRECISIONS = {
    "bf16": None,
    "block": Fp8Config(recipe="block"),
    "current": Fp8Config(recipe="current"),
    "delayed": Fp8Config(recipe="delayed", amax_history=4),
    "block-ends-bf16": Fp8Config(recipe="block", first_bf16=1, last_bf16=1),
}
ATTENTIONS: dict[str, ModelConfig] = {
    "mla": ModelConfig(**SHAPE),
    "gqa": ModelConfig(
        layers=2, hidden=256, heads=4, attention="gqa", kv_heads=2, head_dim=64, max_seq=256, dtype="bfloat16"
    ),
}
UNIFORM1 = RecomputeConfig.uniform(1)
HIDDEN1 = RecomputeConfig.uniform(1, replay=Replay.HIDDEN)
HIDDEN2 = RecomputeConfig.uniform(2, replay=Replay.HIDDEN)
CASES: dict[str, tuple[RecomputeConfig, bool, dict[str, Any]]] = {
    "none": (RecomputeConfig.none(), False, {}),
    "uniform1": (UNIFORM1, False, {}),
    "uniform2": (RecomputeConfig.uniform(2), False, {}),
    "block2": (RecomputeConfig.block(2), False, {}),
    "hidden1": (HIDDEN1, False, {}),
    "hidden2": (HIDDEN2, True, {}),
    "delayed-wgrad": (UNIFORM1, True, {}),
    "delayed-wgrad-eager": (RecomputeConfig.none(), True, {}),
    "mtp1": (UNIFORM1, False, {"mtp": 1}),
    "mtp2-repeat-wgrad": (UNIFORM1, True, {"mtp": 2, "mtp_repeat": True}),
    "mhc4": (RecomputeConfig.uniform(2), True, {"mhc": 4, "mtp": 1}),
    "dropout": (RecomputeConfig.uniform(2), False, {"dropout": 0.1, "jitter": 0.05}),
    "attention-dropout": (UNIFORM1, False, {"attention_dropout": 0.1}),
    "dense": (UNIFORM1, True, {"dense_layers": 2}),
    "idle-experts": (UNIFORM1, True, {"experts": 64, "topk": 1}),
    "padding": (UNIFORM1, False, {"padding": True}),
    "selective-moe-act": (RecomputeConfig.selective("moe_act"), False, {}),
    "selective-attention": (RecomputeConfig.selective("core_attn", "layernorm", "mla_up_proj"), True, {}),
    "latent-query": (UNIFORM1, True, {"q_rank": 64}),
    "selective-latent-query": (RecomputeConfig.selective("layernorm", "mla_up_proj"), True, {"q_rank": 64}),
}
CORE_PRECISIONS = ("bf16", "block", "current", "delayed")
CORE_CASES = ("uniform1", "uniform2", "block2", "hidden1", "delayed-wgrad", "mhc4", "dropout", "attention-dropout")
MIXED_CASES = ("uniform1", "uniform2", "block2", "hidden2", "mtp1", "mhc4", "dense", "delayed-wgrad")
"""Where it matters which layer stands first or last; a layer itself runs as it does with one precision for all."""
MODULE_CASES = ("uniform1", "hidden1", "delayed-wgrad", "latent-query", "selective-latent-query", "selective-attention")
MODULE_PARTS = {"TENormThenLinear", "TEPermutation", "TERouter"}
REST = [(precision, case) for precision in CORE_PRECISIONS for case in CASES if case not in CORE_CASES]
REST += [("block-ends-bf16", case) for case in MIXED_CASES]


@pytest.fixture(autouse=True)
def _transformer_engine() -> None:
    pytest.importorskip("transformer_engine")


def make_chunk(precision: str, case: str, backend: str = "te", **changes: Any) -> ModelChunk:
    rule, delay, shape = CASES[case]
    config = ModelConfig(**{**SHAPE, **shape, **changes})
    model = Decoder(config, transport=HostLoopback(), seed=0).to(DEVICE)
    return ModelChunk(
        load_backend(backend, PRECISIONS[precision]).convert(model),
        recompute=rule,
        order=get_order("multi_queue", rule.replay),
        delay_wgrad=delay,
        lanes=StreamLanes(DEVICE),
    )


def batches(
    config: ModelConfig, steps: int = 2, microbatches: int = 3, length: int = 64
) -> list[list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(1)

    def draw() -> dict[str, Tensor]:
        tokens = torch.randint(config.vocab, (2, length + 1), generator=generator)
        feeds = {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
        return {name: value.to(DEVICE) for name, value in cut_rows(feeds, config, generator).items()}

    return [[draw() for _ in range(microbatches)] for _ in range(steps)]


@pytest.mark.parametrize("shape", ATTENTIONS)
def test_attention_is_torchs(shape):
    """Whatever the strides, and without touching the generator."""
    config = ATTENTIONS[shape]
    latent = shape == "mla"
    width, value_width = (config.nope_dim + config.rope_dim, config.value_dim) if latent else (config.head_dim,) * 2
    heads = (config.heads, *(config.heads if latent else config.kv_heads,) * 2)
    cores = [
        layer.get_submodule("core")
        for model in (Decoder(config).to(DEVICE), load_backend("te").convert(Decoder(config).to(DEVICE)))
        for layer in [model.get_submodule("layers.0.attn.attention")]
    ]
    generator = torch.Generator(DEVICE).manual_seed(0)
    made = [
        torch.randn(2, number, 128, last, device=DEVICE, dtype=torch.bfloat16, generator=generator)
        for number, last in zip(heads, (width, width, value_width), strict=True)
    ]
    packed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made]
    before = torch.cuda.get_rng_state()
    with sdpa_kernel(SDPBackend.MATH):
        want = run_attention(cores[0], made)
    found = run_attention(cores[1], made)
    assert all(torch.equal(a, b) for a, b in zip(found, run_attention(cores[1], packed), strict=True))
    assert torch.equal(torch.cuda.get_rng_state(), before)
    for ours, theirs in zip(found, want, strict=True):
        assert float((ours - theirs).float().norm() / theirs.float().norm()) < 0.05


def run_attention(core: Any, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = core(*leaves, 0.0, None)
    return y.detach(), *torch.autograd.grad(
        y, leaves, torch.linspace(-1, 1, y.numel(), device=DEVICE).to(y.dtype).view_as(y)
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_arm_reproduces_itself(precision):
    chunk = make_chunk(precision, "dropout")
    verdicts = reproduce(chunk, batches(chunk.module.config))
    assert {name: verdict.equal for name, verdict in verdicts.items()} == {"reference": True, "overlap": True}


@pytest.mark.parametrize("case", CORE_CASES)
@pytest.mark.parametrize("precision", CORE_PRECISIONS)
def test_core_equal_to_the_reference(precision, case):
    check_equal(precision, case)


@pytest.mark.parametrize(("precision", "case"), REST)
def test_rest_equal_to_the_reference(precision, case):
    check_equal(precision, case, microbatches=2)


@pytest.mark.parametrize("case", MODULE_CASES)
@pytest.mark.parametrize("precision", CORE_PRECISIONS)
def test_modules_equal_to_the_reference(precision, case):
    """Transformer Engine's own modules, in their precision contexts."""
    check_equal(precision, case, "te-modules", microbatches=2)


def check_equal(precision: str, case: str, backend: str = "te", microbatches: int = 3) -> None:
    chunk = make_chunk(precision, case, backend)
    check_parts(chunk, backend)
    # Scales that follow earlier steps take a step to move.
    steps = 3 if precision == "delayed" else 2
    verdict = verify(chunk, batches(chunk.module.config, steps=steps, microbatches=microbatches))
    assert verdict.equal, verdict
    assert verdict.max_live_segments <= (2 if "hidden" in case else 1)


def check_parts(chunk: ModelChunk, backend: str) -> None:
    if backend == "te-modules":
        assert {type(module).__name__ for module in chunk.modules()} >= MODULE_PARTS


@pytest.mark.parametrize("name", ["no_rng", "unpinned_routing", "double_effects", "swap_slots", "drop_bridge"])
@pytest.mark.parametrize("precision", ["bf16", "block", "delayed"])
def test_controls_differ(name, precision):
    chunk = make_chunk(precision, "dropout", **({"mtp": 1, "mhc": 2} if name == "drop_bridge" else {}))
    control = make_control(name, chunk, 3)
    assert not verify(chunk, batches(chunk.module.config), engine_type=control.engine_type).equal


class WideReplay(Engine):
    """Control: a replay runs without the stage's precision context (row 8)."""

    def _contexts(self, issue: Any, owner: Any) -> Any:
        contexts = super()._contexts(issue, owner)
        if issue.slot.op is not Op.REPLAY or issue.stage.context is None:
            return contexts
        # It stands after the ambient precision, which is not there.
        return contexts[1:]


@pytest.mark.parametrize("precision", ["block", "current", "delayed"])
def test_control_without_context_differs(precision):
    chunk = make_chunk(precision, "uniform1", "te-modules")
    assert not verify(chunk, batches(chunk.module.config), engine_type=WideReplay).equal


def test_control_with_moved_scales_differs():
    """Scales that move between first pass and replay, as where a context's end moves them (rows 6 and 10)."""
    chunk = make_chunk("delayed", "uniform1")
    data = batches(chunk.module.config)[0]
    train_step(chunk, data)
    chunk.zero_grad()
    expected, found = copy.deepcopy(chunk), copy.deepcopy(chunk)
    scales = [buffer for name, buffer in found.named_buffers() if name.endswith("scale_forward")]

    class Moved(Engine):
        def _replay(self, issue: Any, owner: Any) -> None:
            torch._foreach_mul_(scales, 1.37)
            super()._replay(issue, owner)

    train_step(expected, data)
    train_step(found, data, engine_type=Moved)
    gradients = zip(expected.parameters(), found.parameters(), strict=True)
    assert any(not torch.equal(a.grad, b.grad) for a, b in gradients if a.grad is not None)


def test_delayed_scales_move_once_per_step():
    """Row 10: a step is one entry of every history, with recompute and without; evaluation and failure are none."""
    chunk = make_chunk("delayed", "uniform1")
    state: Any = chunk.module.get_submodule("layers.0.attn.attention.query.scaling.0")
    data = batches(chunk.module.config, steps=3)
    newest = []
    for step, microbatches in enumerate(data):
        before = state.history_forward.clone()
        with torch.no_grad():
            train_step(chunk, microbatches)
        assert torch.equal(state.history_forward, before)
        assert not state.amax_forward.any()
        train_step(chunk, microbatches)
        newest.append(state.history_forward.clone())
        assert int(state.history_forward.any(dim=1).sum()) == step + 1
    assert not torch.equal(state.scale_forward, torch.ones_like(state.scale_forward))
    assert not state.amax_forward.any()


def test_a_failed_step_leaves_the_scales():
    chunk = make_chunk("delayed", "uniform1")
    data = batches(chunk.module.config)[0]
    train_step(chunk, data)
    chunk.zero_grad()
    before = {name: buffer.clone() for name, buffer in chunk.named_buffers()}

    class Fails(Engine):
        def _backward(self, issue: Any, owner: Any) -> None:
            if (issue.slot.layer, issue.slot.stage) == (1, "experts"):
                raise RuntimeError("on purpose")
            super()._backward(issue, owner)

    with pytest.raises(RuntimeError, match="on purpose"):
        train_step(chunk, data, engine_type=Fails)
    assert all(torch.equal(buffer, before[name]) for name, buffer in chunk.named_buffers())
    expected, found = copy.deepcopy(chunk), chunk
    chunk.zero_grad()
    expected.zero_grad()
    reference_step(expected, data)
    train_step(found, data)
    for (name, a), (_, b) in zip(expected.named_parameters(), found.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name


def test_training_200_steps_with_and_without_recompute():
    curves = []
    for case in ("none", "uniform1"):
        chunk = make_chunk("block", case, layers=2, experts=4, shared_width=0)
        text = ByteText([default_text()], 64)

        def data(step: int, text: ByteText = text) -> list[dict[str, Tensor]]:
            rows = text.microbatches(0, step, 2, 2)
            return [{name: value.to(DEVICE) for name, value in feeds.items()} for feeds in rows]

        trainer = Trainer(chunk, data, learning_rate=1e-3)
        curves.append([trainer.step().loss for _ in range(200)])
    assert curves[0] == curves[1]
    assert curves[0][-1] < 0.7 * curves[0][0]


def test_what_is_saved_in_8_bits_lets_its_input_go():
    """Of a layer whose replay is over, experts hold columns of their rows in 8 bits, not the rows.

    While a replay runs its rows are there in any precision, so it takes a segment of two layers to see it: the first
    one's experts hold their rows and SwiGLU's result in bf16, and half the rows' bytes in 8 bits. A quarter of them
    stays for scales, and for inputs of attention.
    """
    bins = {}
    for precision in ("bf16", "block"):
        chunk = make_chunk(precision, "uniform2", experts=4, topk=4, max_seq=2048)
        tokens = torch.randint(256, (2, 2049), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        feeds = {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
        bins[precision] = measure_step(chunk, [feeds] * 2).usage.peaks.bins
    print({name: {kind.value: nbytes for kind, nbytes in found.items()} for name, found in bins.items()})
    rows = 2 * 2048 * 4 * SHAPE["hidden"] * 2
    assert bins["block"][Bin.LIVE_SEGMENT] < bins["bf16"][Bin.LIVE_SEGMENT] - rows // 4
    assert bins["block"][Bin.SEGMENT_INPUTS] == bins["bf16"][Bin.SEGMENT_INPUTS]


def test_weight_gradients_that_wait_are_seen():
    """What a delayed weight gradient waits with counts as that, quantised tensors too."""
    ways = (("te", "delayed-wgrad"), ("te-modules", "latent-query"))
    for precision, (backend, case) in itertools.product(("bf16", "block"), ways):
        chunk = make_chunk(precision, case, backend)
        usage = measure_step(chunk, batches(chunk.module.config)[0]).usage
        assert usage.peaks.bins[Bin.PENDING_WGRAD] > 0


def test_mxfp8_is_refused_by_name():
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this device can do MXFP8")
    with pytest.raises(ConfigError, match="fp8='mxfp8'"):
        load_backend("te", Fp8Config(recipe="mxfp8"))


def test_bad_shapes_are_refused():
    model = Decoder(ModelConfig(**{**SHAPE, "expert_width": 100})).to(DEVICE)
    with pytest.raises(ConfigError, match=r"multiples of 16, and layer 0\.experts"):
        load_backend("te", PRECISIONS["block"]).convert(model)
    chunk = make_chunk("block", "uniform1")
    short = torch.zeros(1, 9, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ConfigError, match="multiple of 16 tokens"):
        train_step(chunk, [{"ids": short, "labels": short}])
    with pytest.raises(ConfigError, match="on a GPU before"):
        load_backend("te").convert(Decoder(ModelConfig(**SHAPE)))


@pytest.mark.parametrize(("backend", "precision"), [("te", "bf16"), ("te", "block"), ("te-modules", "bf16")])
def test_the_same_model_as_torchs(backend, precision):
    """Same parameters by name, same numbers but for rounding; Transformer Engine's experts have transposed matrices.

    Every token takes every expert: in 8 bits some would change theirs. What rounding of e4m3 does to the gradients of a
    model of three layers was computed on a CPU: 0.25 of their norm. Single products are in test_te_products.
    """
    config = ModelConfig(**{**SHAPE, "topk": SHAPE["experts"]})
    data = batches(config)[0]
    chunks = {
        name: ModelChunk(
            load_backend(name, PRECISIONS[precision] if name != "torch" else None).convert(
                Decoder(config, seed=0).to(DEVICE)
            ),
            lanes=StreamLanes(DEVICE),
        )
        for name in ("torch", backend)
    }
    check_parts(chunks[backend], backend)
    names = [{name for name, _ in chunk.named_parameters()} for chunk in chunks.values()]
    assert names[0] == names[1]
    losses = {name: [float(item["loss"]) for item in train_step(chunk, data)] for name, chunk in chunks.items()}
    assert losses[backend] == pytest.approx(losses["torch"], rel=0.01)
    weights = [chunk.get_parameter("module.layers.0.experts.gate_up") for chunk in chunks.values()]
    torchs, theirs = (weight.grad.float() for weight in weights if weight.grad is not None)
    if (backend, precision) != ("te", "bf16"):
        theirs = theirs.transpose(1, 2)
    assert float((theirs - torchs).norm() / torchs.norm()) < (0.05 if precision == "bf16" else 0.35)
