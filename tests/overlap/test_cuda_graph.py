"""What a recorded step refuses and looks after on the host; tests/gpu/test_cuda_graph.py has the rest."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from overlap import ModelChunk, PerMicrobatch, PerToken
from overlap.cuda_graph import GraphedStep, check_recordable
from overlap.model import Decoder, ModelConfig
from overlap.recording import RecordingLanes
from recompute import RecomputeConfig
from recompute.config import Keep
from recompute.errors import ConfigError


def on_a_gpu(**changes):
    """What check_recordable() looks at, of a chunk that it takes."""
    settings = {
        "device": torch.device("cuda"), "world": SimpleNamespace(groups=None, size=1),
        "recompute": RecomputeConfig.uniform(1), "loss_scale": PerMicrobatch(),
    }  # fmt: skip
    return SimpleNamespace(**{**settings, **changes})


def test_a_chunk_on_the_cpu_is_refused():
    with pytest.raises(ConfigError, match="device='cpu': a CUDA graph needs a CUDA device"):
        GraphedStep(ModelChunk(Decoder(ModelConfig(layers=1))))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("world", {"world": SimpleNamespace(groups=object(), size=2)}),
        ("keep", {"recompute": RecomputeConfig.uniform(1, keep=Keep.HOST)}),
        ("keep", {"recompute": (RecomputeConfig.none(), RecomputeConfig.uniform(1, keep=Keep.HOST))}),
        ("loss_scale", {"loss_scale": PerToken()}),
    ],
)
def test_settings_that_need_the_host_in_every_step_are_refused(field, changes):
    check_recordable(on_a_gpu())
    with pytest.raises(ConfigError, match="CUDA graph") as caught:
        check_recordable(on_a_gpu(**changes))
    assert caught.value.field == field


def recorded(chunk: ModelChunk) -> GraphedStep:
    """As if its gradients were in recordings already: on the CPU there are none."""
    step = GraphedStep.__new__(GraphedStep)
    step._chunk = chunk
    for parameter in chunk.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    step._gradients = {
        name: (parameter, cast(torch.Tensor, parameter.grad), parameter.data_ptr())
        for name, parameter in chunk.module.named_parameters()
    }
    return step


@pytest.fixture
def chunk() -> ModelChunk:
    return ModelChunk(Decoder(ModelConfig(layers=1)))


def test_a_gradient_of_none_comes_back_zeroed_and_others_stay(chunk):
    step = recorded(chunk)
    first, second, *_ = chunk.module.parameters()
    gradient, first.grad = first.grad, None
    step._check_addresses()
    assert first.grad is gradient
    assert not gradient.any()
    assert second.grad.all()


def test_another_gradient_moved_weights_and_hooks_are_refused(chunk):
    step = recorded(chunk)
    name, parameter = next(chunk.module.named_parameters())
    gradient, parameter.grad = parameter.grad, torch.zeros_like(parameter)
    with pytest.raises(ConfigError, match=rf"{name}\.grad='another tensor': a recorded step adds"):
        step._check_addresses()
    parameter.grad = gradient
    handle = parameter.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ConfigError, match=f"{name}='hooks'"):
        step._check_addresses()
    handle.remove()
    step._check_addresses()
    parameter.data = parameter.data.clone()
    with pytest.raises(ConfigError, match=f"{name}='moved'"):
        step._check_addresses()


def test_what_a_recording_holds_tells_recordings_apart(chunk, monkeypatch):
    step = recorded(chunk)
    data = [{"ids": torch.zeros(1, 4, dtype=torch.int64)}]
    keys = [step._key(data)]
    keys.append(step._key([{"ids": torch.zeros(1, 5, dtype=torch.int64)}]))
    keys.append(step._key(data * 2))
    chunk.eval()
    keys.append(step._key(data))
    chunk.train()
    next(chunk.module.parameters()).requires_grad_(False)
    keys.append(step._key(data))
    next(chunk.module.parameters()).requires_grad_(True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    keys.append(step._key(data))
    monkeypatch.undo()
    chunk.loss_scale = PerToken()
    keys.append(step._key(data))
    chunk.loss_scale = PerMicrobatch()
    assert step._key(data) == keys[0]
    chunk.lanes = RecordingLanes()
    keys.append(step._key(data))
    assert len(set(keys)) == len(keys) == 8


@pytest.mark.parametrize("value", [3, torch.zeros(2, requires_grad=True)])
def test_feeds_that_are_no_plain_tensors_are_refused(chunk, value):
    with pytest.raises(ConfigError, match="takes tensors that need no gradient"):
        recorded(chunk)._key([{"ids": value}])
