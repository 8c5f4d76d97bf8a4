"""A recipe applied to a geometry: what every matrix gets and why, and whether vLLM's kernels can serve it. No torch.

Limits are those of vLLM 0.32 and 0.33 (its compressed-tensors schemes and fused MoE methods).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from types import MappingProxyType
from typing import Any

from zaya_tools.architecture import Architecture
from zaya_tools.parameters import Parameter, Role, parameters
from zaya_tools.quantization.recipe import Recipe, RecipeError, Rule
from zaya_tools.quantization.scheme import INFORMED, MINMAX, MSE, SCHEMES, Kind, Observer, Scheme
from zaya_tools.quantization.serving import check_target
from zaya_tools.quantization.words import NONE, ROLES

NO_RULE = "no rule names it: full precision"


@dataclass(frozen=True)
class Decision:
    """What one parameter gets: a scheme (None: full precision), how its scales are found, and the rule that says so.

    `index` is the rule's place in the recipe, None where no rule matches.
    """

    scheme: Scheme | None
    observer: Observer | None
    rule: str
    index: int | None = None


@dataclass(frozen=True)
class RuleMatch:
    """A rule and the matrices (each expert has three) that it matches and decides, of all that its role has."""

    rule: Rule
    matched: int
    decided: int
    of: int

    def as_dict(self) -> dict[str, Any]:
        """The match as plain values."""
        return {**self.rule.as_dict(), "matched": self.matched, "decided": self.decided, "of": self.of}


@dataclass(frozen=True)
class Resolved:
    """A recipe for one geometry. `decisions` has every parameter that a recipe could quantize, by native name.

    `tensor_parallel` is the size that was asked for, `max_tensor_parallel` the largest one under which every matrix
    keeps whole groups. Attention is replicated, experts are split along their width, vocabulary rows are padded.
    """

    recipe: Recipe
    architecture: Architecture
    decisions: Mapping[str, Decision]
    rules: tuple[RuleMatch, ...]
    max_tensor_parallel: int
    tensor_parallel: int = 1
    target_vllm: str | None = None

    @property
    def quantized(self) -> Mapping[str, tuple[int, int]]:
        """(quantized, all) matrices by the recipe's word for a role."""
        counts = {}
        for word, role in ROLES.items():
            own = [p for p in quantizable(self.architecture) if p.role is role]
            if own:
                done = sum(matrices(p) for p in own if self.decisions[p.name].scheme is not None)
                counts[word] = (done, sum(map(matrices, own)))
        return counts

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The schemes in use, in the order of the model."""
        return tuple(dict.fromkeys(d.scheme for d in self.decisions.values() if d.scheme is not None))

    def as_dict(self) -> dict[str, Any]:
        """The resolved recipe as plain values: equal for equal recipes, geometries and targets."""
        return {
            **self.recipe.as_dict(),
            "rules": [match.as_dict() for match in self.rules],
            "schemes": {s.name: scheme_document(s) for s in self.schemes},
            "quantized": {word: {"quantized": done, "of": of} for word, (done, of) in self.quantized.items()},
            "tensor_parallel": self.tensor_parallel,
            "max_tensor_parallel": self.max_tensor_parallel,
            "target_vllm": self.target_vllm,
        }


def scheme_document(scheme: Scheme) -> dict[str, Any]:
    """A scheme as plain values."""
    return {
        "kind": scheme.kind.value,
        "format": scheme.format,
        "bits": scheme.bits,
        "rows": scheme.rows,
        "columns": scheme.columns or None,
        "activations": scheme.activations.value,
    }


def quantizable(architecture: Architecture) -> tuple[Parameter, ...]:
    """The weight matrices of roles that may be quantized, in the order of the table."""
    roles = frozenset(ROLES.values())
    return tuple(p for p in parameters(architecture) if p.role in roles and len(p.shape) > 1)


def matrices(parameter: Parameter) -> int:
    """Matrices that a quantizable parameter stands for: an expert's gate and up are two."""
    if parameter.role is not Role.EXPERT:
        return 1
    return parameter.shape[0] * (2 if _fused(parameter) else 1)


def resolve(
    recipe: Recipe, architecture: Architecture, *, tensor_parallel: int = 1, target_vllm: str | None = None
) -> Resolved:
    """Decide what every matrix of a geometry gets.

    RecipeError, saying what would work, for a rule that matches nothing, a tied head or embedding, shapes that do
    not fit a scheme, schemes without kernels, a `tensor_parallel` size that cuts groups, and an unknown `target_vllm`.
    """
    check_target(target_vllm)
    if tensor_parallel < 1:
        raise RecipeError(f"a tensor-parallel size of {tensor_parallel} makes no sense", "it is 1 or more")
    table = quantizable(architecture)
    for rule in recipe.rules:
        _check_rule(recipe, rule, architecture)
    decisions = {p.name: _decide(recipe.rules, p) for p in table}
    _check_fits(recipe, table, decisions)
    largest = _largest_split(architecture, table, decisions)
    _check_split(recipe, architecture, tensor_parallel, largest, table, decisions)
    return Resolved(
        recipe=recipe,
        architecture=architecture,
        decisions=MappingProxyType(decisions),
        rules=tuple(_match(number, rule, table, decisions) for number, rule in enumerate(recipe.rules)),
        max_tensor_parallel=largest,
        tensor_parallel=tensor_parallel,
        target_vllm=target_vllm,
    )


def projection(parameter: Parameter) -> str:
    """The module of a parameter inside its parent: q_proj, gate_up_proj, embed_tokens."""
    return parameter.name.removesuffix(".weight").rpartition(".")[2]


def matches(rule: Rule, parameter: Parameter) -> bool:
    """Whether a rule speaks of a parameter."""
    return (
        parameter.role is ROLES[rule.role]
        and (rule.blocks is None or parameter.block in rule.blocks)
        and (rule.projections is None or projection(parameter) in rule.projections)
    )


def _decide(rules: tuple[Rule, ...], parameter: Parameter) -> Decision:
    own = [(rule.specificity, number) for number, rule in enumerate(rules) if matches(rule, parameter)]
    if not own:
        return Decision(None, None, NO_RULE)
    number = max(own)[1]
    rule = rules[number]
    return Decision(rule.scheme, rule.observer, str(rule), number)


def _match(number: int, rule: Rule, table: tuple[Parameter, ...], decisions: Mapping[str, Decision]) -> RuleMatch:
    own = [p for p in table if p.role is ROLES[rule.role]]
    return RuleMatch(
        rule=rule,
        matched=sum(matrices(p) for p in own if matches(rule, p)),
        decided=sum(matrices(p) for p in own if decisions[p.name].index == number),
        of=sum(map(matrices, own)),
    )


def _check_rule(recipe: Recipe, rule: Rule, architecture: Architecture) -> None:
    where = f"recipe {recipe.name}: rule `{rule}`"
    if rule.role in ("head", "embedding"):
        if architecture.tied:
            raise RecipeError(
                f"{where} cannot be followed: the output head is tied to the embedding in this model, which stays in "
                "full precision",
                "leave the rule out; only untied models can have either quantized",
            )
        if rule.scheme is not None and (rule.observer in INFORMED or rule.scheme.activations.calibrated):
            raise RecipeError(
                f"{where} cannot be followed: nothing is learnt of what goes into the {rule.role}",
                f"leave the rule out, or use a scheme that takes weights alone, with {MINMAX} or {MSE}",
            )
        if rule.blocks is not None:
            raise RecipeError(f"{where} matches nothing: the {rule.role} is in no block", "leave blocks out")
    beyond = rule.blocks.beyond(architecture.blocks) if rule.blocks is not None else ()
    if beyond:
        raise RecipeError(
            f"{where} names block {beyond[0]}, which this model lacks",
            f"it has the blocks 0-{architecture.blocks - 1}; an open range like {architecture.blocks - 1}- reaches "
            "the last one in any model",
        )


def _fused(parameter: Parameter) -> bool:
    return projection(parameter) == "gate_up_proj"


def _shape(parameter: Parameter) -> tuple[int, int]:
    """(rows, columns) of each matrix that a parameter stands for."""
    rows, columns = parameter.shape[-2:]
    return (rows // 2 if _fused(parameter) else rows), columns


def _check_fits(recipe: Recipe, table: tuple[Parameter, ...], decisions: Mapping[str, Decision]) -> None:
    for parameter in table:
        decision = decisions[parameter.name]
        reason = unfit(decision.scheme, parameter) if decision.scheme is not None else None
        if reason is not None:
            alike = [p for p in table if decisions[p.name].index == decision.index]
            fitting = [name for name, other in SCHEMES.items() if all(unfit(other, p) is None for p in alike)]
            raise RecipeError(
                f"recipe {recipe.name}: rule `{decision.rule}` does not fit {parameter.name}: {reason}",
                f"schemes that fit all that the rule decides: {', '.join([*fitting, NONE])}",
            )


def unfit(scheme: Scheme, parameter: Parameter) -> str | None:
    """Why vLLM cannot serve a parameter in this scheme, None where it can."""
    rows, columns = _shape(parameter)
    if parameter.role is Role.EMBEDDING and scheme.kind is not Kind.INT4:
        return "vLLM looks embeddings up in INT4 or in full precision only"
    if parameter.role is Role.HEAD and scheme.rows > 1:
        return "vLLM cuts the output head by vocabulary rows and has no scales for blocks of them"
    group = _unit(scheme)
    if columns % group:
        kind = f"{scheme.rows}x{scheme.columns} blocks" if scheme.rows > 1 else f"groups of {group}"
        why = f"{kind} have to divide a row" if scheme.columns else f"kernels read rows in steps of {group}"
        return f"its {columns} columns are not a multiple of {group}, and {why}"
    gate_up = parameter.role is Role.EXPERT and _fused(parameter)
    if gate_up and scheme.packed and not scheme.columns and columns % _MARLIN:
        return f"vLLM takes experts of whole-row INT4 only for a hidden size that is a multiple of {_MARLIN}"
    if gate_up and scheme.rows > 1 and rows % scheme.rows:
        # A last block of fewer rows is fine elsewhere, but gate and up are fused: a block would span both.
        return f"its gate and up have {rows} rows each, not a multiple of {scheme.rows}"
    return None


def divides(scheme: Scheme, parameter: Parameter, size: int) -> bool:
    """Whether a tensor-parallel `size` leaves every rank whole groups: experts are cut by their width."""
    if parameter.role is not Role.EXPERT or _fused(parameter):
        return True
    return parameter.shape[-1] % (_unit(scheme) * size) == 0


def _unit(scheme: Scheme | None) -> int:
    """Neighbouring columns that no cut may part: a group, or a packed word (eight INT4 values)."""
    if scheme is None:
        return 1
    if scheme.columns:
        return scheme.columns
    return 8 if scheme.packed else _ALIGNED


# 8-bit matrix kernels read rows in steps of 16 bytes.
_ALIGNED = 16
# The tile of hidden channels that its Marlin kernels for experts work in.
_MARLIN = 128
# vLLM pads the vocabulary to a multiple of this before it cuts it.
_VOCABULARY = 64


def _experts(table: tuple[Parameter, ...], decisions: Mapping[str, Decision]) -> Iterator[tuple[Parameter, int]]:
    """(down matrices, neighbouring inputs that stay together) by block."""
    for parameter in table:
        if parameter.role is Role.EXPERT and not _fused(parameter):
            yield parameter, _unit(decisions[parameter.name].scheme)


def _largest_split(architecture: Architecture, table: tuple[Parameter, ...], decisions: Mapping[str, Decision]) -> int:
    """The largest size that divides the padded vocabulary and every expert's width into whole units."""
    largest = -(-architecture.vocab_size // _VOCABULARY) * _VOCABULARY
    for _, unit in _experts(table, decisions):
        whole, rest = divmod(architecture.expert_width, unit)
        largest = gcd(largest, 1 if rest else whole)
    return largest


def _check_split(
    recipe: Recipe,
    architecture: Architecture,
    size: int,
    largest: int,
    table: tuple[Parameter, ...],
    decisions: Mapping[str, Decision],
) -> None:
    if largest % size == 0:
        return
    hint = f"the largest size for this recipe and model is --tp {largest}, and it has to divide {largest}"
    for parameter, unit in _experts(table, decisions):
        width = architecture.expert_width
        if width % (unit * size):
            rule = decisions[parameter.name].rule
            raise RecipeError(
                f"recipe {recipe.name}: tensor-parallel size {size} leaves {parameter.name} {width / size:g} of its "
                f"{width} columns, not a whole number of {unit} (rule `{rule}`)",
                hint,
            )
    raise RecipeError(f"tensor-parallel size {size} does not divide the padded vocabulary", hint)
