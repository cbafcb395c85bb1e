"""Planning without I/O: selected tensors, names, output files, source bytes."""
