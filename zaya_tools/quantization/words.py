"""The words of a recipe: roles, projections, blocks, schemes. Each parser refuses with a reason and a way out."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from reprlib import Repr
from typing import Any

from zaya_tools.architecture import Architecture
from zaya_tools.parameters import PROTECTED, Role, parameters
from zaya_tools.quantization.scheme import CALIBRATED, INFORMED, OBSERVERS, SCHEMES, Kind, Observer, Scheme

ROLES = {"experts": Role.EXPERT, "attention": Role.ATTENTION, "embedding": Role.EMBEDDING, "head": Role.HEAD}
"""What a rule may speak of."""

NONE = "none"
"""The scheme of a rule that keeps full precision."""


_SHORT = Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


def shown(value: Any) -> str:
    """A value as messages show it. Not repr(): a few lines of nested YAML aliases stand for lists without end."""
    return _SHORT.repr(value)


class BadWord(ValueError):
    """What a recipe must not say, and what it could say instead."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


# Any geometry with every optional parameter: the table's names and roles do not depend on the sizes.
_TABLE = parameters(
    Architecture(
        blocks=2, hidden_size=2, query_heads=2, kv_heads=2, head_dim=2, experts=2, expert_width=2, router_width=2,
        vocab_size=2, tied=False, attention_bias=True, head_bias=True,
    )
)  # fmt: skip

PROJECTIONS = tuple(
    p.local.split(".")[-2] for p in _TABLE if p.role is Role.ATTENTION and p.block == 0 and len(p.shape) > 1
)
"""The attention projections that a rule may single out."""

_EXPERT_MATRICES = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")

REASONS = {
    Role.ROUTER: "a rounded router sends tokens to other experts",
    Role.BALANCING: "they decide which expert wins and are kept in float32",
    Role.CONVOLUTION: "they are tiny and their error multiplies through attention",
    Role.TEMPERATURE: "it scales every attention score of its head",
    Role.NORM: "norms are tiny and scale all channels",
    Role.RESIDUAL: "they scale the residual stream of every token",
}
"""Why a protected role never loses precision."""

# How people call protected roles, beside the table's own names. Parts of words, tried in this order.
_STEMS = {
    Role.BALANCING: ("balanc",),
    Role.RESIDUAL: ("resid", "res_scale"),
    Role.CONVOLUTION: ("conv", "cca"),
    Role.TEMPERATURE: ("temp", "qk_norm"),
    Role.ROUTER: ("rout", "gate", "gating", "skip"),
    Role.NORM: ("norm",),
}


def protected_role(word: str) -> Role | None:
    """The protected role that a word means, however it is spelled; None for a word that means none."""
    plain = re.sub(r"[^a-z0-9]+", "_", word.lower()).strip("_")
    if any(plain.endswith(matrix) for matrix in _EXPERT_MATRICES) and "mlp_gate" not in plain:
        return None  # an expert's gate is no router
    for role, stems in _STEMS.items():
        if any(stem in plain for stem in stems):
            return role
    held = {p.role for p in _TABLE if plain in (p.local.replace(".", "_"), *p.local.split("."))}
    return min(held) if held and held <= PROTECTED else None


def parse_role(value: Any) -> str:
    """The role of a rule. BadWord for anything but the four names, saying why."""
    return _word(value, tuple(ROLES), "role")


def parse_projections(value: Any) -> tuple[str, ...]:
    """Projections of a rule, from one name or a list of names."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise BadWord("projections is an empty list", f"name some of {', '.join(PROJECTIONS)}, or leave it out")
    for entry in values:
        if entry in _EXPERT_MATRICES:
            raise BadWord(
                f"{shown(entry)} is an expert's: vLLM has one scheme for all matrices of a block's experts",
                f"leave projections out of a rule for experts; a projection is one of {', '.join(PROJECTIONS)}",
            )
    named = [_word(entry, PROJECTIONS, "projection") for entry in values]
    return tuple(dict.fromkeys(named))


def _word(value: Any, known: tuple[str, ...], kind: str) -> str:
    choices = f"a {kind} is one of {', '.join(known)}"
    if not isinstance(value, str):
        raise BadWord(f"{shown(value)} is not a {kind}", choices)
    if value in known:
        return value
    if value.startswith("re:") or re.search(r"[*^$\\\[\]()|+?{}]", value):
        raise BadWord(
            f"{shown(value)} is a pattern: recipes name roles, so that none can reach what is protected", choices
        )
    role = protected_role(value)
    if role is None and (near := get_close_matches(value.lower(), _spellings(known), 1, 0.7)):
        if near[0] in known:
            raise BadWord(f"{shown(value)} is not a {kind}", f"did you mean {near[0]!r}? {choices}")
        role = protected_role(near[0])
    if role is not None:
        raise BadWord(
            f"{shown(value)} speaks of the role '{role}', which never loses precision: {REASONS[role]}",
            f"leave the rule out; {choices}",
        )
    raise BadWord(f"{shown(value)} is not a {kind}", choices)


def _spellings(known: tuple[str, ...]) -> list[str]:
    stems = [stem for own in _STEMS.values() for stem in own if len(stem) > 4]
    return [*known, *stems, "router", "gates", "conv", "convolutions", "temperature", "norms", "balancing_biases"]


@dataclass(frozen=True)
class Blocks:
    """Ranges of blocks, ends included; a range without an end reaches the last block."""

    ranges: tuple[tuple[int, int | None], ...]

    def __contains__(self, block: object) -> bool:
        return isinstance(block, int) and any(
            first <= block and (last is None or block <= last) for first, last in self.ranges
        )

    def __str__(self) -> str:
        return ", ".join(
            f"{first}-" if last is None else str(first) if first == last else f"{first}-{last}"
            for first, last in self.ranges
        )

    def beyond(self, blocks: int) -> tuple[int, ...]:
        """Block numbers that are named and that a model of this many blocks lacks."""
        ends = (last if last is not None else first for first, last in self.ranges)
        return tuple(end for end in ends if end >= blocks)


_RANGE = re.compile(r" *([0-9]{1,6}) *(?:(-) *([0-9]{1,6})? *)?")


def parse_blocks(value: Any) -> Blocks:
    """Blocks from a number, a range (`0-3`, `36-`) or a list of them."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise BadWord("blocks is an empty list", _BLOCKS)
    return Blocks(tuple(map(_range, values)))


_BLOCKS = "write a number, a range like 0-3 (ends included), 36- for all from 36 on, or a list of these"


def _range(value: Any) -> tuple[int, int | None]:
    found = None if isinstance(value, bool) else _RANGE.fullmatch(str(value))
    if not isinstance(value, int | str) or found is None:
        raise BadWord(f"{shown(value)} is not a range of blocks", _BLOCKS)
    first = int(found[1])
    last = int(found[3]) if found[3] else None if found[2] else first
    if last is not None and last < first:
        raise BadWord(f"the range {shown(value)} ends before it starts", f"did you mean {last}-{first}?")
    return first, last


def parse_name(value: Any) -> str:
    """A recipe's name: one line with something to read in it."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise BadWord(f"{shown(value)} is not a name", "a recipe's name is one line of text")
    return value


def parse_observer(value: Any) -> Observer:
    """How scales are found."""
    known = (*OBSERVERS, *INFORMED)
    found = next((observer for observer in known if observer == value), None)
    if found is None:
        raise BadWord(f"{shown(value)} is not an observer", f"one of {', '.join(known)}")
    return found


INT4_GROUPS = (32, 64, 128)
"""Groups of weights along a row that vLLM's INT4 kernels take, beside whole rows."""

_CHANNEL = "channel"
# The kinds of an inline scheme: the scheme it starts from, and the groups that kernels have for it.
_KINDS = {
    "fp8": ("fp8", ()),
    "int8": ("int8", ()),
    "int4": ("int4", INT4_GROUPS),
    "mxfp4": ("mxfp4", (32,)),
    "nvfp4": ("nvfp4a16", (16,)),
    "nvfp4a16": ("nvfp4a16", (16,)),
}


def parse_scheme(value: Any) -> Scheme | None:
    """A scheme by name or as {kind, group}; None for `none`, full precision."""
    if isinstance(value, dict):
        return _inline(value)
    named = {**SCHEMES, **CALIBRATED}
    choices = f"a scheme is one of {', '.join(named)}, {NONE} (full precision), or like {{kind: int4, group: 64}}"
    if not isinstance(value, str):
        raise BadWord(f"{shown(value)} is not a scheme", choices)
    if value == NONE:
        return None
    if value in named:
        return named[value]
    near = get_close_matches(value.lower(), [*named, NONE], 1)
    raise BadWord(f"{shown(value)} is not a scheme", (f"did you mean {near[0]!r}? " if near else "") + choices)


def _inline(value: dict[Any, Any]) -> Scheme:
    for key in value:
        if key not in ("kind", "group"):
            raise BadWord(
                f"{shown(key)} is not a key of a scheme", "its keys are kind and group: {kind: int4, group: 64}"
            )
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadWord(f"{shown(kind)} is not a kind of scheme", f"one of {', '.join(_KINDS)}")
    named, groups = SCHEMES[_KINDS[kind][0]], _KINDS[kind][1]
    group = value.get("group", named.columns or None)
    if not groups:
        if group is not None:
            raise BadWord(f"{kind} has one scale a row and takes no group", f"leave group out, or write scheme: {kind}")
        return named
    taken = ", ".join(map(str, groups))
    whole_number = isinstance(group, int) and not isinstance(group, bool)  # 64.0 == 64, but is no size
    if named.kind is Kind.INT4 and (group == _CHANNEL or (whole_number and group == -1)):
        return replace(named, name=f"{kind}-{_CHANNEL}", columns=0)
    if not whole_number or group not in groups:
        rows = f", or {_CHANNEL} for whole rows" if named.kind is Kind.INT4 else ""
        raise BadWord(f"vLLM has no {kind} kernels for groups of {shown(group)}", f"they take groups of {taken}{rows}")
    same = (s for s in SCHEMES.values() if s.kind is named.kind and s.columns == group)
    return next(same, replace(named, name=f"{kind}-g{group}", columns=group))
