"""Places of a run's steps: copies, the failures that they survive, and the run's record."""
