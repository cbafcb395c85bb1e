"""Notices that the process will end: who gave one, how much time is left, and where a save fits into it."""
