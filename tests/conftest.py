"""Set-up of every test: one thread, fixed seeds, no Hypothesis deadline, no GPU tests without a GPU."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch

from tests.distributed.ranks import RankPool

SEED = 1234


class TorchRandom:
    """torch's CPU generator as Hypothesis wants it: seeded for every example, so that a failure replays."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


# Hypothesis holds it weakly.
_TORCH_RANDOM = TorchRandom()
hypothesis.register_random(_TORCH_RANDOM)

hypothesis.settings.register_profile(
    "repository",
    # A training step is slower on a busy machine; its time says nothing about its result.
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    # CI repeats the same examples: a red run is due to the change, not to luck. Local runs look for new ones.
    derandomize="CI" in os.environ,
    print_blob=True,
)
hypothesis.settings.load_profile("repository")

# Sums are split by thread, so bitwise results need a fixed number; tests are too small to gain from more.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start every test from the same random state."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Runs a function on several ranks: `ranks(2, function, *args)` gives each rank's result."""
    pool = RankPool()
    yield pool
    pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no GPU."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
