"""Plan a save: reports of ranks, plans, the manifest."""
