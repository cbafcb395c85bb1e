"""Offline work as a plan, tasks that any scheduler runs, and a commit."""
