"""Simulation of saves, restores and removals under faults: histories that a seed gives and repeats; large jobs."""

from tests.simulation.large_job import PhaseCost, run_large_job
from tests.simulation.scenario import Scenario
from tests.simulation.scheduler import HistoryError, HistoryEvent
from tests.simulation.simulated_history import SimulatedHistory, run_history
from tests.simulation.stream_history import StreamHistory, StreamScenario, run_stream_history

__all__ = [
    "HistoryError",
    "HistoryEvent",
    "PhaseCost",
    "Scenario",
    "SimulatedHistory",
    "StreamHistory",
    "StreamScenario",
    "run_history",
    "run_large_job",
    "run_stream_history",
]
