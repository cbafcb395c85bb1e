"""Module parameters and their names, pytrees, autograd hooks, compile guard."""
