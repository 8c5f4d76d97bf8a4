"""The structural check of `zaya validate`: is this a whole, consistent checkpoint? From headers and small tensors.

Nothing here depends on a runtime, which may load a checkpoint with holes in it and say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from zaya_tools.architecture import native_config
from zaya_tools.checkpoint.source import same_bytes, stretches
from zaya_tools.dtypes import FLOATS, NAMES, SIZES, holds, nonfinite
from zaya_tools.evaluation.findings import CheckResult, Finding, about, plain
from zaya_tools.evaluation.opened import Opened, differences, open_model, open_reference
from zaya_tools.evaluation.quantized import CHECK, check_quantization
from zaya_tools.evaluation.scales import check_scales
from zaya_tools.evaluation.units import all_units
from zaya_tools.layouts.match import Match
from zaya_tools.parameters import Parameter, Role, parameters
from zaya_tools.tensors import TensorInfo

LARGE = frozenset({Role.EXPERT, Role.EMBEDDING, Role.HEAD, Role.ATTENTION})
"""Roles whose matrices are too large to be read here; everything else is scanned for NaN and infinity."""


def check_structure(
    folder: Path, reference: Path | None = None, *, quantized: frozenset[Role] = frozenset({Role.EXPERT})
) -> CheckResult:
    """Check a checkpoint of any layout from its headers, its scales, its small tensors and a sample of quantized rows.

    With a `reference` of any layout, the geometry has to be the reference's and protected parameters have to be in
    its dtypes or exact wider ones. `quantized` are the roles that have to be quantized, every matrix of them, where
    config.json has a quantization_config: by default the experts, which are most of any model. Where the manifest of
    `zaya quantize` is there, what it records has to be quantized instead. Raises SourceError when there is no such
    folder, and a ZayaError for a reference that cannot be read whole.
    """
    other = open_reference(reference) if reference is not None else None
    opened = open_model(folder, CHECK)
    if isinstance(opened, Finding):
        return CheckResult(CHECK, (opened,), {})
    found = opened.found
    findings = [
        *_problems(opened),
        *_config(opened),
        *_tied_head(found),
        *_stored_dtypes(opened),
        *_small_tensors(opened),
    ]
    from_quantization, figures, ready = check_quantization(opened, quantized)
    findings += from_quantization
    if ready:
        from_scales, scale_figures = check_scales(ready)
        findings += from_scales
        figures |= scale_figures
    if other is not None:
        findings += _against(opened, other)
    findings += [Finding(CHECK, "note", note) for note in found.notes]
    return CheckResult(
        CHECK,
        tuple(findings),
        {
            "layout": found.layout.name,
            "blocks": found.architecture.blocks,
            "experts": found.architecture.experts,
            "tensors": len(opened.source.tensors),
            "bytes": opened.source.nbytes,
            "parameters": len(parameters(found.architecture)),
            "matrices": len(all_units(found.architecture)),
            "missing": len(found.missing),
            "surplus": len(found.surplus),
            **figures,
        },
    )


def _problems(opened: Opened) -> Iterator[Finding]:
    """What the table finds wrong; the tensors that a line speaks of are found in it by their names."""
    found = opened.found
    missing, surplus = set(found.missing), set(found.surplus)
    known = opened.source.tensors.keys() | missing | surplus
    for problem in found.problems:
        words = re.findall(r"[\w.]+\w", problem)
        names = [word for word in words if word in known or word.count(".") > 1]
        strangers = [word for word in words if word in surplus]
        if strangers:  # the line may also name the nearest known tensor
            names = strangers
        elif missing.intersection(words):
            names = list(found.missing)
        yield Finding(CHECK, "fail", problem, tuple(dict.fromkeys(names)))


def _config(opened: Opened) -> Iterator[Finding]:
    if not opened.native:
        layout = opened.found.layout.name
        yield Finding(CHECK, "note", f"the checkpoint is in the {layout} layout, which released runtimes do not read")
        return
    wanted = native_config(opened.found.architecture)
    config = opened.source.config
    if config.get("model_type") != wanted["model_type"]:
        yield Finding(CHECK, "fail", f"config.json: model_type is {config.get('model_type')!r}, "
                      f"runtimes know this model as {wanted['model_type']!r}", ("model_type",))  # fmt: skip
    stated = config.get("architectures")
    if not isinstance(stated, list) or not set(wanted["architectures"]) & set(map(str, stated)):
        yield Finding(CHECK, "fail", f"config.json: architectures is {stated!r}, runtimes choose the model's class "
                      f"by {wanted['architectures'][0]!r} in it", ("architectures",))  # fmt: skip
    if opened.found.renamed:
        yield Finding(CHECK, "warn", "the tensors have names of earlier snapshots, which released runtimes refuse: "
                      "convert the checkpoint to native")  # fmt: skip


def _tied_head(found: Match) -> Iterator[Finding]:
    head = found.head_alias
    if head is None:
        return
    (embedding,) = found.bound["model.embed_tokens.weight"]
    if embedding.tensor is not None and not embedding.quantized and same_bytes(head, embedding.tensor):
        yield Finding(CHECK, "warn", f"{head.name} is stored although it is tied to the embedding, whose bytes it "
                      "repeats: strict loaders refuse it", (head.name,))  # fmt: skip
    else:
        yield Finding(CHECK, "fail", f"{head.name} is stored and differs from the embedding although config.json "
                      "ties them: runtimes would drop it in silence", (head.name,))  # fmt: skip


def _full(opened: Opened) -> Iterator[tuple[Parameter, TensorInfo]]:
    for parameter in parameters(opened.found.architecture):
        for bound in opened.found.bound[parameter.name]:
            if bound.tensor is not None and not bound.quantized:
                yield parameter, bound.tensor


def _stored_dtypes(opened: Opened) -> Iterator[Finding]:
    """Full-precision tensors that a runtime will cast: it holds the model in the config's dtype."""
    if not opened.native:
        return
    stated = NAMES.get(opened.found.architecture.dtype)
    cast: list[tuple[str, str]] = []
    narrow: list[str] = []
    for parameter, tensor in _full(opened):
        if parameter.float32:
            if tensor.dtype != "F32":
                narrow.append(tensor.name)
        elif stated is not None and not parameter.protected and not holds(stated, tensor.dtype):
            cast.append((tensor.name, tensor.dtype))
    if narrow:
        text = "stored in less than the float32 that runtimes keep"
        yield about(CHECK, "warn", f"tensor {text}", f"tensors {text}", plain(narrow))
    if cast:
        text = f"precision when loaded in the config's dtype, {opened.found.architecture.dtype}"
        yield about(CHECK, "warn", f"tensor loses {text}", f"tensors lose {text}", cast)


def _small_tensors(opened: Opened) -> Iterator[Finding]:
    bad = []
    for parameter, tensor in _full(opened):
        if parameter.role in LARGE and len(parameter.shape) > 1:
            continue
        count, first = 0, -1
        for offset, data in stretches(tensor):
            mask = nonfinite(data, tensor.dtype)
            if mask is not None:
                first = offset // SIZES[tensor.dtype] + int(mask.argmax()) if first < 0 else first
                count += int(mask.sum())
        if count:
            bad.append((tensor.name, f"{count:,} of {tensor.numel:,}, the first at element {first:,}"))
    if bad:
        yield about(CHECK, "fail", "tensor holds NaN or infinity", "tensors hold NaN or infinity", bad)


def _against(opened: Opened, other: Opened) -> Iterator[Finding]:
    for severity, difference in differences(opened.found.architecture, other.found.architecture):
        yield Finding(CHECK, severity, f"the config is not the reference's: {difference}", (difference.split()[0],))
    reference = dict(_dtypes(other))
    lost = []
    for name, (stored, dtype) in _dtypes(opened):
        if name in reference and dtype in FLOATS and not holds(dtype, reference[name][1]):
            lost.append((stored, f"{dtype}, the reference has {reference[name][1]}"))
    if lost:
        text = "of a role that never loses precision, in a narrower dtype than the reference's"
        yield about(CHECK, "fail", f"tensor {text}", f"tensors {text}", lost)


def _dtypes(opened: Opened) -> Iterator[tuple[str, tuple[str, str]]]:
    """(native name, (stored name, dtype)) of every protected parameter that is there."""
    for parameter, tensor in _full(opened):
        if parameter.protected:
            yield parameter.name, (tensor.name, tensor.dtype)
