"""When and where a training step runs: schedules, lanes and the engine over recompute/.

Bring a model by writing its stages with ProgramBuilder, wrap it in ModelChunk, and call train_step.
"""

from overlap.builder import ProgramBuilder, Value
from overlap.chunk import ModelChunk
from overlap.cuda_graph import GraphedStep
from overlap.errors import ProgramError, ScheduleError
from overlap.ir import Effect, Input, Lane, Loss, Op, Program, Slot, Stage, format_schedule, parse_schedule
from overlap.orders import ORDER_NAMES, Order, get_order
from overlap.reference import reference_step
from overlap.scale import PerMicrobatch, PerToken
from overlap.step import Losses, forward_only, train_step

__all__ = [
    "ORDER_NAMES",
    "Effect",
    "GraphedStep",
    "Input",
    "Lane",
    "Loss",
    "Losses",
    "ModelChunk",
    "Op",
    "Order",
    "PerMicrobatch",
    "PerToken",
    "Program",
    "ProgramBuilder",
    "ProgramError",
    "ScheduleError",
    "Slot",
    "Stage",
    "Value",
    "format_schedule",
    "forward_only",
    "get_order",
    "parse_schedule",
    "reference_step",
    "train_step",
]
