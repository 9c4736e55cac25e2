"""Selective recompute under overlap: which slots there are, the same bits, and nothing ignored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from overlap.chunk import ModelChunk
from overlap.contiguous import contiguous_step
from overlap.engine import Feeds
from overlap.ir import Op
from overlap.model import Decoder, ModelConfig
from overlap.plan import PlanRequest
from overlap.selective import modules_of, rebuilt_parts, rebuilt_stages
from overlap.verify import step_facts, verify
from recompute import ConfigError, RecomputeConfig, RecomputeModule, inner
from tests.overlap.programs import dummy_program

EVERY = tuple(RecomputeModule)
INNER = ("core_attn", "layernorm", "mla_up_proj", "moe_act")
selective = RecomputeConfig.selective


def with_block(num_layers: int, *modules: str, replay: str = "just_in_time") -> RecomputeConfig:
    return RecomputeConfig(
        granularity="selective", method="block", num_layers=num_layers, modules=modules, replay=replay
    )


def chunk(config: object, *, delay: bool = False, order: str = "multi_queue", **shape: object) -> ModelChunk:
    model = ModelConfig(vocab=17, **{"layers": 2, "hidden": 16, **shape})
    return ModelChunk(Decoder(model), recompute=config, delay_wgrad=delay, order=order)


def feeds(microbatches: int = 2) -> list[Feeds]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(17, (2, 7), generator=generator) for _ in range(microbatches)]
    return [{"ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()} for row in rows]


def backward_slots(model: ModelChunk, config: RecomputeConfig) -> list[str]:
    trained = model.program.trained()
    return [str(slot) for slot in model.planner.schedule(PlanRequest(None, config, trained))]


@pytest.mark.parametrize("module", ["attn", "experts", "shared_experts"])
def test_a_stage_is_rebuilt_right_before_its_backward(module: str) -> None:
    """One R for each of its B, nothing else is replayed, no all-to-all either."""
    stage = {"shared_experts": "shared"}.get(module, module)
    model = chunk(selective(module))
    slots = backward_slots(model, selective(module))
    assert [slot for slot in slots if slot.startswith("R")] == [f"R0.1.{stage}", f"R0.0.{stage}"]
    for layer in (0, 1):
        assert slots[slots.index(f"B0.{layer}.{stage}") - 1] == f"R0.{layer}.{stage}"
    facts = step_facts(model, 3)
    none = step_facts(chunk(RecomputeConfig.none()), 3)
    assert facts.slots == {**none.slots, "F": none.slots["F"] - 6, "N": 6, "R": 6}
    assert facts.replayed_a2a == 0
    assert facts.segments == ()


def test_parts_of_stages_add_no_slot() -> None:
    assert step_facts(chunk(selective(*INNER)), 2).slots == step_facts(chunk(RecomputeConfig.none()), 2).slots


def test_stages_outside_any_layer_are_no_modules() -> None:
    program = dummy_program("")
    named = replace(program.stages[0], name="attn", inner=frozenset({RecomputeModule.MOE_ACT}))
    program = replace(program, stages=(named, *program.stages[1:]))
    assert rebuilt_stages(program, selective("attn"), ()) == ()
    assert rebuilt_parts(program, selective("moe_act"), ()) == {}
    assert RecomputeModule.ATTN not in modules_of(program)


def test_modules_apply_where_no_segment_is() -> None:
    """`block` takes the first layers whole; the modules are rebuilt in the others, MTP depths too."""
    config = with_block(1, "experts", "core_attn")
    model = chunk(config, layers=3, mtp=1)
    side = model.planner.side(config, model.program.trained())
    assert [segment.layers for segment in side.segments] == [(0,)]
    assert side.alone == ((1, "experts"), (2, "experts"), (3, "experts"))
    assert side.parts == {(layer, "attn"): {RecomputeModule.CORE_ATTN} for layer in (1, 2, 3)}
    assert [[stage.key for stage in side.stages(number)] for number in (1, 2, 3)] == [[key] for key in side.alone]
    replays = [slot for slot in backward_slots(model, config) if slot.startswith("R")]
    # Of the whole layer, combine and post are not needed.
    whole = [f"R0.0.{stage}" for stage in ("attn", "shared", "dispatch", "experts")]
    assert replays == ["R0.3.experts", "R0.2.experts", "R0.1.experts", *whole]
    assert step_facts(model, 2).replayed_a2a == 2
    assert step_facts(model, 2).replayed_a2a_per_layer == 1.0


def test_inputs_of_a_rebuilt_stage_survive_and_its_graph_does_not() -> None:
    config = selective("experts")
    model = chunk(config)
    kept = {name for name, _ in model.planner.survivors(config, model.program.trained())}
    assert {"0.dispatched", "0.dispatched_probs", "0.routing"} <= kept
    assert "0.hidden" not in kept
    plan = model.planner.plan(PlanRequest(config, config, model.program.trained()))
    records = {issue.slot.op for issue in plan.issues if issue.stage.name == "experts" and issue.records}
    assert records == {Op.REPLAY}


CASES = [
    (selective("attn", "experts", "shared_experts"), {"dropout": 0.2, "attention_dropout": 0.2, "jitter": 0.1}),
    (selective("attn", "moe_act"), {"mtp": 1, "mhc": 2, "mhc_iterations": 2, "delay": True, "dropout": 0.1}),
    (selective(*INNER, "shared_experts"), {"dropout": 0.2, "attention_dropout": 0.2, "delay": True}),
    (selective(*INNER), {"mtp": 1, "mhc": 2, "mhc_iterations": 2, "attention_dropout": 0.1, "order": "single_queue"}),
    (selective(*INNER, "shared_experts"), {"dtype": "bfloat16", "q_rank": 8, "delay": True}),
    (selective(*INNER), {"mtp": 2, "mtp_repeat": True, "tied": True, "delay": True, "attention_dropout": 0.1}),
    (selective("core_attn", "layernorm", "experts"), {"attention": "gqa", "dense_layers": 1}),
    (with_block(1, *INNER), {"layers": 3, "dropout": 0.1, "attention_dropout": 0.1}),
    (with_block(1, "attn", "moe_act", replay="hidden"), {"layers": 3, "mtp": 1, "dropout": 0.1, "delay": True}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "shape"), CASES)
def test_no_bit_changes(config: RecomputeConfig, shape: dict) -> None:
    verdict = verify(chunk(config, **shape), [feeds()])
    assert verdict.equal, verdict


def test_microbatches_may_differ() -> None:
    configs = [selective(*INNER), RecomputeConfig.none(), selective("attn"), with_block(1, "core_attn")]
    assert verify(chunk(configs, attention_dropout=0.2), [feeds(4)]).equal


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_autocast_reaches_the_rebuilt_parts() -> None:
    """R15: the step runs under autocast, its backward does not."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert verify(chunk(selective(*INNER), delay=True), [feeds()]).equal


def test_attention_that_draws_anew_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control (R4): with dropout in the core of attention, drawn again from the live generator."""
    config = selective("core_attn")
    assert verify(chunk(config, attention_dropout=0.3), [feeds()]).equal
    original, calls = inner._call_in, []

    def draw_anew(context: Any, function: Any, *args: Any) -> Any:
        calls.append(context)
        again = calls.count(context) > 1
        return function(*args) if again else original(context, function, *args)

    monkeypatch.setattr(inner, "_call_in", draw_anew)
    verdict = verify(chunk(config, attention_dropout=0.3), [feeds()])
    assert verdict.loss_equal
    assert verdict.gradients.different


@pytest.mark.parametrize(
    ("config", "shape", "missing"),
    [
        (selective("attn", "shared_experts"), {"shared_width": 0}, "shared_experts"),
        (selective("mla_up_proj"), {"attention": "gqa"}, "mla_up_proj"),
        (selective("moe_act"), {"dense_layers": 2}, "moe_act"),
        (selective("attn"), {"layers": 0}, "attn"),
    ],
)
def test_a_module_that_the_model_lacks_is_refused(config: RecomputeConfig, shape: dict, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"modules='{missing}': this model has no such module; it has") as caught:
        chunk(config, **shape)
    assert missing not in str(caught.value).partition("it has")[2].split(", ")


def test_the_contiguous_path_refuses_before_anything_runs() -> None:
    model = chunk([RecomputeConfig.none(), selective("attn")])
    with pytest.raises(ConfigError, match="granularity='selective': needs the stages of the overlapped step"):
        contiguous_step(model, feeds())
    assert all(parameter.grad is None for parameter in model.parameters())
