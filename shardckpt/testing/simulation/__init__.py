"""Simulation of saves, restores and removals under faults: histories that a seed gives and repeats."""

from shardckpt.testing.simulation.scheduler import HistoryError, HistoryEvent
from shardckpt.testing.simulation.simulated_history import Scenario, SimulatedHistory, run_history

__all__ = ["HistoryError", "HistoryEvent", "Scenario", "SimulatedHistory", "run_history"]
