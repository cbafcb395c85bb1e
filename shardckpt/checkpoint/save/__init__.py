"""Save a state: plan, stage, write, commit."""
