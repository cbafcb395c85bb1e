"""Names of model files: what a model needs besides its weights, such as its config and its tokenizer."""

from __future__ import annotations

import re
from fnmatch import translate

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
GENERATION_CONFIG = "generation_config.json"
MAX_BYTES = 256 * 2**20  # of a file; the largest tokenizers have a tenth of it

_GLOBS = (
    CONFIG,
    GENERATION_CONFIG,
    ADAPTER_CONFIG,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "vocab-*.json",
    "*_vocab.json",
    "merges.txt",
    "bpe.codes",
    "dict.txt",
    "normalizer.json",
    "spiece.model",
    "spm*.model",
    "sentencepiece*.model",
    "*.spm",
    "*.tiktoken",
    "tekken.json",
    "chat_template*",
    "*preprocessor_config.json",
    "processor_config.json",
    "audio_tokenizer_config.json",
)
MODEL_FILE = re.compile("|".join(map(translate, _GLOBS)))
