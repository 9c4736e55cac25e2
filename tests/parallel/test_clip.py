from __future__ import annotations

import pytest
import torch

from overlap.parallel.attach import DataSettings
from overlap.parallel.clip import clip_gradients, global_norm
from overlap.step import train_step
from tests.distributed.ranks import RankPool
from tests.parallel.models import experts_of_all, feeds_of, gradients, parallel_chunk, small_chunk, world_of


def norms(ep: int, fsdp: bool, limit: float) -> tuple[float, float, float, float]:
    """What global_norm says, what the whole gradients give, and the whole gradients' norm after clipping."""
    world = world_of(ep=ep)
    chunk = parallel_chunk(world, DataSettings(fsdp=fsdp))
    train_step(chunk, feeds_of(world.rank, 2))
    said, wanted = float(global_norm((chunk,))), norm_of_all(chunk)
    before = float(clip_gradients(chunk, limit))
    return said, wanted, before, norm_of_all(chunk)


def norm_of_all(chunk) -> float:
    whole = experts_of_all(chunk, gradients(chunk))
    return float(torch.cat([gradient.double().flatten() for gradient in whole.values()]).norm())


@pytest.mark.distributed
@pytest.mark.parametrize(("size", "ep", "fsdp"), [(2, 1, True), (2, 2, False), (4, 2, True), (4, 2, False)])
def test_the_norm_counts_every_element_once(ranks: RankPool, size: int, ep: int, fsdp: bool) -> None:
    found = ranks(size, norms, ep, fsdp, 0.5)
    # one factor on all ranks, or their parameters would drift apart
    assert len({(said, before) for said, _, before, _ in found}) == 1
    for said, wanted, before, after in found:
        assert said == pytest.approx(wanted, rel=1e-12)
        assert before == pytest.approx(wanted, rel=1e-6)
        assert wanted > 0.5
        assert after == pytest.approx(0.5, rel=1e-4)


@pytest.mark.distributed
def test_small_gradients_stay(ranks: RankPool) -> None:
    for _, wanted, _, after in ranks(2, norms, 1, True, 1e6):
        assert after == wanted


def test_one_process_clips_as_torch_does() -> None:
    chunks = [small_chunk(), small_chunk()]
    for chunk in chunks:
        train_step(chunk, feeds_of(0, 2))
    said = clip_gradients(chunks[0], 0.5)
    wanted = torch.nn.utils.clip_grad_norm_(chunks[1].parameters(), 0.5)
    assert torch.equal(said, wanted)
    for one, other in zip(*(gradients(chunk).values() for chunk in chunks), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
