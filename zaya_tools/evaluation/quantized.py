"""What config.json says about quantization against what the tensors are, module by module. Headers only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any

from zaya_tools.checkpoint.sidefiles import MANIFEST
from zaya_tools.checkpoint.source import read_json
from zaya_tools.dtypes import FLOATS
from zaya_tools.errors import LayoutError, SourceError, listing
from zaya_tools.evaluation.findings import Finding, about, plain
from zaya_tools.evaluation.modules import LINEAR, Declared, Module, declared, modules, same_scheme, unmatched
from zaya_tools.evaluation.opened import Opened
from zaya_tools.evaluation.stored import Decoder, Slab, expected, slabs
from zaya_tools.evaluation.units import Unit, units
from zaya_tools.layouts.base import COMPANIONS
from zaya_tools.layouts.match import QUANTIZABLE, Match
from zaya_tools.parameters import PROTECTED, Parameter, Role, parameters

CHECK = "structure"


@dataclass(frozen=True)
class Matrix:
    """A slab that may be quantized, the units that it holds, and how to decode it (None: stored in full)."""

    parameter: Parameter
    slab: Slab
    units: tuple[Unit, ...]
    decoder: Decoder | None = None

    @property
    def quantized(self) -> bool:
        """Whether it is stored in fewer bits than it was trained in."""
        return self.slab.bound.quantized


def matrices(opened: Opened) -> tuple[Matrix, ...]:
    """Every matrix of a role that may be quantized, in the order of the table."""
    found = opened.found
    result = []
    for parameter in parameters(found.architecture):
        if parameter.role not in QUANTIZABLE or len(parameter.shape) < 2:
            continue
        own = tuple(units(parameter, found.architecture))
        for slab in slabs(parameter, found.bound[parameter.name]):
            end = slab.start + slab.rows * slab.columns
            result.append(Matrix(parameter, slab, tuple(unit for unit in own if slab.start <= unit.start < end)))
    return tuple(result)


def decoders(opened: Opened, stated: Declared) -> dict[str, Decoder]:
    """How each quantized unit is stored, by unit name, as the config says.

    In the raw layout the config speaks of other module names: there its one scheme is everybody's. Units that the
    config does not cover are absent.
    """
    only = None if opened.native else stated.only_scheme()
    table = modules(opened.found.architecture)
    result = {}
    for matrix in matrices(opened):
        for unit in matrix.units if matrix.quantized else ():
            scheme = stated.scheme(table[unit.module]) if opened.native else only
            if scheme is not None and scheme.weights is not None:
                result[unit.name] = Decoder(scheme, stated.format(scheme))
    return result


def check_quantization(opened: Opened, wanted: frozenset[Role]) -> tuple[list[Finding], dict[str, Any], list[Matrix]]:
    """Findings, figures, and the quantized matrices of a sound form with their decoders, for their scales.

    `wanted` are the roles of which every matrix has to be quantized where the config quantizes anything and no
    manifest says which.
    """
    found = opened.found
    everything = matrices(opened)
    figures = _counts(everything)
    findings = list(_protected(opened))
    try:
        stated = declared(opened.source.config)
    except LayoutError as error:
        return [*findings, _fail(error.message)], figures, []
    if stated is None:
        if found.quantized:
            names = tuple(m.slab.name for m in everything if m.quantized)
            findings.append(_fail(f"tensors are quantized but config.json has no quantization_config: "
                                  f"{listing(names, 3)}", names))  # fmt: skip
        return findings, figures, []
    findings += _nulls(opened.source.config)
    if opened.native:
        findings += _entries(stated, found)
        findings += _agreement(stated, everything, found)
        findings += _experts(stated, everything, found)
    else:
        message = "the quantization_config speaks of the raw layout's modules, which no serving runtime has"
        findings.append(Finding(CHECK, "warn", f"{message}: convert this checkpoint to native before it is served"))
        if stated.only_scheme() is None:
            findings.append(_fail("config.json has several quantization schemes under raw names: which tensor has "
                                  "which cannot be told"))  # fmt: skip
    recorded = _recorded(opened)
    findings += _wanted(stated, everything, opened, wanted) if recorded is None else _as_recorded(everything, recorded)
    ready = _ready(opened, stated, everything)
    from_forms = list(_forms(ready))
    figures["schemes"] = sorted({f"{m.decoder.label}, {m.decoder.format}" for m in ready if m.decoder})
    odd = {name for finding in from_forms for name in finding.names}
    sound = [m for m in ready if not odd.intersection(_names(m.slab))]
    return [*findings, *from_forms], figures, sound


def form_faults(opened: Opened) -> list[Finding]:
    """What of a native checkpoint's quantized tensors is not as its config says, and so cannot be served.

    The part of `check_quantization` that does not ask what is protected or wanted.
    """
    everything = matrices(opened)
    stated = declared(opened.source.config)
    if stated is None:
        names = tuple(m.slab.name for m in everything if m.quantized)
        text = "tensors are quantized but config.json has no quantization_config"
        return [_fail(f"{text}: {listing(names, 3)}", names)] if names else []
    return [
        *_agreement(stated, everything, opened.found, protected=False),
        *_experts(stated, everything, opened.found),
        *_forms(_ready(opened, stated, everything)),
    ]


def _ready(opened: Opened, stated: Declared, everything: Sequence[Matrix]) -> list[Matrix]:
    """The quantized matrices that the config covers, with their decoders."""
    by_unit = decoders(opened, stated)
    pairs = ((matrix, by_unit.get(matrix.units[0].name)) for matrix in everything if matrix.quantized)
    return [replace(matrix, decoder=decoder) for matrix, decoder in pairs if decoder is not None]


def _names(slab: Slab) -> Iterator[str]:
    """Every name under which a matrix or one of its tensors can be spoken of."""
    part = slab.bound.part
    yield part.name
    yield from (part.companion(suffix) for suffix in COMPANIONS)
    yield from (stretch.tensor.name for stretch in slab.stored().values())


def _fail(message: str, names: Iterable[str] = ()) -> Finding:
    return Finding(CHECK, "fail", message, tuple(names))


def _counts(everything: Sequence[Matrix]) -> dict[str, Any]:
    rows = []
    for role in Role:
        own = [m for m in everything if m.parameter.role is role]
        total = sum(len(m.units) for m in own)
        if total:
            quantized = sum(len(m.units) for m in own if m.quantized)
            rows.append({"role": role.value, "quantized": quantized, "of": total})
    return {"quantized": rows}


def _protected(opened: Opened) -> Iterator[Finding]:
    """Protected parameters that are stored quantized, or that have a scale beside them."""
    found = opened.found
    surplus = {name.rpartition(".")[0] for name in found.surplus if "scale" in name or "packed" in name}
    bad: dict[Role, list[str]] = {}
    for parameter in parameters(found.architecture):
        if parameter.role in PROTECTED:
            for bound in found.bound[parameter.name]:
                stored = bound.tensor is not None and bound.tensor.dtype not in FLOATS
                if stored or bound.part.name.removesuffix(".weight") in surplus:
                    bad.setdefault(parameter.role, []).append(bound.part.name)
    for role, names in bad.items():
        text = f"of the role '{role}', which never loses precision, quantized"
        yield about(CHECK, "fail", f"tensor {text}", f"tensors {text}", plain(names))


def _nulls(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Null `scale_dtype` and `zp_dtype`, which newest writers put there and older readers refuse."""
    groups = config["quantization_config"].get("config_groups", {})
    keys = sorted({
        key for group in groups.values() if isinstance(group, dict) for args in group.values()
        if isinstance(args, dict) for key in ("scale_dtype", "zp_dtype") if key in args and args[key] is None
    })  # fmt: skip
    if keys:
        yield Finding(CHECK, "warn", f"quantization_config holds null {' and '.join(keys)}: "
                      "vLLM releases that do not know these keys refuse the checkpoint", tuple(keys))  # fmt: skip


def _entries(stated: Declared, found: Match) -> Iterator[Finding]:
    for kind, entries in (("ignore", stated.ignore), ("targets", stated.targets)):
        strangers = unmatched(entries, found.architecture)
        if strangers:
            yield _fail(f"quantization_config: {len(strangers)} of {len(entries)} {kind} entries match no module "
                        f"of the runtime: {listing(strangers)}", strangers)  # fmt: skip


def _agreement(
    stated: Declared, everything: Sequence[Matrix], found: Match, *, protected: bool = True
) -> Iterator[Finding]:
    """Modules that the config quantizes and the files do not, and the other way round."""
    table = modules(found.architecture)
    stored = {unit.module: matrix for matrix in everything for unit in matrix.units}
    unquantized: list[str] = []
    undeclared: list[str] = []
    refused: list[str] = []
    for module in table.values():
        says = module.kind == LINEAR or module.name in stored
        scheme = stated.scheme(module) if says else None
        matrix = stored.get(module.name)
        if matrix is None:
            if scheme is not None:
                refused.append(module.name)
        elif matrix.slab.present and matrix.quantized != (scheme is not None):
            (undeclared if matrix.quantized else unquantized).append(module.name)
    if unquantized:
        text = "stored in full precision though quantization_config quantizes"
        yield about(CHECK, "fail", f"module is {text} it", f"modules are {text} them", plain(unquantized))
    if undeclared:
        text = "stored quantized though quantization_config does not say so"
        yield about(CHECK, "fail", f"module is {text}", f"modules are {text}", plain(undeclared))
    if refused and protected:
        text = "never quantized but not in the ignore list (router, tied output head)"
        yield about(CHECK, "fail", f"module is {text}", f"modules are {text}", plain(refused))


def _experts(stated: Declared, everything: Sequence[Matrix], found: Match) -> Iterator[Finding]:
    """Runtimes judge the experts of a block by expert 0 alone, so all of them need its scheme."""
    table = modules(found.architecture)
    experts = [m for m in everything if m.parameter.role is Role.EXPERT and m.quantized]
    odd: list[str] = []
    for _, group in groupby(experts, key=lambda m: m.parameter.block):
        own: list[Module] = [table[unit.module] for matrix in group for unit in matrix.units]
        schemes = [stated.scheme(module) for module in own]
        odd += [module.name for module, scheme in zip(own, schemes, strict=True)
                if scheme and schemes[0] and not same_scheme(scheme, schemes[0])]  # fmt: skip
    if odd:
        text = "another scheme than the first of the block, by which runtimes judge all"
        yield about(CHECK, "fail", f"expert module has {text}", f"expert modules have {text}", plain(odd))


def _recorded(opened: Opened) -> frozenset[str] | None:
    """The weights that the manifest says `zaya quantize` has quantized; None where there is no such record."""
    file = opened.source.folder / MANIFEST
    if not file.is_file():
        return None
    try:
        names = read_json(file).get("quantized")
    except SourceError:
        return None
    return frozenset(names) if isinstance(names, dict) else None


def _as_recorded(everything: Sequence[Matrix], recorded: frozenset[str]) -> Iterator[Finding]:
    """The quantized matrices have to be those that the recipe chose, no more and no fewer."""
    stored = {matrix.slab.bound.part.name for matrix in everything if matrix.quantized}
    for names, text in (
        (recorded - stored, "in full precision although the manifest says that it was quantized"),
        (stored - recorded, "quantized although the manifest does not say so"),
    ):
        if names:
            yield about(CHECK, "fail", f"matrix is {text}", f"matrices are {text}", plain(sorted(names)))


def _wanted(
    stated: Declared, everything: Sequence[Matrix], opened: Opened, wanted: frozenset[Role]
) -> Iterator[Finding]:
    """Matrices that have to be quantized and that the config leaves out; `_agreement` names those it does not."""
    table = modules(opened.found.architecture)
    for role in sorted(wanted):
        own = [(m, unit) for m in everything if m.parameter.role is role and m.slab.present for unit in m.units]
        full = [unit.module for matrix, unit in own if not matrix.quantized
                and not (opened.native and stated.scheme(table[unit.module]))]  # fmt: skip
        if full:
            quantized = sum(matrix.quantized for matrix, _ in own)
            yield _fail(f"{quantized:,} of {len(own):,} matrices of the role '{role}' are quantized although "
                        f"there is a quantization_config, which leaves out {listing(full, 3)}", full)  # fmt: skip


def _forms(ready: Sequence[Matrix]) -> Iterator[Finding]:
    """The tensors of each quantized matrix against those that its scheme stores for this shape."""
    wrong: list[tuple[str, str]] = []
    absent: list[str] = []
    surplus: list[str] = []
    unfit: dict[str, list[str]] = {}
    forms: dict[tuple[int, str, int, int], Mapping[str, tuple[str, tuple[int, ...]]]] = {}
    for matrix in ready:
        slab, decoder = matrix.slab, matrix.decoder
        if decoder is None or slab.index:
            continue  # the tensors of a stack are one set
        key = (id(decoder.scheme), decoder.format, slab.rows, slab.columns)
        try:
            form = forms[key] if key in forms else forms.setdefault(key, expected(decoder, slab.rows, slab.columns))
        except LayoutError as error:
            unfit.setdefault(error.message, []).append(slab.bound.part.name)
            continue
        stored = slab.stored()
        if slab.copies > 1:  # a stack is of one shape, and writers differ in whether and how they say it
            form = {local: entry for local, entry in form.items() if local != "weight_shape"}
            stored.pop("weight_shape", None)
        part = slab.bound.part
        absent += [part.companion(local) if local != "weight" else part.name for local in form.keys() - stored.keys()]
        surplus += [stored[local].tensor.name for local in stored.keys() - form.keys()]
        for local in sorted(form.keys() & stored.keys()):
            tensor, (dtype, shape) = stored[local].tensor, form[local]
            single = shape == (1,)
            shape = (slab.copies, *shape) if slab.copies > 1 else shape
            if not _same_kind(local, tensor.dtype, dtype) or not _same_shape(tensor.shape, shape, single):
                wrong.append((tensor.name, f"{tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}"))
    for message, names in unfit.items():
        yield _fail(f"{message}: {listing(names, 3)}", names)
    if absent:
        text = "that the scheme needs, missing"
        yield about(CHECK, "fail", f"tensor {text}", f"tensors {text}", plain(sorted(absent)))
    if surplus:
        text = "no place in the scheme"
        yield about(CHECK, "fail", f"tensor has {text}", f"tensors have {text}", plain(sorted(surplus)))
    if wrong:
        text = "not in the form of the scheme"
        yield about(CHECK, "fail", f"tensor {text}", f"tensors {text}", wrong)


def _same_kind(local: str, stored: str, wanted: str) -> bool:
    """Scales may have any full-precision type, shapes any whole one; all else is exact."""
    if wanted in FLOATS and local.endswith("scale"):
        return stored in FLOATS
    return stored == wanted or (local == "weight_shape" and stored in ("I64", "I32"))


def _same_shape(stored: tuple[int, ...], wanted: tuple[int, ...], single: bool) -> bool:
    """A single number a matrix may be a scalar or have further axes of length 1."""
    return stored == wanted or (single and prod(stored) == prod(wanted))
