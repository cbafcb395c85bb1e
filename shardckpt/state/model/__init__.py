"""Model state: build and load it."""
