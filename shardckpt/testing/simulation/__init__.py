"""Simulation of saves, restores and removals under faults: histories that a seed gives and repeats; large jobs."""

from shardckpt.errors import require_packages

require_packages("shardckpt.testing.simulation", "torch", "greenlet", install="'shardckpt[torch]' greenlet")

from shardckpt.testing.simulation.large_job import PhaseCost, run_large_job
from shardckpt.testing.simulation.scenario import Scenario
from shardckpt.testing.simulation.scheduler import HistoryError, HistoryEvent
from shardckpt.testing.simulation.simulated_history import SimulatedHistory, run_history

__all__ = [
    "HistoryError",
    "HistoryEvent",
    "PhaseCost",
    "Scenario",
    "SimulatedHistory",
    "run_history",
    "run_large_job",
]
