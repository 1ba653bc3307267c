"""The model of the tests of printed code."""

from __future__ import annotations

from typing import Any

TOKENS, BATCH = 96, 1
DOCUMENTS = (0, 60, 70, TOKENS)  # boundaries of packed documents
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": False,
}  # fmt: skip
