"""What a recorded step refuses and looks after on the host; tests/gpu/test_cuda_graph.py has the rest."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from overlap import ModelChunk, PerMicrobatch, PerToken, ProgramError, cuda_graph, reference_step, train_step
from overlap.contiguous import contiguous_step
from overlap.cuda_graph import GraphedStep, _held, _WarmUp, check_recordable
from overlap.model import Decoder, ModelConfig
from overlap.recording import RecordingLanes
from recompute import RecomputeConfig, rng
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


class Stream:
    """Notes which streams it waits for."""

    def __init__(self):
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other)


def recorded(chunk: ModelChunk) -> GraphedStep:
    """As if its gradients were in recordings already: on the CPU there are none."""
    step = GraphedStep.__new__(GraphedStep)
    step._chunk = chunk
    for parameter in chunk.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    step._gradients = {
        name: (parameter, cast(torch.Tensor, parameter.grad)) for name, parameter in chunk.module.named_parameters()
    }
    step._places = {name: (tensor, tensor.data_ptr()) for name, tensor in _held(chunk.module).items()}
    return step


@pytest.fixture
def chunk() -> ModelChunk:
    return ModelChunk(Decoder(ModelConfig(layers=1)))


def test_a_gradient_of_none_comes_back_zeroed_and_others_stay(chunk):
    step = recorded(chunk)
    first, second, *_ = chunk.module.parameters()
    gradient, first.grad = first.grad, None
    step._check_addresses(_WarmUp())
    assert first.grad is gradient
    assert not gradient.any()
    assert second.grad.all()


@pytest.fixture
def on_streams(chunk, monkeypatch) -> GraphedStep:
    """Runs its first two steps of a kind, and then does nothing where it would record and launch."""
    step = GraphedStep.__new__(GraphedStep)
    step._chunk, step._run, step._stream = chunk, train_step, cast(Any, Stream())
    step._warm, step._recordings, step._gradients, step._places = {}, {}, {}, {}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(GraphedStep, "_record", lambda self, warm, microbatches: None)
    monkeypatch.setattr(GraphedStep, "_launch", lambda self, recording, microbatches: [])
    return step


@pytest.mark.parametrize("left", [False, True], ids=["none", "left there"])
def test_a_weight_frozen_later_gets_no_gradient_back(chunk, on_streams, left):
    """R3: None is not zero. An optimizer would decay the weight. What its owner leaves there, `left`, is not ours."""
    ids = torch.arange(6).view(1, 6)
    weight = chunk.get_parameter("module.embedding")
    optimizer = torch.optim.AdamW(chunk.parameters(), lr=0.1, weight_decay=0.1)

    def step() -> set[str]:
        optimizer.zero_grad()
        on_streams([{"ids": ids, "labels": ids}])
        return {name for name, p in chunk.named_parameters() if p.grad is not None}

    every = [step() for _ in range(3)][-1]
    assert "module.embedding" in every
    recorded, before = weight.grad, weight.detach().clone()
    weight.requires_grad_(False)
    for _ in range(2 if left else 0):
        weight.grad = torch.ones_like(weight)
        on_streams([{"ids": ids, "labels": ids}])
        assert weight.grad.all()
    for _ in range(4):  # warm-ups and launches
        assert step() == every - {"module.embedding"}
        optimizer.step()
        assert torch.equal(weight, before)
    weight.requires_grad_(True)
    assert step() == every
    assert weight.grad is recorded


def test_another_gradient_moved_weights_and_hooks_are_refused(chunk):
    step = recorded(chunk)
    name, parameter = next(chunk.module.named_parameters())
    gradient, parameter.grad = parameter.grad, torch.zeros_like(parameter)
    with pytest.raises(ConfigError, match=rf"{name}\.grad='another tensor': a recorded step adds"):
        step._check_addresses(_WarmUp())
    parameter.grad = gradient
    handle = parameter.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ConfigError, match=f"{name}='hooks'"):
        step._check_addresses(_WarmUp())
    handle.remove()
    step._check_addresses(_WarmUp())
    parameter.data = parameter.data.clone()
    with pytest.raises(ConfigError, match=f"{name}='moved': a recorded step uses parameters and buffers where"):
        step._check_addresses(_WarmUp())


def test_weights_and_buffers_in_place_of_others_are_refused(chunk):
    step = recorded(chunk)
    step._check_addresses(_WarmUp())
    buffer, old = next(chunk.module.named_buffers())
    owner, _, last = buffer.rpartition(".")
    setattr(chunk.module.get_submodule(owner), last, old.clone())
    with pytest.raises(ConfigError, match=f"{buffer}='moved'"):
        step._check_addresses(_WarmUp())
    step = recorded(chunk)
    chunk.load_state_dict({name: value.clone() for name, value in chunk.state_dict().items()
                           if torch.is_tensor(value)}, strict=False, assign=True)  # fmt: skip
    with pytest.raises(ConfigError, match="='moved'"):
        step._check_addresses(_WarmUp())


def test_frozen_weights_that_moved_are_refused(chunk):
    name, parameter = next(chunk.module.named_parameters())
    parameter.requires_grad_(False)
    step = recorded(chunk)
    del step._gradients[name]
    parameter.data = parameter.data.clone()
    with pytest.raises(ConfigError, match=f"{name}='moved'"):
        step._check_addresses(_WarmUp())


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
    chunk.seed = 1
    keys.append(step._key(data))
    chunk.seed = 0
    chunk.recompute = RecomputeConfig.uniform(1)
    keys.append(step._key(data))
    chunk.recompute = RecomputeConfig.none()
    assert step._key(data) == keys[0]
    chunk.lanes = RecordingLanes()
    keys.append(step._key(data))
    assert len(set(keys)) == len(keys) == 10


@pytest.mark.parametrize("value", [3, torch.zeros(2, requires_grad=True)])
def test_feeds_that_are_no_plain_tensors_are_refused(chunk, value):
    with pytest.raises(ConfigError, match="takes tensors that need no gradient"):
        recorded(chunk)._key([{"ids": value}])


def failing(error):
    def run(chunk, microbatches):
        chunk.steps_done += 1
        raise error

    return run


def test_a_failed_step_is_waited_for(chunk, monkeypatch):
    """Its kernels may still add to gradients that the caller is about to zero."""
    step, own, caller = recorded(chunk), Stream(), Stream()
    step._stream = cast(torch.cuda.Stream, own)
    step._run = failing(KeyError("stage"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with pytest.raises(KeyError):
        step._warm_up(_WarmUp(), [])
    assert own.waited == [caller]
    assert caller.waited == [own]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (torch.OutOfMemoryError("too large"), torch.OutOfMemoryError, "too large"),
        (RuntimeError("operation not permitted"), ProgramError, "cannot be recorded as a CUDA graph"),
    ],
)
def test_what_fails_while_recording(chunk, monkeypatch, error, kind, message):
    """Only what asks for the host is said to."""
    step = recorded(chunk)
    step._pool, step._stream = cast(Any, None), cast(Any, None)
    step._run = failing(error)
    monkeypatch.setattr(cuda_graph, "check_recordable", lambda chunk: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **how: nullcontext())
    with pytest.raises(kind, match=message):
        step._record(_WarmUp(), [{"ids": torch.zeros(1)}])
    assert chunk.steps_done == 0


@pytest.mark.parametrize("run", [train_step, contiguous_step, reference_step])
def test_every_draw_knows_its_seed_in_another_step(run, monkeypatch):
    """The seeds of the next step, in order, are what this step's draws say of it."""
    steps: list[list[Any]] = []

    def begin(generator, seed, seed_at):
        steps[-1].append((seed, seed_at))
        return rng.begin_at(generator, seed)

    monkeypatch.setattr(rng, "_begin", begin)
    chunk = ModelChunk(Decoder(ModelConfig(layers=2, vocab=16, dropout=0.1)), recompute=RecomputeConfig.uniform(1))
    chunk.checked = True  # the check draws in the first step only
    ids = torch.arange(6).view(1, 6)
    for _ in range(2):
        steps.append([])
        run(chunk, [{"ids": ids, "labels": ids}] * 2)
    seeds = [[seed for seed, _ in step] for step in steps]
    assert seeds[0] != seeds[1]
    for number, found in enumerate(seeds):
        assert [seed_at(number) for _, seed_at in steps[0]] == found
