"""Pipeline parallelism on torch.distributed.pipelining: virtual stages whose chunks run through our engine.

train_pipeline() is train_step() over a Pipeline: one rank's virtual stages under a schedule.
"""

from overlap.pipelining.layout import PipelineLayout, Placement, make_layout
from overlap.pipelining.pipeline import Pipeline
from overlap.pipelining.schedules import ScheduleKind, make_orders, placement_of
from overlap.pipelining.step import evaluate_pipeline, train_pipeline

__all__ = [
    "Pipeline",
    "PipelineLayout",
    "Placement",
    "ScheduleKind",
    "evaluate_pipeline",
    "make_layout",
    "make_orders",
    "placement_of",
    "train_pipeline",
]
