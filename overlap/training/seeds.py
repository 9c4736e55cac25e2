"""Seeds of the data: another one for every step and rank, the same for the same run."""

from __future__ import annotations

import hashlib

_STEPS = 1_000_003


def data_seed(seed: int, step: int, data_rank: int) -> int:
    """Seed of the data that one rank draws in one step: any integer of less than 64 bits.

    Args:
        seed: Of the run.
        step: Steps done before.
        data_rank: 0 draws what one process alone draws.
    """
    own = seed * _STEPS + step
    if data_rank == 0:
        return own
    return int.from_bytes(hashlib.blake2b(f"{own} {data_rank}".encode(), digest_size=7).digest(), "little")
