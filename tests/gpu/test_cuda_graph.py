"""A step launched as a CUDA graph equals plain autograd bit for bit, step after step."""

import copy
from dataclasses import replace

import pytest
import torch

from overlap import PerToken, ProgramError, cuda_graph, reference_step, train_step
from overlap.contiguous import contiguous_step
from overlap.cuda_graph import WARM_UP, GraphedStep, graphed
from overlap.model import ModelConfig
from overlap.verify import compare_steps, verify
from recompute import RecomputeConfig
from recompute.config import Keep
from recompute.errors import ConfigError
from tests.gpu.test_verify import RULES, SHAPE, VARIANTS, batches, gradients, make_chunk

pytestmark = pytest.mark.gpu
STEPS = WARM_UP + 3


CASES = [
    ("plain", "none", "multi_queue"),
    ("plain", "uniform1", "multi_queue"),
    ("plain", "uniform2", "single_queue"),
    ("plain", "uniform1-hidden", "single_queue"),
    ("plain", "block3-hidden", "multi_queue"),
    ("dropout", "uniform1", "multi_queue"),
    ("dropout", "uniform2-hidden", "single_queue"),
    ("dense", "block2", "multi_queue"),
    ("tied", "uniform1-hidden", "multi_queue"),
    ("one-expert", "uniform1", "multi_queue"),
    ("idle-experts", "uniform1-hidden", "multi_queue"),
    ("mtp1", "uniform1-hidden", "single_queue"),
    ("mtp2-mhc4", "uniform2-hidden", "multi_queue"),
]


def config_of(variant, **changes):
    return ModelConfig(layers=4, dtype="bfloat16", **{**SHAPE, **VARIANTS[variant], **changes})


def chunk_of(config, rule="uniform1", order="multi_queue", **changes):
    return make_chunk(config, RULES[rule], order, loopback=True, delay=order == "single_queue", **changes)


@pytest.mark.parametrize(("variant", "rule", "order"), CASES)
def test_equal_to_the_reference(variant, rule, order):
    config = config_of(variant)
    verdict = verify(chunk_of(config, rule, order), batches(config, STEPS), graph=True)
    assert verdict.equal, verdict
    assert verdict.max_live_segments <= (2 if "hidden" in rule else 1)


def test_a_lead_is_recorded():
    config = config_of("dropout")
    chunk = chunk_of(config, "uniform1-hidden", "single_queue", lead=3)
    assert verify(chunk, batches(config, STEPS), graph=True).equal


@pytest.mark.parametrize("run", [contiguous_step, reference_step])
def test_other_steps_can_be_recorded(run):
    config = config_of("dropout")
    assert compare_steps(chunk_of(config), batches(config, STEPS), reference_step, graphed(run)).equal


def test_shapes_in_turn():
    config = config_of("dropout")
    long, short = batches(config, STEPS), batches(config, STEPS, microbatches=2)
    data = [step for pair in zip(long, short, strict=True) for step in pair]
    assert compare_steps(chunk_of(config), data, reference_step, graphed()).equal


class SameSeeds(GraphedStep):
    """Control: every step draws what the first one drew."""

    def _launch(self, recording, microbatches):
        draws = tuple((state, lambda step, seed_at=seed_at: seed_at(0)) for state, seed_at in recording.draws)
        return super()._launch(replace(recording, draws=draws), microbatches)


class SameFeeds(GraphedStep):
    """Control: every step sees the first microbatches."""

    def _launch(self, recording, microbatches):
        return super()._launch(recording, recording.feeds)


class KeptGradients(GraphedStep):
    """Control: gradients that were set to None come back as they were."""

    def _check_addresses(self, warm):
        for parameter, gradient in self._gradients.values():
            parameter.grad = gradient


@pytest.mark.parametrize("kind", [SameSeeds, SameFeeds, KeptGradients])
def test_controls_differ(kind, monkeypatch):
    monkeypatch.setattr(cuda_graph, "GraphedStep", kind)
    config = config_of("dropout")
    assert not compare_steps(chunk_of(config), batches(config, STEPS), reference_step, graphed()).equal


def test_gradients_add_up_over_calls():
    config = config_of("plain")
    chunk, data = chunk_of(config), batches(config, 1)[0]
    once = gradients(train_step, chunk, data)
    step = GraphedStep(chunk)
    for _ in range(WARM_UP):
        step(data)
    chunk.zero_grad(set_to_none=False)
    step(data)
    assert all(torch.equal(p.grad, once[name]) for name, p in chunk.named_parameters() if p.grad is not None)
    step(data)
    twice = {name: p.grad for name, p in chunk.named_parameters() if p.grad is not None}
    assert any(not torch.equal(twice[name], once[name]) for name in once)


def test_the_peak_is_that_of_the_step_as_it_is():
    config = config_of("plain", max_seq=256)
    chunk, data = chunk_of(config), batches(config, 1)[0]
    step = GraphedStep(chunk)
    peaks = []
    for _ in range(WARM_UP + 1):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(data)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    feeds = sum(value.nbytes for feeds in data for value in feeds.values())
    assert abs(peaks[-1] - peaks[-2]) <= feeds + 2**20


def test_a_step_that_needs_the_host_is_refused_and_leaves_nothing_behind():
    config = replace(config_of("plain"), dtype="float32")  # grouped products of float32 read the counts
    chunk, data = chunk_of(config), batches(config, 1)[0]
    wanted = gradients(train_step, copy.deepcopy(chunk), data)
    step = GraphedStep(chunk)
    for _ in range(WARM_UP):
        step(data)
    done = chunk.steps_done
    with pytest.raises(ProgramError, match="CUDA graph"):
        step(data)
    assert chunk.steps_done == done
    torch.cuda.synchronize()
    chunk.zero_grad()
    train_step(chunk, data)
    assert all(torch.equal(p.grad, wanted[name]) for name, p in chunk.named_parameters() if p.grad is not None)


def test_settings_that_need_the_host_are_refused():
    config = config_of("plain")
    chunk, data = chunk_of(config), batches(config, 1)[0]
    chunk.loss_scale = PerToken()
    with pytest.raises(ConfigError, match="loss_scale"):
        GraphedStep(chunk)
    offloaded = make_chunk(
        config, RecomputeConfig.uniform(1, keep=Keep.HOST), "multi_queue", loopback=True, delay=False
    )
    with pytest.raises(ConfigError, match="keep"):
        GraphedStep(offloaded)
    chunk = chunk_of(config)
    step = GraphedStep(chunk)
    for _ in range(WARM_UP):
        step(data)
    parameter = next(chunk.parameters())
    handle = parameter.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ConfigError, match="hooks"):
        step(data)
    handle.remove()
    step(data)
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(ConfigError, match="another tensor"):
        step(data)
