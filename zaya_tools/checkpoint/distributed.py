"""Distributed checkpoints: a folder of `.distcp` files, and `.metadata` that says what lies where in them.

The folder is what `torch.distributed.checkpoint` writes, Megatron's torch_dist format included. Its own reader would
run whatever `.metadata` says, so that is read as every other pickle here; each chunk is a small file of `torch.save`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from zaya_tools.checkpoint.header import Header
from zaya_tools.checkpoint.pickles import Dtype, Record, StoredTensor, read_pickle
from zaya_tools.checkpoint.pieces import Box, assembled
from zaya_tools.checkpoint.source import CONFIG, Source, read_json
from zaya_tools.checkpoint.statedict import arguments, config_of, header_of, iteration, notes_on, unwrapped
from zaya_tools.checkpoint.torchfile import MAX_PICKLE, TorchFile, read_torch_file
from zaya_tools.dtypes import SIZES
from zaya_tools.errors import SourceError, listing
from zaya_tools.layouts.config_values import Config
from zaya_tools.tensors import TensorInfo

METADATA, COMMON, KIND = ".metadata", "common.pt", "metadata.json"
_MODEL = re.compile(r"(decoder|embedding|output_layer|model|lm_head)\.")
_OTHERS = re.compile(r"(^|\.)(optimizers?|optim|opt_param_scheduler|rng_state|rerun_state_machine_state|schedulers?|"
                     r"lr_scheduler|progress|dataloader|train_state)(\.|/|_|$)")  # fmt: skip
_DAMAGED = "the checkpoint is damaged, or of a torch release that is not known"


def is_distributed(folder: Path) -> bool:
    """Whether a folder is a distributed checkpoint."""
    return (folder / METADATA).is_file()


def open_distributed(folder: Path, override: Config) -> Source:
    """The model in a distributed checkpoint, chunk by chunk where several ranks saved it; nothing else is looked at.

    The config is that of `common.pt`'s arguments, else config.json beside, completed by `override`. SourceError for
    missing, cut off, compressed or overlapping chunks.
    """
    raw, table, stored = _metadata(folder)
    names = {unwrapped(name): name for name in table if _is_model(name)}
    if not names:
        raise SourceError(f"{folder} holds no model ({listing(sorted(table), 3)})", "give the folder with its weights")
    if len(names) != sum(map(_is_model, table)):
        raise SourceError(f"{folder}: one tensor under two names, with and without a prefix")
    places = _places(stored, folder)
    tensors = {}
    for short, full in names.items():
        if _tensor_entry(table[full]):
            tensors[short] = _tensor(folder, short, table[full], places.get(full, {}))
    common = read_torch_file(folder / COMMON, f"{folder.name}/{COMMON}") if (folder / COMMON).exists() else None
    config, said = _config(folder, common, override, tensors)
    others = sorted(name for name in table if not _is_model(name) and not _OTHERS.search(name))
    notes = list(said)
    if others:
        notes.append(f"no part of the model, and left alone: {listing(others)}")
    headers = _headers(folder, raw, tensors)
    if common is not None:  # which iteration it is: another one may have chunks of the same sizes in the same places
        headers = (*headers, header_of(common, {}, ""))
    return Source(folder, config, tensors, headers, notes=tuple(notes))


def _is_model(name: str) -> bool:
    return bool(_MODEL.match(unwrapped(name))) and not _OTHERS.search(name)


def _tensor_entry(entry: Any) -> bool:
    return isinstance(entry, Record) and entry.kind.endswith(".TensorStorageMetadata")


def _metadata(folder: Path) -> tuple[bytes, Mapping[str, Record], Mapping[Any, Any]]:
    """(raw bytes, what there is by name, where it is) of `.metadata`."""
    if (folder / KIND).exists():
        backend = read_json(folder / KIND).get("sharded_backend", "torch_dist")
        if backend != "torch_dist":
            raise SourceError(f"{folder} is in the {backend} format", "save it as torch_dist, or in the torch format")
    file = folder / METADATA
    try:
        if file.stat().st_size > MAX_PICKLE:
            raise SourceError(f"{file} is larger than {MAX_PICKLE:,} bytes")
        raw = file.read_bytes()
    except OSError as error:
        raise SourceError(f"{file} cannot be read: {error.strerror}") from error
    values = read_pickle(raw, f"{folder.name}/{METADATA}")
    fields = values.fields() if isinstance(values, Record) else {}
    table, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(table, Mapping) or not isinstance(stored, Mapping):
        raise SourceError(f"{file} does not say what the checkpoint holds", _DAMAGED)
    return raw, {name: entry for name, entry in table.items() if isinstance(name, str)}, stored


Place = tuple[str, int, int]
"""File name, first byte and length of a chunk as saved."""


def _places(stored: Mapping[Any, Any], folder: Path) -> dict[str, dict[tuple[int, ...] | None, Place]]:
    """Where every chunk is: by name, then by its offsets in the tensor."""
    places: dict[str, dict[tuple[int, ...] | None, Place]] = {}
    for index, info in stored.items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise SourceError(f"{folder / METADATA} has an entry that is no storage info", _DAMAGED)
        key, found = index.fields(), info.fields()
        name, offset = key.get("fqn"), key.get("offset")
        if not isinstance(name, str) or not _is_model(name):
            continue
        place = (found.get("relative_path"), found.get("offset"), found.get("length"))
        path, start, length = place
        if not (isinstance(path, str) and isinstance(start, int) and isinstance(length, int)):
            raise SourceError(f"{folder / METADATA}: {name} has no file, offset and length", _DAMAGED)
        if path in {"", ".", ".."} or "/" in path or "\\" in path or "\0" in path:
            raise SourceError(
                f"{folder / METADATA} points {name} at {path!r}, which is not a file name inside the folder",
                "a checkpoint may only name files beside its metadata",
            )
        if found.get("transform_descriptors"):
            raise SourceError(
                f"{folder}: {name} was transformed when it was saved ({found['transform_descriptors']})",
                "save it without compression or other stream extensions",
            )
        places.setdefault(name, {})[_numbers(offset, name) if offset is not None else None] = (path, start, length)
    return places


def _numbers(values: Any, name: str) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(isinstance(value, int) for value in values):
        raise SourceError(f"{METADATA}: {name} has sizes or offsets that are no numbers", _DAMAGED)
    return values


def _tensor(folder: Path, name: str, entry: Record, places: Mapping[tuple[int, ...] | None, Place]) -> TensorInfo:
    fields = entry.fields()
    properties, chunks = fields.get("properties"), fields.get("chunks")
    shape = _numbers(fields.get("size"), name)
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Dtype) or dtype.name not in SIZES or not isinstance(chunks, list):
        raise SourceError(f"{METADATA}: {name} has no dtype that a ZAYA1 tensor has, or no chunks", _DAMAGED)
    parts = []
    for chunk in chunks:
        box = chunk.fields() if isinstance(chunk, Record) else {}
        offsets, sizes = _numbers(box.get("offsets"), name), _numbers(box.get("sizes"), name)
        place = places.get(offsets)
        if place is None:
            raise SourceError(f"{METADATA}: the chunk of {name} at {list(offsets)} is stored nowhere", _DAMAGED)
        parts.append(_chunk(folder, name, dtype.name, (offsets, sizes), place))
    return assembled(name, dtype.name, shape, parts)


def _chunk(folder: Path, name: str, dtype: str, box: Box, place: Place) -> tuple[Box, Path, int]:
    path, start, length = place
    file = folder / path
    if not file.exists():
        raise SourceError(f"{folder}: {path} is missing, which holds {name}", "copy the files of all ranks")
    opened = read_torch_file(file, f"{folder.name}/{path}", start, length)
    if not isinstance(opened.values, StoredTensor):
        raise SourceError(f"{folder / path}: what is stored for {name} is no tensor", _DAMAGED)
    tensor = opened.tensor(name, opened.values)
    if (tensor.dtype, tensor.shape) != (dtype, box[1]):
        raise SourceError(
            f"{folder / path}: {name} is stored as {tensor.dtype} {list(tensor.shape)}, the metadata say {dtype} "
            f"{list(box[1])}",
            _DAMAGED,
        )
    return box, file, tensor.start


def _config(
    folder: Path, common: TorchFile | None, override: Config, tensors: Mapping[str, TensorInfo]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The config, and what to say about the run."""
    args, steps = (arguments(common), iteration(common)) if common is not None else (None, None)
    if args is None and not override and not (folder / CONFIG).exists():
        raise SourceError(
            f"{folder} has no saved arguments ({COMMON}) and no {CONFIG}: the model's geometry is not known",
            "--config FILE gives it: a config.json of this model",
        )
    named = re.fullmatch(r"iter_(\d{7,})", folder.name)
    if named and steps is not None and int(named[1]) != steps:
        raise SourceError(f"{folder} holds iteration {steps}", "the folder has another checkpoint's name")
    stated = config_of(args, tensors) if args is not None else {}
    if args is None and (folder / CONFIG).exists():
        stated = read_json(folder / CONFIG)
    said = "distributed checkpoint" + ("" if steps is None else f" of iteration {steps}")
    more = notes_on({**args, **override}, tensors) if args is not None else ()
    return {**stated, **override}, (f"{said}; optimizer and random state were not read", *more)


def _headers(folder: Path, raw: bytes, tensors: Mapping[str, TensorInfo]) -> tuple[Header, ...]:
    metadata = Header(folder / METADATA, len(raw), blake3(raw).digest(), ())
    starts: dict[Path, list[int]] = {}
    for tensor in tensors.values():
        for file, start in [(c.file, c.start) for c in tensor.chunks] or [(tensor.file, tensor.start)]:
            starts.setdefault(file, []).append(start)
    files: Sequence[Header] = [
        Header(file, file.stat().st_size, blake3(str(sorted(found)).encode()).digest(), ())
        for file, found in sorted(starts.items())
    ]
    return (metadata, *files)
