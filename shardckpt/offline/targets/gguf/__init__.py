"""Target `gguf`: names, hyperparameters and tokenizer of a model for llama.cpp."""
