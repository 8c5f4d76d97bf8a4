"""Opens whatever a checkpoint is on disk: safetensors, pickled state dicts, a Megatron run or one iteration of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from zaya_tools.architecture import Architecture
from zaya_tools.checkpoint.distributed import is_distributed, open_distributed
from zaya_tools.checkpoint.pieces import first_rows, with_fused_gates
from zaya_tools.checkpoint.ranks import is_ranks, open_ranks
from zaya_tools.checkpoint.sidefiles import TRACKER
from zaya_tools.checkpoint.source import CONFIG, Source, open_source, read_json
from zaya_tools.checkpoint.statedict import arguments, config_of, header_of, model_parts, notes_on
from zaya_tools.checkpoint.torchfile import read_torch_file
from zaya_tools.errors import LayoutError, SourceError, ZayaError, listing
from zaya_tools.layouts import native_config, raw_config
from zaya_tools.layouts.config_values import Config
from zaya_tools.layouts.detect import RAW_FAMILY, detect
from zaya_tools.tensors import TensorInfo

_ITERATION = re.compile(r"iter_(\d{7,})")
_RELEASE = "release"
_STATE_DICT = re.compile(r"pytorch_model(-\d+-of-\d+)?\.(bin|pt|pth)")


@dataclass(frozen=True)
class Reading:
    """What a person adds to a checkpoint.

    `iteration` is a number, "latest" (as without one) or "release", of a run; `config` is a file with keys that
    complete or replace those of the checkpoint's config, raw or native ones; `vocab_size` drops the embedding's rows
    from there on, which are padding; `tokenizer` is the folder of tokenizer, chat template and the like.
    """

    iteration: str | None = None
    config: Path | None = None
    vocab_size: int | None = None
    tokenizer: Path | None = None


def open_checkpoint(path: Path, reading: Reading | None = None) -> Source:
    """Open a checkpoint by its headers, or by its pickles' own tables; no weights are read, and nothing is run.

    `path` is a folder of safetensors files or of `pytorch_model*.bin`, a Megatron run or one of its iterations in
    torch or torch_dist format, or a single `.pt` or `.bin` file. Raises SourceError or LayoutError as these do.
    """
    reading = reading or Reading()
    override = _given(reading.config) if reading.config else {}
    place = _iteration(path, reading.iteration)
    opened = _open(place, override)
    opened = replace(opened, folder=place, tensors=with_fused_gates(opened.tensors), stamp=_stamp(reading))
    if reading.vocab_size is not None:
        opened = _without_padding(opened, reading.vocab_size)
    if reading.tokenizer is not None:
        if not reading.tokenizer.is_dir():
            raise SourceError(f"{reading.tokenizer} is no folder", "--tokenizer takes the folder with tokenizer.json")
        return replace(opened, sides=reading.tokenizer)
    if place != path and not (place / "tokenizer_config.json").exists():
        return replace(opened, sides=path)  # a run has its tokenizer once, not in every iteration
    return opened


def _given(config: Path) -> dict[str, Any]:
    try:
        return read_json(config)
    except SourceError as error:
        raise SourceError(error.message, "--config takes a JSON file: a config.json, or some of its keys") from error


def _open(place: Path, override: Config) -> Source:
    if is_ranks(place):
        return open_ranks(place, _translated(override) if _foreign(override) else override)
    opened = _open_any(place, override)
    if not _foreign(override) or detect(opened.tensors, str(place)) not in RAW_FAMILY:
        return opened
    kept = {key: value for key, value in opened.config.items() if key not in override}
    return replace(opened, config={**kept, **_translated(override)})


def _open_any(place: Path, override: Config) -> Source:
    if place.is_file():
        return _open_files([place], place, override)
    if is_distributed(place):
        return open_distributed(place, override)
    if place.is_dir() and not any(place.glob("*.safetensors")):
        pickles = sorted(entry for entry in place.iterdir() if _STATE_DICT.fullmatch(entry.name))
        if pickles:
            return _open_files(pickles, place, override)
    return open_source(place, override)


def _iteration(path: Path, wanted: str | None) -> Path:
    """The folder of the iteration that is wanted of a run; `path` itself where it is no run."""
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    found = sorted(name for name in names if _ITERATION.fullmatch(name) or name == _RELEASE)
    whole = any(name.endswith(".safetensors") for name in names) or is_distributed(path) or is_ranks(path)
    if wanted is None and (whole or not (found or TRACKER in names)):
        return path
    if not found and TRACKER not in names:
        raise SourceError(f"{path} has no iterations to choose from", "--iteration is for the folder of a run")
    have = f"there are {listing(found)}" if found else "there are none"
    if wanted in (None, "latest"):
        if TRACKER not in names:
            raise SourceError(f"{path} has no {TRACKER} to say which iteration is the last; {have}", "give --iteration")
        wanted = _tracked(path / TRACKER)
    if wanted == _RELEASE:
        name = _RELEASE
    elif wanted.isascii() and wanted.isdigit():
        name = f"iter_{int(wanted):07d}"
    else:
        raise SourceError(f"{wanted!r} is no iteration", "give a number, latest or release")
    if name not in found:
        raise SourceError(f"{path} has no {name}; {have}", "choose one with --iteration")
    return path / name


def _tracked(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            text = stream.read(64).decode("ascii", "replace").strip()
    except OSError as error:
        raise SourceError(f"{file} cannot be read: {error.strerror}") from error
    if text != _RELEASE and not text.isdigit():
        raise SourceError(f"{file} says {text!r}, which is no iteration", "choose one with --iteration")
    return text


def _open_files(files: list[Path], place: Path, override: Config) -> Source:
    """State dicts of `torch.save`, several as one model."""
    tensors: dict[str, TensorInfo] = {}
    headers = []
    args: Mapping[str, Any] | None = None
    for file in files:
        opened = read_torch_file(file)
        parts = model_parts(opened)
        if len(parts) > 1:
            raise SourceError(f"{file} holds {len(parts)} pipeline stages", "give the folder with all ranks")
        for name, tensor in parts[0].items():
            if name in tensors:
                raise SourceError(f"{name} is in two files: {tensors[name].file.name} and {file.name}")
            tensors[name] = tensor
        headers.append(header_of(opened, parts[0], ""))
        args = arguments(opened) if args is None else args
    beside = place.parent if place.is_file() else place
    if args is not None:
        config: Mapping[str, Any] = config_of(args, tensors)
    elif (beside / CONFIG).exists():
        config = read_json(beside / CONFIG)
    elif override:
        config = {}
    else:
        raise SourceError(
            f"{place} has no saved arguments, and there is no {CONFIG} beside it: the model's geometry is not known",
            "--config FILE gives it: a config.json of this model",
        )
    notes = () if args is None else notes_on({**args, **override}, tensors)
    return Source(place, {**config, **override}, tensors, tuple(headers), notes=notes, sides=beside)


def _foreign(override: Config) -> bool:
    """Whether a config is a native one, in which case it has to fit the tensors or be translated."""
    return bool(native_config.MARKERS & override.keys()) and not raw_config.MARKERS & override.keys()


def _translated(override: Config) -> Mapping[str, Any]:
    """A native config's geometry in the keys of the raw layout, for tensors that are in half-layers."""
    try:
        return raw_config.raw_config(Architecture(**native_config.declared(override)))
    except TypeError as error:
        raise LayoutError(
            f"--config has the keys of a native config, and not all that a geometry needs ({error})",
            "give a whole config.json, or keys of the raw layout",
        ) from error


def _without_padding(opened: Source, rows: int) -> Source:
    """The checkpoint with the first `rows` rows of embedding and output head."""
    layout = detect(opened.tensors, str(opened.folder))
    notes = []

    def cut(tensor: TensorInfo) -> TensorInfo:
        if layout.canonical(tensor.name) not in (layout.embedding, layout.head) or not tensor.shape:
            return tensor
        if not 0 < rows <= tensor.shape[0]:
            raise ZayaError(
                f"--vocab-size {rows:,} does not fit {tensor.name}, which has {tensor.shape[0]:,} rows",
                "give the number of tokens that the tokenizer has",
            )
        return first_rows(tensor, rows)

    tensors = {name: cut(tensor) for name, tensor in opened.tensors.items()}
    for name, tensor in opened.tensors.items():
        if (padding := len(tensor.shape) and tensor.shape[0] - tensors[name].shape[0]) > 0:
            notes.append(f"the last {padding:,} rows of {name} were dropped as padding (--vocab-size)")
    return replace(
        opened,
        tensors=tensors,
        config={**opened.config, "vocab_size": rows},
        notes=(*(note for note in opened.notes if "the padding is kept" not in note), *notes),
    )


def _stamp(reading: Reading) -> dict[str, Any]:
    """What decides the output and shows in neither config nor headers, for records."""
    stamp: dict[str, Any] = {}
    if reading.vocab_size is not None:
        stamp["vocab_size"] = reading.vocab_size
    if reading.config is not None:
        stamp["config_blake3"] = blake3(reading.config.read_bytes()).hexdigest()
    return stamp
