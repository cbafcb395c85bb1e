"""Places of a run's steps: the copies of each, the failures that they survive, and the record of a run."""
