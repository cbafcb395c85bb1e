"""Target `gguf`: a model's names, hyperparameters and tokenizer for llama.cpp."""
