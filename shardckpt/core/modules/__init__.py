"""Names and parameters of modules, pytrees, autograd hooks, a guard around compilation."""
