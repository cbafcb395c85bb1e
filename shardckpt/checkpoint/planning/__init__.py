"""Planning of a save: reports of ranks, save plans, manifest."""
