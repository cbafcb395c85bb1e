"""Statistics over a run's steps: list them, find the first bad step."""
