"""A picture of which experts a calibration reached."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from zaya_tools.calibration.statistics import Statistics
from zaya_tools.errors import DestinationError, ZayaError
from zaya_tools.evaluation.report.by_block import coverage_plot
from zaya_tools.evaluation.report.document import BlockRow

ENDINGS = (".svg", ".html")


def check_ending(file: Path) -> None:
    """ZayaError for a file name whose ending says no format that a picture can have, and where none can be written."""
    if file.suffix not in ENDINGS:
        raise ZayaError(f"{file.name} has no ending of a picture", f"choose {' or '.join(ENDINGS)}")
    if not file.absolute().parent.is_dir():
        raise DestinationError(f"the folder {file.parent} does not exist", "create it first")
    if file.is_dir():
        raise DestinationError(f"{file} is a folder", "name a file in it")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise DestinationError(f"{file} cannot be written", "choose another place")


def write_plot(statistics: Statistics, file: Path) -> None:
    """Write the share of tokens by block and expert as one file that needs no other; errors as in `check_ending`."""
    check_ending(file)
    rows = [BlockRow(b.block, b.expert_tokens, b.skipped, None, None) for b in statistics.blocks]
    style = resources.files("zaya_tools.evaluation.report").joinpath("style.css").read_text(encoding="utf-8")
    plot = coverage_plot(rows)
    if file.suffix == ".svg":
        opening, rest = plot.split(">", 1)
        text = f'{opening} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{rest}\n'
    else:
        text = (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Expert coverage</title>\n'
            f"<style>\n{style}</style></head>\n<body><main><section><h2>Expert coverage</h2>{plot}</section></main>"
            "</body></html>\n"
        )
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DestinationError(f"{file} could not be written: {error.strerror}") from error
