"""Results of the offline verbs for callers."""
