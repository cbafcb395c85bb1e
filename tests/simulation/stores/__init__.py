"""Stores in a simulated history: a disk with the operating system's functions, and a bucket."""
