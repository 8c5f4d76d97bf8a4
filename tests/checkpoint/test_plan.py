"""Plans are pure: every property is checked on headers of files that do not exist."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import architectures
from tests.synthetic import (
    LAYOUTS,
    ZAYA1_8B,
    ZAYA1_74B,
    config_of,
    header,
    headers,
    logical,
    small,
    split,
    write_checkpoint,
)
from zaya_tools.architecture import Architecture
from zaya_tools.checkpoint.plan import (
    BAKE,
    CAST,
    COPY,
    KEEP,
    Output,
    Plan,
    build_plan,
    fingerprint,
    parse_size,
    target_layout,
)
from zaya_tools.checkpoint.source import open_source
from zaya_tools.dtypes import FLOATS, SIZES
from zaya_tools.errors import LayoutError, ZayaError
from zaya_tools.layouts.base import Layout
from zaya_tools.layouts.match import Match, match, require
from zaya_tools.layouts.megatron import MEGATRON
from zaya_tools.layouts.native import NATIVE
from zaya_tools.layouts.raw import RAW, SMOE
from zaya_tools.parameters import PROTECTED, Role, parameters
from zaya_tools.tensors import TensorInfo


def found_in(layout: Layout, architecture: Architecture, stored: dict[str, TensorInfo]) -> Match:
    return require(match(stored, config_of(layout, architecture)))


def target_of(found: Match, to: str) -> Layout:
    return RAW if to == "raw" else target_layout(found)


def with_leftovers(layout: Layout, architecture: Architecture) -> dict[str, TensorInfo]:
    """A complete checkpoint with everything beside it that conversion drops."""
    stored = headers(layout, architecture)
    position = sum(tensor.nbytes for tensor in stored.values())
    extra: dict[str, tuple[int, ...]] = {"model.layers.0.mlp.gate.router_states_scale": (architecture.router_width,)}
    if layout in (RAW, SMOE, MEGATRON):
        before = "decoder" if layout is MEGATRON else "model"
        router = f"{before}.layers.1." + ("smoe_block" if layout is SMOE else "zaya_block") + ".router."
        extra = {f"{router}router_states_scale": (architecture.router_width,), f"{router}balance_m": (3,)}
    if architecture.tied:
        extra["lm_head.weight"] = (architecture.vocab_size, architecture.hidden_size)
    for name, shape in extra.items():
        stored[name] = replace(header(name, shape), start=position)
        position += stored[name].nbytes
    return stored


def check_source_is_used_once(plan: Plan, stored: dict[str, TensorInfo]) -> None:
    used: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for output in plan.outputs():
        for piece in output.pieces:
            assert stored[piece.tensor.name] is piece.tensor
            used[piece.tensor.name].append((piece.offset, piece.offset + piece.nbytes))
    assert used.keys() == stored.keys() - plan.drops.keys()
    assert plan.drops.keys() <= stored.keys()
    for name, stretches in used.items():
        end = 0
        for start, stop in sorted(stretches):
            assert start == end < stop, name
            end = stop
        assert end == stored[name].nbytes, name


def check_shards(plan: Plan, limit: int) -> None:
    names = Counter(output.name for output in plan.outputs())
    assert set(names.values()) == {1}
    for number, shard in enumerate(plan.shards, 1):
        assert shard.filename == f"model-{number:05d}-of-{len(plan.shards):05d}.safetensors"
        assert shard.data_bytes <= limit or len(shard.outputs) == 1
        assert len(shard.header) % 8 == 0
        written = json.loads(shard.header[8:])
        assert int.from_bytes(shard.header[:8], "little") == len(shard.header) - 8
        assert written.pop("__metadata__") == {"format": "pt"}
        assert list(written) == [output.name for output in shard.outputs]
        position = 0
        for output in shard.outputs:
            assert position % SIZES[output.dtype] == 0, "not aligned to its elements"
            size = torch.Size(output.shape).numel() * SIZES[output.dtype]
            assert output.nbytes == size
            assert (
                sum(piece.nbytes for piece in output.pieces) // SIZES[output.source_dtype] * SIZES[output.dtype] == size
            )
            assert written[output.name] == {"dtype": output.dtype, "shape": list(output.shape),
                                            "data_offsets": [position, position + size]}  # fmt: skip
            position += size
        assert shard.nbytes == len(shard.header) + position
    index = plan.index()
    assert index["metadata"]["total_size"] == plan.data_bytes == sum(output.nbytes for output in plan.outputs())
    assert index["weight_map"] == {output.name: s.filename for s in plan.shards for output in s.outputs}
    assert plan.nbytes == sum(shard.nbytes for shard in plan.shards)


@settings(max_examples=120, deadline=None)
@given(
    architectures(),
    st.sampled_from(list(LAYOUTS.values())),
    st.sampled_from(["native", "raw"]),
    st.sampled_from([KEEP, *FLOATS]),
    st.integers(1, 20_000),
    st.randoms(use_true_random=False),
)
def test_every_source_byte_is_used_once_and_every_output_is_whole(
    architecture: Architecture, layout: Layout, to: str, dtype: str, limit: int, random: Any
) -> None:
    kinds = {p.name: random.choice(FLOATS) for p in parameters(architecture)}
    stored = with_leftovers(layout, architecture)
    stored |= headers(layout, architecture, lambda parameter, _: kinds[parameter.name])
    found = found_in(layout, architecture, stored)
    target = target_of(found, to)
    plan = build_plan(found, target, architecture, dtype=dtype, max_shard_bytes=limit)
    check_source_is_used_once(plan, stored)
    check_shards(plan, limit)
    expected = {part.name: (part.shape, p) for p in parameters(architecture) for part in target.parts(p, architecture)}
    assert {output.name for output in plan.outputs()} == expected.keys()
    for output in plan.outputs():
        shape, parameter = expected[output.name]
        assert output.shape == shape
        assert output.role is parameter.role
        assert output.source_dtype == kinds[parameter.name]
        check_dtype(output, dtype, target)


def check_dtype(output: Output, requested: str, target: Layout) -> None:
    assert output.operation == (COPY if output.dtype == output.source_dtype else CAST)
    widest = {"F32": 3, "F16": 1, "BF16": 1}
    if output.role is Role.BALANCING and target is not RAW:
        assert output.dtype == "F32"
    elif output.role in PROTECTED:
        # Never narrower, and never from one 16-bit type to the other: both lose values.
        assert output.dtype == output.source_dtype or widest[output.dtype] > widest[output.source_dtype]
        assert output.dtype in (output.source_dtype, requested)
        assert requested != "F32" or output.dtype == "F32"
    else:
        assert output.dtype == (output.source_dtype if requested == KEEP else requested)


@settings(max_examples=30, deadline=None)
@given(
    architectures(max_blocks=2, max_experts=11),
    st.sampled_from(list(LAYOUTS.values())),
    st.sampled_from(["native", "raw"]),
    st.integers(0, 5),
)
def test_the_planned_bytes_are_the_same_model_in_the_other_layout(
    architecture: Architecture, layout: Layout, to: str, seed: int
) -> None:
    values = logical(architecture, seed=seed)
    stored = split(layout, architecture, values)
    found = found_in(layout, architecture, headers(layout, architecture))
    target = target_of(found, to)
    expected = split(target, architecture, values)
    for output in build_plan(found, target, architecture).outputs():
        joined = b"".join(
            stored[p.tensor.name].view(torch.uint8).numpy().tobytes()[p.offset : p.offset + p.nbytes]
            for p in output.pieces
        )
        assert joined == expected[output.name].view(torch.uint8).numpy().tobytes(), output.name


@pytest.mark.parametrize(
    ("layout", "architecture", "before", "after"),
    [(RAW, ZAYA1_8B, 2483, 1283), (SMOE, ZAYA1_74B, 4683, 1923)],
    ids=["8B", "74B"],
)
def test_released_geometries_are_planned_from_headers(
    layout: Layout, architecture: Architecture, before: int, after: int
) -> None:
    stored = headers(layout, architecture)
    assert len(stored) == before
    found = found_in(layout, architecture, stored)
    plan = build_plan(found, NATIVE, architecture)
    check_source_is_used_once(plan, stored)
    check_shards(plan, 5 * 10**9)
    assert len(list(plan.outputs())) == after
    biases = architecture.blocks * (architecture.experts + 1)
    assert plan.data_bytes == sum(tensor.nbytes for tensor in stored.values()) + 2 * biases
    assert plan.read_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert max(shard.data_bytes for shard in plan.shards) > 4 * 10**9
    back = build_plan(found_in(NATIVE, architecture, planned(plan)), RAW, architecture)
    assert len(list(back.outputs())) == (2483 if layout is RAW else 4683)


def planned(plan: Plan) -> dict[str, TensorInfo]:
    """Headers of what a plan writes."""
    result = {}
    for shard in plan.shards:
        position = len(shard.header)
        for output in shard.outputs:
            tensor = header(output.name, output.shape, output.dtype, shard.filename)
            result[output.name] = replace(tensor, start=position)
            position += tensor.nbytes
    return result


@pytest.mark.parametrize("name", ["raw", "smoe", "native per expert"])
def test_parts_of_one_tensor_must_have_one_dtype(name: str) -> None:
    architecture, layout = small(), LAYOUTS[name]
    stored = headers(layout, architecture)
    part = layout.parts(next(p for p in parameters(architecture) if p.role is Role.EXPERT), architecture)[-1]
    stored[part.name] = header(part.name, part.shape, "F32")
    found = found_in(layout, architecture, stored)
    with pytest.raises(LayoutError, match=rf"{part.name} is F32 but .* is BF16"):
        build_plan(found, NATIVE, architecture)


def test_clamped_temperatures_are_baked_once_on_the_way_to_native() -> None:
    architecture = small(clamp_temp=True)
    for layout in (RAW, SMOE):
        found = found_in(layout, architecture, headers(layout, architecture))
        native = build_plan(found, NATIVE, replace(architecture, clamp_temp=False))
        baked = [output for output in native.outputs() if output.operation == BAKE]
        assert {output.role for output in baked} == {Role.TEMPERATURE}
        assert len(baked) == architecture.blocks
        assert {output.dtype for output in baked} == {"F32"}
        raw = build_plan(found, RAW, architecture)
        assert not [output for output in raw.outputs() if output.operation == BAKE]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_unquantized_experts_are_stacked_whatever_they_were(layout: Layout) -> None:
    assert target_layout(found_in(layout, small(), headers(layout, small()))) is NATIVE


def test_what_is_dropped_is_said_with_a_reason() -> None:
    found = found_in(RAW, small(), with_leftovers(RAW, small()))
    drops = build_plan(found, NATIVE, small()).drops
    assert "tied" in drops["lm_head.weight"]
    assert all(drops.values())
    assert len(drops) == 3


def test_one_shard_a_tensor_when_the_limit_is_a_byte() -> None:
    plan = build_plan(found_in(RAW, small(), headers(RAW, small())), NATIVE, small(), max_shard_bytes=1)
    assert [len(shard.outputs) for shard in plan.shards] == [1] * len(parameters(small()))
    check_shards(plan, 1)


def test_one_shard_when_everything_fits_exactly() -> None:
    found = found_in(RAW, small(), headers(RAW, small()))
    size = build_plan(found, NATIVE, small()).data_bytes
    assert len(build_plan(found, NATIVE, small(), max_shard_bytes=size).shards) == 1
    assert len(build_plan(found, NATIVE, small(), max_shard_bytes=size - 1).shards) == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("512MiB", 512 * 2**20), ("4000000000", 4 * 10**9), (" 1.5 gb ", 1_500_000_000), ("1B", 1),
     ("2tb", 2 * 10**12), ("3KiB", 3072), ("0.1", 1)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-5GB", "0", "0GB", "5 G B", "1e9", "5GB5", "nan", "٣x"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ZayaError, match="is not a size") as caught:
        parse_size(text)
    assert caught.value.hint


def test_a_fingerprint_changes_with_everything_that_decides_the_output(tmp_path: Path) -> None:
    def of(folder: Path, limit: int = 10_000, dtype: str = KEEP, **extra: Any) -> str:
        source = open_source(folder)
        found = require(match(source.tensors, source.config))
        plan = build_plan(found, NATIVE, found.architecture, dtype=dtype, max_shard_bytes=limit)
        return fingerprint(plan, source.headers, extra)

    write_checkpoint(tmp_path / "one", RAW, small())
    first = of(tmp_path / "one", a=1)
    assert of(tmp_path / "one", a=1) == first
    others = [of(tmp_path / "one", a=2), of(tmp_path / "one", limit=9_000, a=1), of(tmp_path / "one", dtype="F32", a=1)]
    write_checkpoint(tmp_path / "one", RAW, small(), seed=1)  # same header, written later
    others.append(of(tmp_path / "one", a=1))
    write_checkpoint(tmp_path / "two", RAW, small(experts=4))
    others.append(of(tmp_path / "two", a=1))
    assert len({first, *others}) == 6
