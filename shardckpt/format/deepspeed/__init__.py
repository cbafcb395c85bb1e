"""ZeRO and universal checkpoints of DeepSpeed."""
