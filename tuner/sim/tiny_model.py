"""A model directory that a real `vllm serve --load-format dummy` takes: no weights, no download, no library."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tuner.sim import bpe

TINY_MODEL = "chunktune/tiny"
"""The name under which profiles ask for this model."""

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Role, colon, content, a line each; `tuner.sim.api.chat_prompt` writes the same."""


def make_tiny_model(
    directory: Path,
    *,
    hidden: int = 64,
    layers: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    max_position_embeddings: int = 131072,
    dtype: str = "bfloat16",
) -> Path:
    """Write a Llama of `layers` layers of width `hidden` with a byte-level BPE tokenizer; returns `directory`.

    With the defaults the forward pass is nearly free and the KV cache takes 128 bytes a token. A directory
    that holds a model already is written again, with the same bytes for the same arguments.
    """
    vocabulary = bpe.vocabulary()
    padded = -(-len(vocabulary) // 64) * 64
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": hidden * 2,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "initializer_range": 0.02,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": padded,
    }
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(bpe.SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": bpe.BEGIN, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"SpecialToken": {"id": bpe.BEGIN, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {bpe.BEGIN: {"id": bpe.BEGIN, "ids": [0], "tokens": [bpe.BEGIN]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(pair) for pair in bpe.merges()],
        },
    }
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bpe.BEGIN,
        "eos_token": bpe.END,
        "pad_token": bpe.SPECIALS[2],
        "model_max_length": max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    generation: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    directory.mkdir(parents=True, exist_ok=True)
    for name, document in (
        ("config.json", config),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation),
    ):
        (directory / name).write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")
    return directory


def resolve_model(model: str) -> str:
    """A folder with the tiny model, written now, where `model` asks for it by name; any other name as it is.

    The folder is the same every time, so that a command that names it starts again later.
    """
    if model != TINY_MODEL:
        return model
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return str(make_tiny_model(cache / "chunktune" / "tiny-llama"))
