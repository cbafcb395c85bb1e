"""Collectives, process groups, streams and memory of the engine."""
