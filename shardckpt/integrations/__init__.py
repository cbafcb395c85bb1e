"""Integrations with training frameworks. Each module needs its framework; the rest of the package imports none."""
