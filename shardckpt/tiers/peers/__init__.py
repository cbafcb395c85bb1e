"""A run's files on several nodes: which node has which, and how ranks send them to each other."""
