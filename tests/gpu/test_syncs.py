"""A training step never waits for the device: with one rank there is no split exchange either."""

from collections.abc import Iterator

import pytest
import torch

from overlap import train_step
from overlap.model import ModelConfig
from overlap.model.router import Router
from tests.gpu.test_verify import RULES, SHAPE, VARIANTS, batches, make_chunk

pytestmark = [
    pytest.mark.gpu,
    # torch says that the mode may miss some waits
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@pytest.fixture
def waits_afterwards() -> Iterator[None]:
    """Let the host wait for the device again, whatever the test set."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("waits_afterwards")
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("rule", ["none", "uniform1", "uniform2-hidden"])
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "one-expert"])
def test_a_step_does_not_wait_for_the_device(variant, rule, delay):
    config = ModelConfig(layers=4, dtype="bfloat16", **{**SHAPE, **VARIANTS[variant]})
    chunk = make_chunk(config, RULES[rule], "multi_queue", loopback=True, delay=delay)
    (data,) = batches(config, steps=1)
    train_step(chunk, data)  # checks the stages once, and makes the pinned buffers
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    train_step(chunk, data)


@pytest.mark.usefixtures("waits_afterwards")
def test_control_a_stage_that_looks_at_data_is_caught():
    config = ModelConfig(layers=2, dtype="bfloat16", **SHAPE)
    chunk = make_chunk(config, RULES["uniform1"], "multi_queue", loopback=True, delay=False)
    (data,) = batches(config, steps=1)
    train_step(chunk, data)
    router = next(module for module in chunk.modules() if isinstance(module, Router))
    choose = router.select

    def looks(scores, k):
        scores.sum().item()
        return choose(scores, k)

    router.select = looks
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchroniz"):
        train_step(chunk, data)
