"""Statistics over the steps of a run: list them, find the first bad step."""
