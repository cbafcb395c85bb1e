"""Verbs without a job: consolidate, convert, inspect, verify, diff. One process, no model, no torch."""
