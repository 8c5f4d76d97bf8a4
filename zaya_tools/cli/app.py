"""Wires the commands. Nothing heavy is imported here: `zaya --help` must answer at once."""

from __future__ import annotations

from typing import Annotated

import typer

from zaya_tools import __version__
from zaya_tools.cli import convert, errors, inspect

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


def main() -> None:
    """Entry point of the `zaya` command."""
    errors.run(app)


if __name__ == "__main__":
    main()
