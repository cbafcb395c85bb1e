"""Verbs in a job: save and load what a training run holds, on any number of ranks."""
