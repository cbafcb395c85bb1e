"""Plan the merge of a LoRA adapter, from names, shapes and settings only."""
