"""Model state: build and load state dicts."""
