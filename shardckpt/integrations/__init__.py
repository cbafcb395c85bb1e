"""Integrations with training frameworks. Each module needs its framework and says what to install."""
