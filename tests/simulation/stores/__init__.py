"""Stores of a simulated history: a disk behind the functions of the operating system, a bucket."""
