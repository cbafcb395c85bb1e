"""Pure decisions: which tensors, under which names, into which files, from which bytes. No I/O."""
