"""Distributed checkpoints that are damaged or lie, and values of every kind where others belong."""

from __future__ import annotations

import pickle
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.trained import FILE, A, refused
from tests.megatron import (
    save,
    trainer_args,
    trainer_state,
    write_distributed,
)
from tests.synthetic import small
from zaya_tools.checkpoint.inspection import inspect
from zaya_tools.errors import ZayaError


def spoiled(change: Callable[[Any, Path], Any]) -> Callable[[Path], None]:
    """Change what `.metadata` says, trusted here, and write it back."""

    def run(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata, folder)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return run


NAME = "decoder.layers.1.zaya_block.local_experts.0.linear_fc1.weight"


def stored(metadata: Any) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == NAME)


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no file": (lambda folder: (folder / "__0_0.distcp").unlink(), r"__0_0\.distcp is missing"),
    "cut off": (lambda folder: _truncate(folder / "__0_0.distcp"), "promises .* bytes, has"),
    "no metadata": (lambda folder: (folder / ".metadata").write_bytes(b""), "pickle is damaged"),
    "other metadata": (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({})), "does not say what"),
    "zarr": (lambda folder: (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "zarr format"),
    "leaves the folder": (
        spoiled(lambda m, _: setattr(stored(m), "relative_path", "../__0_0.distcp")), "not a file name inside"),
    "absolute": (spoiled(lambda m, _: setattr(stored(m), "relative_path", "/etc/passwd")), "not a file name inside"),
    "offset": (spoiled(lambda m, _: setattr(stored(m), "offset", stored(m).offset + 64)), "."),
    "negative": (spoiled(lambda m, _: setattr(stored(m), "offset", -5)), "promises"),
    "a text for a number": (spoiled(lambda m, _: setattr(stored(m), "length", "9")), "no file, offset and length"),
    "compressed": (
        spoiled(lambda m, _: setattr(stored(m), "transform_descriptors", ["zstd"])), "transformed when it was saved"),
    "another shape": (
        spoiled(lambda m, _: setattr(m.state_dict_metadata[NAME], "size", torch.Size([64, 33]))), "hold some twice"),
    "another dtype": (
        spoiled(lambda m, _: setattr(m.state_dict_metadata[NAME].properties, "dtype", torch.float32)), "is stored as"),
    "stored nowhere": (
        spoiled(lambda m, _: [m.storage_data.pop(i) for i in list(m.storage_data) if i.fqn == NAME]), "stored nowhere"),
    "chunk twice": (
        spoiled(lambda m, _: m.state_dict_metadata[NAME].chunks.append(m.state_dict_metadata[NAME].chunks[0])),
        "hold some twice",
    ),
    "no arguments": (lambda folder: (folder / "common.pt").unlink(), "has no saved arguments"),
    "another iteration": (
        lambda folder: save(folder / "common.pt", {"args": trainer_args(A), "iteration": 7}), "holds iteration 7"),
    "no model": (
        spoiled(lambda m, _: m.state_dict_metadata.clear()), "holds no model"),
}  # fmt: skip


def _truncate(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 50)


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_distributed_checkpoints(tmp_path: Path, case: str) -> None:
    spoil, message = DAMAGED[case]
    write_distributed(tmp_path / "iter_0000100", A)
    spoil(tmp_path / "iter_0000100")
    refused(message, tmp_path / "iter_0000100")


def test_what_else_a_distributed_checkpoint_holds_is_named(tmp_path: Path) -> None:
    state = {**trainer_state(A), "teacher.weight": torch.zeros(3)}
    write_distributed(tmp_path / "iter_0000100", A, state)
    notes = inspect(tmp_path / "iter_0000100").notes
    assert any("left alone: teacher.weight" in note for note in notes)


_ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
    | st.tuples(inner, inner),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("args", "iteration", "model", "model0", "module"), _ODD)))
def test_any_values_in_a_ranks_file_are_refused_in_words(state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "iter_0000100" / "mp_rank_00" / FILE, state)
        for place in (Path(folder) / "iter_0000100", Path(folder) / "iter_0000100" / "mp_rank_00" / FILE):
            with pytest.raises(ZayaError):
                inspect(place)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(vars(trainer_args(A)))), _ODD)
def test_any_argument_may_be_anything(key: str, value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "model.pt", {"args": trainer_args(A, **{key: value}), "model": trainer_state(A)})
        with suppress(ZayaError):  # of many arguments nothing is wanted
            inspect(Path(folder) / "model.pt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "iter_0000100"
    write_distributed(folder, small(blocks=1, experts=1))
    return folder


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_bytes_of_the_metadata_that_changed(whole: Path, data: st.DataObject) -> None:
    raw = bytearray((whole / ".metadata").read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "iter_0000100"
        shutil.copytree(whole, place)
        for _ in range(data.draw(st.integers(1, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        (place / ".metadata").write_bytes(bytes(raw))
        with suppress(ZayaError):  # the optimizer's entries may change unseen
            inspect(place)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_values_of_the_metadata_that_are_others(whole: Path, data: st.DataObject) -> None:
    metadata = pickle.loads((whole / ".metadata").read_bytes())
    name = "decoder.final_norm.weight"
    entry = metadata.state_dict_metadata[name]
    index = next(index for index in metadata.storage_data if index.fqn == name)
    where = [
        (metadata, "state_dict_metadata"), (metadata, "storage_data"), (entry, "size"), (entry, "chunks"),
        (entry, "properties"), (entry.chunks[0], "offsets"), (entry.chunks[0], "sizes"),
        (metadata.storage_data[index], "relative_path"), (metadata.storage_data[index], "offset"),
        (metadata.storage_data[index], "length"), (metadata.storage_data[index], "transform_descriptors"),
    ]  # fmt: skip
    place, field = data.draw(st.sampled_from(where))
    setattr(place, field, data.draw(_ODD))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "iter_0000100"
        shutil.copytree(whole, copy)
        (copy / ".metadata").write_bytes(pickle.dumps(metadata))
        with suppress(ZayaError):  # a few odd values mean the same
            inspect(copy)
