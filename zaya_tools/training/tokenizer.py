"""The tiny checkpoint's tokenizer: one token a byte, and the three special tokens of ZAYA1's vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAD, EOS, BOS = 0, 1, 2
SPECIAL = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS}
FIRST_BYTE = len(SPECIAL)
VOCABULARY = 320
"""Rows of the embedding: 259 tokens, padded to a multiple of 64."""


def byte_ids(data: bytes) -> list[int]:
    """Token ids of raw bytes, without special tokens."""
    return [FIRST_BYTE + value for value in data]


def ids_to_bytes(ids: Iterable[int]) -> bytes:
    """The bytes behind token ids; special and padding ids stand for nothing."""
    return bytes(token - FIRST_BYTE for token in ids if FIRST_BYTE <= token < FIRST_BYTE + 256)


def _visible_bytes() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte value (the GPT-2 table)."""
    kept = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    moved = iter(range(256, 512))
    return [chr(value if value in kept else next(moved)) for value in range(256)]


def _tokenizer() -> dict[str, Any]:
    vocabulary = {**SPECIAL, **{symbol: FIRST_BYTE + value for value, symbol in enumerate(_visible_bytes())}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for content, token in SPECIAL.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                bos,
                {"Sequence": {"id": "A", "type_id": 0}},
                bos,
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [BOS], "tokens": ["<bos>"]}},
        },
        "decoder": byte_level,
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
            "merges": [],
        },
    }


def write_tokenizer(folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json into `folder`.

    `PreTrainedTokenizerFast.from_pretrained(folder)` loads them. `<bos>` is put before every text unless
    special tokens are turned off; `max_length` is the advertised context in tokens.
    """
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    files: dict[str, dict[str, Any]] = {
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            **names,
            "added_tokens_decoder": {
                str(token): {
                    "content": content,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": True,
                }
                for content, token in SPECIAL.items()
            },
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        "special_tokens_map.json": names,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
