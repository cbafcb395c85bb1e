"""Compare resumed training with a witness: records, verdict."""
