"""Where a run's steps are: copies, the failures that they survive, and the run's record."""
