"""Before sharding: materialization, ignored and shared parameters."""
