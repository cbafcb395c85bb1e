"""The engine's collectives, process groups, streams and memory."""
