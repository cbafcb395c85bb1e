"""Parameters of modules and their names, pytrees, autograd hooks, compile guard."""
