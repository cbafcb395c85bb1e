"""Ranks that meet and send messages in a store of torch, with limits."""
