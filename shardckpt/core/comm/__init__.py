"""Collectives, process groups, streams and memory."""
