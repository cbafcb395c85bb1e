"""Adapters: open them, and add their values to a base's."""
