from __future__ import annotations

from overlap.training.seeds import data_seed


def test_every_step_and_rank_draws_its_own() -> None:
    seeds = [data_seed(seed, step, rank) for seed in (0, 1, 10**12) for step in range(4) for rank in range(4)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert data_seed(2, 3, 0) == 2_000_009
    assert data_seed(2, 3, 1) == data_seed(2, 3, 1)
