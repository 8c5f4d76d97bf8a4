"""A checkpoint folder, opened by its headers alone. Only ever read, never written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zaya_tools.checkpoint.header import Header, read_header
from zaya_tools.checkpoint.ranges import Files, read_range
from zaya_tools.dtypes import Bytes
from zaya_tools.errors import SourceError, listing
from zaya_tools.tensors import TensorInfo

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
MAX_JSON = 256_000_000
BLOCK = 4 * 2**20
"""Bytes that are read, converted or written at a time: large enough for full disk speed. A multiple of a disk page."""


@dataclass(frozen=True)
class Source:
    """Config, tensors by name, and the headers of the files that hold them.

    `folder` is the checkpoint itself, a single file included; tokenizer and the like are looked for in `sides`
    (None: in the folder). `ignored` are safetensors files beside the checkpoint that its index does not name,
    `notes` what else its reader should be told. `replicas` are pairs of tensors of which only the first is used,
    because ranks hold the same tensor: whoever converts makes sure that they do. `stamp` tells what was asked for
    while opening that neither config nor headers show.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    headers: tuple[Header, ...]
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    replicas: tuple[tuple[TensorInfo, TensorInfo], ...] = ()
    sides: Path | None = None
    stamp: Mapping[str, Any] = field(default_factory=dict)

    @property
    def side_folder(self) -> Path:
        """Where tokenizer, chat template and the like are."""
        return self.sides or self.folder

    @property
    def weight_names(self) -> frozenset[str]:
        """What in the side folder holds the weights that were opened."""
        inside = (header.file for header in self.headers if header.file.is_relative_to(self.side_folder))
        return frozenset(file.relative_to(self.side_folder).parts[0] for file in inside)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; SourceError when it is missing, too large, or something else."""
    try:
        if file.stat().st_size > MAX_JSON:
            raise SourceError(f"{file.name} is larger than {MAX_JSON:,} bytes")
        text = file.read_text("utf-8")
        if text.startswith("version https://git-lfs"):
            raise SourceError(f"{file.name} is a Git LFS pointer, not the file itself", "run `git lfs pull`")
        value = json.loads(text)
    except FileNotFoundError as error:
        raise SourceError(f"{file.parent}: no {file.name}", "a checkpoint folder has one beside its weights") from error
    except OSError as error:
        raise SourceError(f"{file.name} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise SourceError(f"{file.name} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise SourceError(f"{file.name} does not hold a JSON object")
    return value


def open_source(folder: Path, override: Mapping[str, Any] | None = None) -> Source:
    """Open a folder of safetensors files from its config, index and headers.

    `override` completes or replaces keys of the config, and stands in for it where there is none.
    Raises SourceError for a missing config or weights, an index that points outside the folder or disagrees
    with the files, a tensor in two files, and any file whose header does not hold (see `read_header`).
    """
    if not folder.is_dir():
        kind = "is a file, not a checkpoint folder" if folder.exists() else "does not exist"
        raise SourceError(
            f"{folder} {kind}", "give a folder with config.json and safetensors files, or a hub id like org/name"
        )
    # Hidden files are other programs': macOS puts a ._name beside every name on foreign disks.
    present = sorted(file.name for file in folder.glob("*.safetensors") if not file.name.startswith("."))
    weight_map = _weight_map(folder)
    if weight_map is None:
        files = present
        if not files:
            _explain_no_weights(folder)
    else:
        files = sorted(set(weight_map.values()))
        absent = [name for name in files if not (folder / name).exists()]
        if absent:
            raise SourceError(
                f"{len(absent)} of {len(files)} files that {INDEX} names are missing: {listing(absent)}",
                "the download is not complete",
            )
    config = {} if override and not (folder / CONFIG).exists() else read_json(folder / CONFIG)
    with ThreadPoolExecutor(max_workers=min(8, len(files))) as pool:
        headers = tuple(pool.map(lambda name: read_header(folder / name), files))
    tensors = _merge(headers)
    if weight_map is not None:
        _check_index(weight_map, tensors)
    if not tensors:
        raise SourceError(f"{folder}: the safetensors files hold no tensors")
    ignored = tuple(name for name in present if name not in files)
    return Source(folder, {**config, **(override or {})}, tensors, headers, ignored)


def _explain_no_weights(folder: Path) -> None:
    pickles = [p.name for p in sorted(folder.iterdir()) if p.suffix in {".bin", ".pt", ".pth", ".distcp"}]
    if pickles:
        raise SourceError(
            f"{folder}: no safetensors files, only pickles of unknown use ({listing(pickles, 2)})",
            "give the file with the model's weights itself",
        )
    raise SourceError(f"{folder}: no safetensors files", "give the folder that holds the weights")


def _weight_map(folder: Path) -> dict[str, str] | None:
    index = folder / INDEX
    if not index.exists() and not index.is_symlink():  # a dangling link is a broken index, not a missing one
        return None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise SourceError(f"{INDEX} has no weight_map of file names")
    for tensor, name in weight_map.items():
        # A link inside the folder is fine (model caches are made of them); a name that leaves it is not.
        if name in {"", ".", ".."} or "/" in name or "\\" in name or "\0" in name:
            raise SourceError(
                f"{INDEX} points {tensor} at {name!r}, which is not a file name inside the folder",
                "an index may only name files beside it",
            )
    return weight_map


def _merge(headers: tuple[Header, ...]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise SourceError(
                    f"{tensor.name} is in two files: {tensors[tensor.name].file.name} and {header.file.name}",
                    "remove the file that does not belong to this checkpoint",
                )
            tensors[tensor.name] = tensor
    return tensors


def _check_index(weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    absent = [name for name in weight_map if name not in tensors or tensors[name].file.name != weight_map[name]]
    if absent:
        raise SourceError(
            f"{INDEX} promises {listing(absent, 3)} in {weight_map[absent[0]]}, which does not hold it",
            "index and files are of different checkpoints, or a file was replaced",
        )
    surplus = [name for name in tensors if name not in weight_map]
    if surplus:
        raise SourceError(
            f"{tensors[surplus[0]].file.name} holds {listing(surplus, 3)}, which {INDEX} does not name",
            "index and files are of different checkpoints",
        )


def read_bytes(tensor: TensorInfo) -> Bytes:
    """All bytes of one tensor, uint8 [nbytes]. For small tensors: the engine streams large ones."""
    return read_stretch(tensor, 0, tensor.nbytes)


def read_stretch(tensor: TensorInfo, offset: int, nbytes: int) -> Bytes:
    """Bytes [offset, offset + nbytes) of a tensor."""
    data = np.empty(nbytes, np.uint8)
    with Files() as files:
        read_range(tensor, offset, data, files)
    return data


def stretches(tensor: TensorInfo) -> Iterator[tuple[int, Bytes]]:
    """(offset, bytes) of a tensor, BLOCK bytes at a time."""
    return zip(range(0, tensor.nbytes, BLOCK), read_stretches(tensor, 0, tensor.nbytes), strict=True)


def read_stretches(tensor: TensorInfo, start: int, nbytes: int) -> Iterator[Bytes]:
    """Bytes [start, start + nbytes) of a tensor, BLOCK of them at a time."""
    with Files() as files:
        for offset in range(0, nbytes, BLOCK):
            data = np.empty(min(BLOCK, nbytes - offset), np.uint8)
            read_range(tensor, start + offset, data, files)
            yield data


def same_bytes(first: TensorInfo, second: TensorInfo) -> bool:
    """Whether two tensors of equal dtype and shape hold the same bytes, compared a block at a time."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    pairs = zip(stretches(first), stretches(second), strict=True)
    return all(np.array_equal(one, two) for (_, one), (_, two) in pairs)
