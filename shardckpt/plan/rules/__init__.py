"""Rules that rename and reshape tensors."""
