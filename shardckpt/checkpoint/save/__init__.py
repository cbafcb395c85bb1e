"""Save of a state: plan, stage, write, commit."""
