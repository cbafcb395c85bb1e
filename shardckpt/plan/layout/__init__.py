"""Boxes, pieces and files: which ranks write and read which bytes."""
