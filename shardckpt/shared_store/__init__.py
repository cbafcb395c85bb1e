"""Ranks that meet and send messages through a torch store, with time limits."""
