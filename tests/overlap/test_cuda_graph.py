"""What a recorded step refuses before anything runs; what it does is tested on a GPU (tests/gpu/test_cuda_graph.py)."""

from types import SimpleNamespace

import pytest
import torch

from overlap import ModelChunk, PerMicrobatch, PerToken
from overlap.cuda_graph import GraphedStep, check_recordable
from overlap.model import Decoder, ModelConfig
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
