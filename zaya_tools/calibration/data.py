"""Token windows to calibrate on: deduplicated, shuffled by a seed, cut to one length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from zaya_tools.calibration.chat import ChatRenderer
from zaya_tools.errors import ZayaError
from zaya_tools.evaluation.text import FIELD, LIBRARY, STDIN, documents, end_token, read_tokenizer

PASSAGE = 16_384
"""Characters of a long document that stay together when passages are shuffled."""
READ = 256
"""Characters that are read for each token wanted, before the rest of an endless data set is left alone."""


@dataclass(frozen=True)
class Choice:
    """Which data: as `evaluation.text.documents` takes it, how many windows of how many tokens, and the seed."""

    data: str = LIBRARY
    field: str = FIELD
    samples: int = 256
    context: int = 512
    seed: int = 0

    @property
    def repeatable(self) -> bool:
        """Whether the data can be read more than once, as standard input and pipes cannot."""
        return self.data != STDIN and not Path(self.data).is_fifo()


def shortfalls(windows: int, samples: int, unusable: int, reason: str) -> Iterator[str]:
    """What a person should know of data that gave fewer windows than were asked for, or conversations without text."""
    if windows < samples:
        yield f"the data give {windows:,} sequences of the {samples:,} asked for: all are used"
    if unusable:
        yield f"{unusable:,} conversations gave no text: {reason}"


@dataclass(frozen=True)
class Sample:
    """`ids` int64 [windows, context]; `passages` were read, of which `duplicates` were left out.

    `unusable` conversations gave no text, the first of them for `reason`.
    """

    ids: Tensor
    passages: int
    duplicates: int
    unusable: int = 0
    reason: str = ""

    @property
    def digest(self) -> str:
        """What tells these tokens from others."""
        return blake2b(self.ids.numpy().tobytes(), digest_size=16).hexdigest()


def sample(choice: Choice, tokenizer: Path, vocabulary: int, *, pool: int = 1, positions: int | None = None) -> Sample:
    """Windows of tokens by the tokenizer in the folder `tokenizer`: `pool` times the samples that are asked for.

    Documents longer than a passage are cut at line ends, equal passages are used once, and passages come in an order
    that the seed and their contents alone decide. Windows are full: passages follow one another with the end-of-text
    token between, and the rest that fills no window is left out. Fewer windows come where the data have no more.
    ZayaError for settings that make no sense, windows longer than the `positions` of a model among them, and for data
    without a single window.
    """
    if choice.samples < 1 or choice.context < 2:
        raise ZayaError(f"{choice.samples} samples of {choice.context} tokens", "take at least 1 of 2 tokens")
    if positions is not None and choice.context > positions:
        raise ZayaError(
            f"a context of {choice.context:,} tokens, where the model has {positions:,} positions", "take a shorter one"
        )
    if choice.seed.bit_length() > 63:
        raise ZayaError(f"a seed of {choice.seed.bit_length():,} bits", "take one of at most 63")
    encoder = read_tokenizer(tokenizer)
    wanted = pool * choice.samples * choice.context
    unique: dict[bytes, str] = {}
    read = passages = 0
    chat = ChatRenderer(tokenizer)
    for document in documents(choice.data, choice.field, chat=chat, split="train"):
        for passage in _passages(document):
            passages += 1
            unique.setdefault(_key(choice.seed, passage), passage)
            read += len(passage)
        if read >= max(READ * wanted, 1 << 24):
            break
    if not unique:
        chat.check()
    end = end_token(tokenizer)
    tokens: list[int] = []
    for _, passage in sorted(unique.items()):
        tokens += encoder.encode(passage.encode("utf-8", "replace").decode("utf-8"), add_special_tokens=False).ids
        if end is not None:
            tokens.append(end)
        if len(tokens) >= wanted:
            break
    windows = min(len(tokens) // choice.context, wanted // choice.context)
    if not windows:
        raise ZayaError(
            f"{choice.data} gives {len(tokens)} tokens, a window has {choice.context}",
            "give more text, or a shorter --context",
        )
    ids = torch.tensor(tokens[: windows * choice.context]).view(windows, choice.context)
    if int(ids.max()) >= vocabulary:
        raise ZayaError(
            f"the tokenizer gives token {int(ids.max())}, the model has {vocabulary:,}",
            "give the model's own tokenizer with --tokenizer",
        )
    return Sample(ids, passages, passages - len(unique), chat.unusable, chat.reason)


def _key(seed: int, passage: str) -> bytes:
    normal = " ".join(passage.split()).encode("utf-8", "replace")
    return blake2b(normal, digest_size=16, key=seed.to_bytes(8, "little", signed=True)).digest()


def _passages(document: str) -> Iterator[str]:
    if len(document) <= PASSAGE:
        yield document
        return
    held: list[str] = []
    size = 0
    for line in document.splitlines(keepends=True):
        for start in range(0, len(line), PASSAGE):  # a line may be a whole book
            piece = line[start : start + PASSAGE]
            if size + len(piece) > PASSAGE and held:
                yield "".join(held)
                held, size = [], 0
            held.append(piece)
            size += len(piece)
    if held:
        yield "".join(held)
