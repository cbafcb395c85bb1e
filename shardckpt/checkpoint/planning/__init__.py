"""Plan a save: rank reports, save plans, manifest."""
