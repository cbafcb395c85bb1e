"""Preparation for sharding: materialization, ignored and shared parameters."""
