"""A chunk without data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap.memory import fake_chunk
from recompute import ConfigError
from tests.memory.compare import assert_exact, decoder, tokens, uniform


def test_parameters_have_shapes_and_zero_gradients_but_no_data() -> None:
    with fake_chunk(lambda: decoder(layers=1)) as chunk:
        parameters = list(chunk.module.parameters())
    assert all(type(parameter.data).__name__ == "FakeTensor" for parameter in parameters)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_build_may_cast_its_module(dtype) -> None:
    def build():
        chunk = decoder(uniform(1), layers=1)
        chunk.module.to("cpu").to(dtype)
        return chunk

    with fake_chunk(build) as chunk:
        assert {parameter.dtype for parameter in chunk.module.parameters()} == {dtype}
    assert_exact(build, tokens(2))


def test_torch_is_as_before() -> None:
    before = torch.utils.swap_tensors
    with pytest.raises(ZeroDivisionError), fake_chunk(lambda: decoder(layers=1 // 0)):
        pass
    assert torch.utils.swap_tensors is before


def test_what_builds_no_chunk() -> None:
    build: Any = lambda: None  # noqa: E731
    with pytest.raises(ConfigError, match="chunk='NoneType': must be a ModelChunk"), fake_chunk(build):
        pass
