"""Output formats: the files of each."""
