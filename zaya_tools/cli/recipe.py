"""`zaya recipe`: what recipes there are, what one says, and what it does to a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zaya_tools.cli.output import Output

if TYPE_CHECKING:
    from zaya_tools.quantization.explain import Explained
    from zaya_tools.quantization.recipe import Recipe
    from zaya_tools.quantization.resolve import Resolved

app = typer.Typer(no_args_is_help=True, help="List, show and explain recipes for `zaya quantize`.")

_Name = Annotated[str, typer.Argument(metavar="NAME|FILE", help="A recipe of `zaya recipe list`, or a YAML file.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


@app.command("list")
def list_recipes(as_json: _Json = False) -> None:
    """List the recipes that come with zaya."""
    from zaya_tools.quantization.recipe import load_recipe, recipe_names

    out = Output(as_json)
    recipes = [load_recipe(name) for name in recipe_names()]
    out.document({"recipes": [recipe.as_dict() for recipe in recipes]})
    rows = [[recipe.name, recipe.description, recipe.runs_on] for recipe in recipes]
    out.table("Recipes", ["name", "what it does", "runs on"], rows)


@app.command()
def show(name: _Name, as_json: _Json = False) -> None:
    """Show what a recipe says: its rules, inherited ones first, and where the result runs."""
    from zaya_tools.quantization.recipe import load_recipe

    out = Output(as_json)
    recipe = load_recipe(name)
    out.document(recipe.as_dict())
    _show(out, recipe)


def _show(out: Output, recipe: Recipe) -> None:
    base = f", extends {recipe.extends}" if recipe.extends else ""
    out.heading(f"{recipe.name}: {recipe.description}")
    out.text(f"runs on {recipe.runs_on}" if recipe.runs_on else "does not say where it runs")
    out.text(f"read from {recipe.source}{base}")
    rows = [
        [
            str(number),
            rule.role,
            str(rule.blocks) if rule.blocks else "all",
            ", ".join(rule.projections) if rule.projections else "all",
            rule.scheme_name,
            rule.observer or "-",
        ]
        for number, rule in enumerate(recipe.rules, start=1)
    ]
    if not rows:
        out.text("no rules: everything keeps full precision")
        return
    out.table("Rules", ["rule", "role", "blocks", "projections", "scheme", "scales by"], rows)
    if len(rows) > 1:
        out.text(
            "where several match: one that names projections before one that does not, then one that names blocks, "
            "then the later one"
        )


@app.command()
def explain(
    name: _Name,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Checkpoint folder or file, or a hub id like org/name.")
    ],
    as_json: _Json = False,
) -> None:
    """Say for every module of a model which rule of a recipe decided and what it gets. Reads no weights.

    Blocks and experts that are treated alike are shown together; --json has every block.
    """
    from zaya_tools.checkpoint.hub import locate
    from zaya_tools.checkpoint.opening import open_checkpoint
    from zaya_tools.layouts.match import match
    from zaya_tools.quantization.explain import explain as every_module
    from zaya_tools.quantization.recipe import load_recipe
    from zaya_tools.quantization.resolve import resolve

    out = Output(as_json)
    recipe = load_recipe(name)
    folder, model_name = locate(model)
    source = open_checkpoint(folder)
    found = match(source.tensors, source.config, str(folder))
    if found.problems:
        out.warn(f"{model_name} is incomplete or inconsistent: `zaya inspect` says how")
    resolved = resolve(recipe, found.architecture)
    entries = every_module(resolved)
    out.document({"model": model_name, **resolved.as_dict(), "modules": [entry.as_dict() for entry in entries]})
    _explain(out, resolved, model_name, entries)


def _explain(out: Output, resolved: Resolved, model: str, entries: tuple[Explained, ...]) -> None:
    from zaya_tools.quantization.explain import fold

    counts = ", ".join(f"{word} {done:,}/{of:,}" for word, (done, of) in resolved.quantized.items())
    out.heading(f"{resolved.recipe.name} on {model}: {counts} matrices quantized")
    rows = [
        [
            f.blocks or "-",
            f.first.module,
            _shape(f.first.shape),
            f.first.scheme,
            f.first.observer or "-",
            f.first.reason,
        ]
        for f in fold(tuple(entry for entry in entries if not entry.protected))
    ]
    out.table("Decided by rules", ["blocks", "module", "shape", "scheme", "scales by", "why"], rows)
    protected = fold(tuple(entry for entry in entries if entry.protected))
    out.table(
        "Protected: no recipe can touch these",
        ["blocks", "module", "role", "why"],
        [
            [f.blocks or "-", f.first.module, f.first.role, f.first.reason.removeprefix("protected: ")]
            for f in protected
        ],
    )
    out.text(f"largest tensor-parallel size {resolved.max_tensor_parallel}")


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{extent:,}" for extent in shape)
