"""A label outside the vocabulary on the device: no assertion of a kernel, which would end the process."""

import pytest
import torch

from overlap import train_step
from overlap.check import same_bits
from overlap.model import ModelConfig
from tests.gpu.test_verify import RULES, SHAPE, batches, gradients, make_chunk

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("label", [100_000, -1])
def test_the_loss_is_nan_and_the_next_step_is_what_it_would_have_been(label):
    config = ModelConfig(layers=4, dtype="bfloat16", mtp=1, **SHAPE)
    chunk = make_chunk(config, RULES["uniform2-hidden"], "multi_queue", loopback=True, delay=False)
    (data,) = batches(config, steps=1)
    expected = gradients(train_step, chunk, data)
    (wrong,) = batches(config, steps=1)
    wrong[1]["labels"][0, 3] = label
    losses = train_step(chunk, wrong)
    torch.cuda.synchronize()
    assert [any(bool(loss.isnan().any()) for loss in one.values()) for one in losses] == [False, True, False, False]
    chunk.zero_grad()
    found = gradients(train_step, chunk, data)
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], expected[name]) for name in expected)
