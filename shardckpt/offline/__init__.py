"""Operations on stored checkpoints: consolidate, inspect, verify, diff.

They need neither running ranks nor a model nor torch.
"""
