"""Wires the commands. Nothing heavy is imported here: `zaya --help` must answer at once."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from zaya_tools import __version__
from zaya_tools.cli import calibrate, convert, demo, errors, inspect, quantize, recipe, validate

app = typer.Typer(
    name="zaya",
    help="Convert, inspect and prove ZAYA1 checkpoints for vLLM and transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"zaya {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Convert, inspect and prove ZAYA1 checkpoints for vLLM and transformers."""


app.command()(inspect.inspect)
app.command()(convert.convert)
app.command()(quantize.quantize)
app.command()(calibrate.calibrate)
app.add_typer(recipe.app, name="recipe")
app.command()(validate.validate)
app.command()(demo.demo)


def main() -> None:
    """Entry point of the `zaya` command."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # stderr has this from Python: no name can fail to print
        sys.stdout.reconfigure(errors="backslashreplace")
    # torch's waiting threads spin by default, which makes a shared machine several times slower. Read when it loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    errors.run(lambda: app(standalone_mode=False))


if __name__ == "__main__":
    main()
