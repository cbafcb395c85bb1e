"""Arithmetic of data positions: the order of samples, batches of a step, streams of a rank."""
