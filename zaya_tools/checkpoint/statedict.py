"""What a pickled checkpoint holds: the model's tensors by name, the saved arguments, the iteration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from blake3 import blake3

from zaya_tools.checkpoint.header import Header
from zaya_tools.checkpoint.pickles import Record, StoredTensor
from zaya_tools.checkpoint.torchfile import TorchFile
from zaya_tools.errors import LayoutError, SourceError
from zaya_tools.layouts.config_values import Config
from zaya_tools.layouts.megatron import MEGATRON
from zaya_tools.layouts.megatron_config import config_of_arguments, parallel_sizes, unpadded_vocabulary
from zaya_tools.layouts.raw_config import declared
from zaya_tools.tensors import TensorInfo

_CONTAINERS = ("model", "state_dict", "model_state_dict", "module")
_STAGE = re.compile(r"model(\d+)")
_WRAPPERS = re.compile(
    r"^(?:module\.|_orig_mod\.|app\.|state_dict\.|model\.(?=(?:model|module|decoder|embedding|output_layer|lm_head)\.))+"
)
_DEPTH = 32


def unwrapped(name: str) -> str:
    """A tensor's name without what data parallelism, compilers and trainers put in front of it."""
    return _WRAPPERS.sub("", name)


def model_parts(file: TorchFile) -> list[dict[str, TensorInfo]]:
    """The model's tensors by unwrapped name: one table, or one a virtual pipeline stage (`model0`, `model1`, ...).

    Optimizer and everything else beside the model is left alone. SourceError where there is no model, or one tensor
    under two names.
    """
    values = file.values
    if isinstance(values, Record):
        values = values.fields()
    if not isinstance(values, Mapping):
        raise SourceError(f"{file.where} holds {_kind(values)}, not a state dict")
    stages = {int(found[1]): values[key] for key in values if isinstance(key, str) and (found := _STAGE.fullmatch(key))}
    if stages and sorted(stages) != list(range(len(stages))):
        raise SourceError(f"{file.where} has the pipeline stages {sorted(stages)}: some are missing")
    container = next((key for key in _CONTAINERS if isinstance(values.get(key), Mapping)), None)
    if stages:
        chosen = [stages[number] for number in range(len(stages))]
    elif container is not None:
        chosen = [values[container]]
    else:
        chosen = [{key: value for key, value in values.items() if isinstance(value, StoredTensor)}]
    parts = [_table(file, part) for part in chosen]
    if not any(parts):
        held = ", ".join(sorted(str(key) for key in values)[:5])
        raise SourceError(
            f"{file.where} holds no model ({held or 'nothing'})", "give the file with the model's weights"
        )
    return parts


def _kind(value: Any) -> str:
    return "a single tensor" if isinstance(value, StoredTensor) else f"a {type(value).__name__}"


def _table(file: TorchFile, part: Any) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for name, stored in _flat(part, "", 0):
        short = unwrapped(name)
        if not short.isprintable():
            raise SourceError(f"{file.where}: the tensor name {short!r} has unprintable characters")
        if short in found:
            raise SourceError(f"{file.where}: one tensor under two names: {name} and another {short}")
        found[short] = file.tensor(short, stored)
    return found


def _flat(part: Any, prefix: str, depth: int) -> Iterator[tuple[str, StoredTensor]]:
    if not isinstance(part, Mapping) or depth > _DEPTH:
        return
    for key, value in part.items():
        name = f"{prefix}{key}"
        if isinstance(value, StoredTensor):
            yield name, value
        else:
            yield from _flat(value, f"{name}.", depth + 1)


def arguments(file: TorchFile) -> Mapping[str, Any] | None:
    """The arguments that a trainer saved beside the model, by name; None where there are none."""
    values = file.values
    args = values.get("args") if isinstance(values, Mapping) else None
    table = args.fields() if isinstance(args, Record) else args
    if not isinstance(table, Mapping) or not table:
        return None
    return {key: value for key, value in table.items() if isinstance(key, str)}


def iteration(file: TorchFile) -> int | None:
    """The iteration that a trainer saved, None where there is none."""
    found = file.values.get("iteration") if isinstance(file.values, Mapping) else None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


@contextmanager
def _about_arguments() -> Iterator[None]:
    """Errors about a config speak of the saved arguments, which are a run's config."""
    try:
        yield
    except LayoutError as error:
        message = error.message.replace("config.json says", "the saved arguments say")
        message = message.replace("config.json contradicts itself", "the saved arguments contradict themselves")
        hint = error.hint or "--config FILE completes or replaces what the trainer saved"
        raise LayoutError(message.replace("config.json", "the saved arguments"), hint) from error


def config_of(args: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """`config_of_arguments`, with errors that speak of the arguments."""
    shapes = (tensor.shape for name, tensor in tensors.items() if name.endswith(".linear_fc2.weight"))
    with _about_arguments():
        return config_of_arguments(args, next((shape[1] for shape in shapes if len(shape) == 2), None))


def notes_on(args: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    """What the arguments leave open, or say beside the point, that a person may want to settle."""
    notes = []
    with _about_arguments():
        tokens = unpadded_vocabulary(args)
    shapes = (tensor.shape for name, tensor in tensors.items() if MEGATRON.canonical(name) == MEGATRON.embedding)
    rows = next((shape[0] for shape in shapes if shape), 0)
    if tokens and rows > tokens > 0:
        notes.append(
            f"the embedding has {rows:,} rows for a vocabulary of {tokens:,}: the padding is kept "
            f"(--vocab-size {tokens} drops it)"
        )
    if "eos_token_id" not in args:
        notes.append("the run does not say its special tokens: end 1, begin 2, padding 0, unless --config says others")
    return tuple(notes)


def sizes_of(args: Mapping[str, Any]) -> dict[str, int]:
    """`parallel_sizes`, with errors that speak of the arguments."""
    with _about_arguments():
        return parallel_sizes(args)


def stated_in(config: Config) -> dict[str, Any]:
    """What a run's config says, by Architecture field, with errors that speak of the arguments."""
    with _about_arguments():
        return declared(config)


def header_of(file: TorchFile, tensors: Mapping[str, TensorInfo], label: str) -> Header:
    """The file as records and fingerprints know it; its pickle, which also has the iteration, by digest."""
    return Header(file.file, file.file.stat().st_size, blake3(file.raw).digest(), tuple(tensors.values()), label)
