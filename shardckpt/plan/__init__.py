"""Planning without I/O: tensors to select, their names, output files, and source bytes."""
