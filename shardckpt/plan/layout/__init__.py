"""Boxes, pieces and files: who writes and reads which bytes."""
