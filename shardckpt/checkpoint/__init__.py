"""Verbs in a job: save and load the state of a training run, on any number of ranks."""
