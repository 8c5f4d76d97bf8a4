"""Recipes: which roles of a model get which scheme. YAML files, checked before anything is done with them.

A rule speaks of a role (`experts`, `attention`, `embedding`, `head`) and may be narrowed to blocks and to single
projections. Where several rules match a matrix the more specific one decides: one that names projections before one
that does not, then one that names blocks before one that does not, then the later one. The rules of an extended
recipe come before the recipe's own. What no rule matches keeps full precision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from zaya_tools.checkpoint.hub import expand
from zaya_tools.errors import ZayaError
from zaya_tools.quantization.scheme import INFORMED, MINMAX, MSE, OBSERVERS, Observer, Scheme, mismatch
from zaya_tools.quantization.words import (
    NONE,
    Blocks,
    parse_blocks,
    parse_name,
    parse_observer,
    parse_projections,
    parse_role,
    parse_scheme,
    shown,
)


class RecipeError(ZayaError):
    """A recipe cannot be read, or asks for what this model or its runtimes cannot do."""


@dataclass(frozen=True)
class Rule:
    """One rule: the matrices of `role`, in `blocks` (None: all) and of `projections` (None: all), get `scheme`.

    A scheme of None is full precision. `observer` says how scales are found, None where nothing is quantized;
    `recipe` is the name of the recipe that the rule was written in.
    """

    role: str
    scheme: Scheme | None
    observer: Observer | None
    blocks: Blocks | None = None
    projections: tuple[str, ...] | None = None
    recipe: str = ""

    @property
    def specificity(self) -> tuple[bool, bool]:
        """What decides between rules that match the same matrix: the larger one wins, then the later one."""
        return self.projections is not None, self.blocks is not None

    @property
    def scheme_name(self) -> str:
        """The scheme's name, `none` for full precision."""
        return self.scheme.name if self.scheme else NONE

    def __str__(self) -> str:
        where = f", blocks {self.blocks}" if self.blocks else ""
        which = f" ({', '.join(self.projections)})" if self.projections else ""
        return f"{self.role}{which}{where}: {self.scheme_name}"

    def as_dict(self) -> dict[str, Any]:
        """The rule as plain values."""
        return {
            "role": self.role,
            "blocks": str(self.blocks) if self.blocks else None,
            "projections": list(self.projections) if self.projections else None,
            "scheme": self.scheme_name,
            "observer": self.observer,
            "recipe": self.recipe,
        }


@dataclass(frozen=True)
class Recipe:
    """A recipe that has been read: its own and inherited rules in order, `extends` the name of the recipe below it."""

    name: str
    description: str
    runs_on: str
    rules: tuple[Rule, ...]
    extends: str | None = None
    source: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The recipe as plain values, without where it was read from."""
        return {
            "name": self.name,
            "description": self.description,
            "runs_on": self.runs_on,
            "extends": self.extends,
            "rules": [rule.as_dict() for rule in self.rules],
        }


_Observer = Annotated[Observer | None, PlainValidator(parse_observer)]


class _RuleFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True)

    role: Annotated[str, PlainValidator(parse_role)]
    scheme: Annotated[Any, PlainValidator(parse_scheme)]
    blocks: Annotated[Blocks | None, PlainValidator(parse_blocks)] = None
    projections: Annotated[tuple[str, ...] | None, PlainValidator(parse_projections)] = None
    observer: _Observer = None


class _RecipeFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Annotated[str, PlainValidator(parse_name)]
    description: Annotated[str, Field(min_length=1)]
    runs_on: str | None = None
    extends: str | None = None
    observer: _Observer = None
    rules: list[_RuleFile] | None = None


AUTO = "auto"
"""The name that `zaya quantize` takes for a recipe that it makes itself."""

SUFFIXES = (".yaml", ".yml")


def recipes_folder() -> Path:
    """The folder of the built-in recipes: inside the installed package, or beside it in a source tree."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):
        if folder.is_dir():
            return folder
    raise RecipeError(f"{package} came without its recipes", "install zaya-tools again")


def recipe_names() -> tuple[str, ...]:
    """Names of the built-in recipes, sorted."""
    return tuple(sorted(path.stem for path in recipes_folder().glob("*.yaml")))


def load_recipe(name_or_path: str | Path) -> Recipe:
    """A recipe by the name of a built-in one or by its file. RecipeError says what is wrong with it and what to do.

    A file may extend one recipe, which may not itself extend another.
    """
    path = _find(name_or_path)
    stated = _read(path)
    if stated.extends is None:
        return _recipe(path, stated)
    base_path = _find(stated.extends, path.parent)
    base = _read(base_path)
    if base.extends is not None:
        raise RecipeError(
            f"{path}: {stated.name} extends {base.name}, which itself extends {base.extends}",
            f"a recipe extends at most once: extend {base.extends} and repeat the rules of {base.name}",
        )
    return _recipe(path, stated, base)


def parse_recipe(text: str, name: str) -> Recipe:
    """A recipe from the text of a file that extends none; `name` is what errors call it."""
    path = Path(name)
    return _recipe(path, _parse(path, text))


def _find(name_or_path: str | Path, beside: Path | None = None) -> Path:
    """The file of a recipe: built-in names first, unless it looks like a path."""
    text = str(name_or_path)
    looks_like_path = isinstance(name_or_path, Path) or "/" in text or text.endswith(SUFFIXES)
    if not looks_like_path:
        if text in recipe_names():
            return recipes_folder() / f"{text}.yaml"
        if text == AUTO:
            raise RecipeError(
                "auto is no recipe of its own: it is made for each model and size",
                "`zaya quantize SRC DST --recipe auto --target-size SIZE --dry-run` shows what it would be",
            )
        near = get_close_matches(text, recipe_names(), 1)
        raise RecipeError(
            f"there is no recipe {text!r}",
            (f"did you mean {near[0]!r}? " if near else "")
            + f"`zaya recipe list` shows all: {', '.join(recipe_names())}; a file is given by its path, like ./my.yaml",
        )
    path = expand(text)
    path = beside / path if beside is not None else path
    if not path.is_file():
        raise RecipeError(f"there is no recipe file {path}", "give the path of a YAML file, or the name of a recipe")
    return path


def _recipe(path: Path, stated: _RecipeFile, base: _RecipeFile | None = None) -> Recipe:
    if stated.rules is None and base is None:
        raise RecipeError(f"{path}: rules is missing", "write `rules: []` for a recipe that quantizes nothing")
    fallback = stated.observer or (base.observer if base else None)
    files = [file for file in (base, stated) if file is not None]
    return Recipe(
        name=stated.name,
        description=stated.description,
        # Where a recipe runs is inherited only with all its rules.
        runs_on=stated.runs_on or (base.runs_on if base and not stated.rules else None) or "",
        rules=tuple(_rule(path, rule, fallback, file.name) for file in files for rule in file.rules or ()),
        extends=base.name if base else None,
        source=str(path),
    )


def _rule(path: Path, stated: _RuleFile, fallback: Observer | None, recipe: str) -> Rule:
    """A rule with its observer: its own, else the recipe's, else what suits the scheme's bits."""
    if stated.projections and stated.role != "attention":
        raise RecipeError(
            f"{path}: a rule for {stated.role} names projections, which only attention has: "
            f"{', '.join(stated.projections)}",
            "leave projections out, or write role: attention",
        )
    scheme: Scheme | None = stated.scheme
    observer = stated.observer or fallback or (MSE if scheme is not None and scheme.packed else MINMAX)
    reason = mismatch(scheme, observer) if scheme is not None else None
    if scheme is not None and reason is not None:
        fitting = [name for name in (*OBSERVERS, *INFORMED) if mismatch(scheme, name) is None]
        raise RecipeError(
            f"{path}: scheme {scheme.name} cannot have the observer {observer}: {reason}",
            f"observers for {scheme.name}: {', '.join(fitting)}",
        )
    return Rule(
        role=stated.role,
        scheme=scheme,
        observer=observer if scheme is not None else None,
        blocks=stated.blocks,
        projections=stated.projections,
        recipe=recipe,
    )


class _Loader(yaml.SafeLoader):
    """YAML's safe subset, without keys that are there twice: the first would be dropped in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping, as SafeLoader makes it; ConstructorError for a repeated key."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_decimal(self, node: yaml.ScalarNode) -> int | str:
        """Decimal digits as the number that people read in them; YAML 1.1 takes 010 for 8 and 1:30 for 90."""
        text = str(self.construct_scalar(node))
        return int(text) if re.fullmatch("[-+]?[0-9]{1,18}", text) else text


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_decimal)


def _read(path: Path) -> _RecipeFile:
    try:
        return _parse(path, path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text", "a recipe is a YAML file") from error


def _parse(path: Path, text: str) -> _RecipeFile:
    try:
        document = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}:" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise RecipeError(f"{path}:{where} {problem}", "mend the YAML there: indentation, quotes, keys") from error
    if not isinstance(document, dict):
        raise RecipeError(f"{path}: not a mapping of keys to values", f"a recipe has {', '.join(_keys(_RecipeFile))}")
    odd = next((key for key in document if not isinstance(key, str)), None)
    if odd is not None:
        raise RecipeError(
            f"{path}: {shown(odd)} is not a key of a recipe", f"a recipe has {', '.join(_keys(_RecipeFile))}"
        )
    try:
        return _RecipeFile.model_validate(document)
    except ValidationError as error:
        raise _advice(path, error) from error


def _keys(model: type[BaseModel]) -> list[str]:
    return list(model.model_fields)


def _advice(path: Path, error: ValidationError) -> RecipeError:
    """The first thing that pydantic found, in one line with a hint."""
    first: Mapping[str, Any] = error.errors()[0]
    location = first["loc"]
    in_rule = len(location) > 1 and location[0] == "rules"
    where = f"{path}: rule {int(location[1]) + 1}" if in_rule else str(path)
    field = str(location[-1])
    keys = _keys(_RuleFile if in_rule else _RecipeFile)
    thing = "a rule" if in_rule else "a recipe"
    if first["type"] == "extra_forbidden":
        near = get_close_matches(field, keys, 1)
        guess = f"did you mean {near[0]!r}? " if near else ""
        return RecipeError(f"{where}: {field!r} is not a key of {thing}", f"{guess}the keys are {', '.join(keys)}")
    if first["type"] == "missing":
        return RecipeError(f"{where}: {field} is missing", f"{thing} has {', '.join(keys)}")
    cause = first.get("ctx", {}).get("error")
    if cause is not None and hasattr(cause, "hint"):
        return RecipeError(f"{where}: {cause.message}", cause.hint)
    if first["type"] in ("model_type", "model_attributes_type"):
        return RecipeError(f"{where}: not a mapping of keys to values", f"{thing} has {', '.join(keys)}")
    message = _PLAIN.get(first["type"], first["msg"])
    return RecipeError(
        f"{where}: {field} {message}, found {shown(first['input'])[:60]}", f"{thing} has {', '.join(keys)}"
    )


_PLAIN = {"string_type": "has to be text", "string_too_short": "is empty", "list_type": "has to be a list"}
