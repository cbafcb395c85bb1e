"""Files of a run on several nodes: which node has which, and how ranks give them to each other."""
