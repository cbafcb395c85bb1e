"""Verbs without a job: consolidate, inspect, verify, diff. One process, no model, no torch."""
