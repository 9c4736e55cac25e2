"""Small jobs for the planning tests."""

from __future__ import annotations

from functools import cache

from overlap.memory.device_model import DEVICES
from overlap.model import ModelConfig
from overlap.planning.evaluate import Setting
from overlap.planning.job import Job
from overlap.planning.survey import survey
from recompute.planner import SELECTIONS

DEVICE = DEVICES["h200"]
SMALL = ModelConfig(layers=4, dense_layers=1, experts=8)


@cache
def setting(**fields: object) -> Setting:
    """A job of a small model, dry-run once."""
    job = Job(**{"model": SMALL, **fields})
    return Setting(job=job, survey=survey(job, DEVICE, SELECTIONS[-2:]), device=DEVICE, order="multi_queue")


@cache
def single() -> Setting:
    """One rank, no pipeline."""
    return setting(microbatches=3)


@cache
def piped() -> Setting:
    """Two pipeline ranks with two chunks each, four expert-parallel ranks."""
    return setting(pp=2, virtual=2, schedule="dualpipev", ep=4, dp=8, microbatches=8)
