"""Tiny random-weight models with a byte-level tokenizer: exactness needs no trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 272
EOS = 256
"""Bytes are tokens 0 to 255; then come 16 special tokens, of which the first is EOS."""

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def save_tokenizer(directory: Path) -> None:
    """A tokenizer whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", *(f"<special{i}>" for i in range(15))])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def save_llama(directory: Path, *, seed: int = 0, max_length: int = 1024, heads: int = 4) -> Path:
    """A 2-layer fp32 Llama, weights random enough that its text neither loops nor is noise."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32 * heads,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        initializer_range=0.15,
        eos_token_id=EOS,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


SLIDING: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "sliding_window": 48,
    "initializer_range": 0.15,
    "eos_token_id": EOS,
    "bos_token_id": None,
}


def save_sliding_mistral(directory: Path) -> Path:
    """A 2-layer Mistral whose attention slides over 48 tokens."""
    torch.manual_seed(1)
    config = MistralConfig(
        **SLIDING,
        num_hidden_layers=2,
    )
    MistralForCausalLM(config).to(torch.float32).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def save_gemma3(directory: Path) -> Path:
    """A 4-layer Gemma 3: three layers slide over 48 tokens, one sees everything."""
    torch.manual_seed(2)
    config = Gemma3TextConfig(
        **SLIDING,
        num_hidden_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        pad_token_id=0,
    )
    Gemma3ForCausalLM(config).to(torch.float32).save_pretrained(directory)
    save_tokenizer(directory)
    return directory
