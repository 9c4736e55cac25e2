"""Memory of a training step: measured, predicted from a dry run, and estimated by a formula."""

from overlap.memory.bins import Bin, Border, Highest, Peaks, Usage
from overlap.memory.fake import fake_chunk, zero_gradients
from overlap.memory.footprint import take_footprint
from overlap.memory.formula import formula
from overlap.memory.gap import Gap, gaps_of
from overlap.memory.host_cost import HostCost, measure_host_cost
from overlap.memory.oracle import measure_peak, predict_peak
from overlap.memory.predict import footprints_of, predict_step
from overlap.memory.profile import Forecast, Measured, Profile, measure_step, predict, profile_step
from overlap.memory.recorder import MemoryRecorder
from overlap.memory.segments import SegmentCounter
from overlap.memory.tracker import StorageTracker

__all__ = [
    "Bin",
    "Border",
    "Forecast",
    "Gap",
    "Highest",
    "HostCost",
    "Measured",
    "MemoryRecorder",
    "Peaks",
    "Profile",
    "SegmentCounter",
    "StorageTracker",
    "Usage",
    "fake_chunk",
    "footprints_of",
    "formula",
    "gaps_of",
    "measure_host_cost",
    "measure_peak",
    "measure_step",
    "predict",
    "predict_peak",
    "predict_step",
    "profile_step",
    "take_footprint",
    "zero_gradients",
]
