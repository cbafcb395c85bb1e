"""Operations on stored checkpoints without running ranks: consolidate, inspect, verify, diff. No model, no torch."""
