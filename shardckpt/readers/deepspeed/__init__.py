"""DeepSpeed's ZeRO and universal checkpoints."""
