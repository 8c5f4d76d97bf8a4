"""The model card that travels with a quantized checkpoint: what it is, how well it holds, how to serve it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from zaya_tools import __version__
from zaya_tools.quantization.summary import Measured, decibels, summarize, typical, worst

if TYPE_CHECKING:
    from zaya_tools.quantization.conversion import Quantization


def model_card(work: Quantization, measured: Measured) -> str:
    """README.md in the form that model hubs read. No times and no paths: equal runs give equal cards."""
    summary = summarize(work)
    recipe = work.recipe.name
    scheme = ", ".join(sorted({entry for role in summary.roles for entry in role.schemes})) or "none"
    lines = [
        "---",
        "library_name: vllm",
        "pipeline_tag: text-generation",
        f"base_model: {_quoted(work.name)}",
        "tags:",
        "- zaya",
        *(["- compressed-tensors"] if work.resolved.schemes else []),
        f"- {_quoted(recipe)}",
        "---",
        "",
        f"# {_plain(work.name)}, "
        + (f"quantized with the recipe {_plain(recipe)}" if work.resolved.schemes else "in full precision"),
        "",
        _plain(work.recipe.description),
        "",
        "| | |",
        "|---|---|",
        f"| base | {_plain(work.name)} ({work.found.layout.name} layout) |",
        f"| recipe | {_plain(recipe)} |",
        f"| schemes | {scheme} |",
        f"| bytes of tensors, before and after | {summary.before:,} and {summary.after:,} |",
        f"| bits per weight | {summary.bits:.2f} |",
        f"| largest tensor-parallel size | {work.resolved.max_tensor_parallel} |",
        f"| made with | zaya-tools {__version__} |",
        "",
        "| role | matrices quantized | schemes | bytes |",
        "|---|---|---|---|",
    ]
    for entry in summary.roles:
        kept = "full precision, protected" if entry.protected else "full precision"
        counts = f"{entry.quantized:,} of {entry.matrices:,}" if entry.matrices else "-"
        lines.append(f"| {entry.role.value} | {counts} | {', '.join(entry.schemes) or kept} | {entry.nbytes:,} |")
    errors = typical(measured)
    if errors is not None:
        lines += [
            "",
            f"The relative error of a weight, |stored - trained| / |trained|, is {errors[0]:.4f} in the median and "
            f"{errors[1]:.4f} at most. The worst:",
            "",
            "| weight | scheme | relative error | SQNR, dB | clipped |",
            "|---|---|---|---|---|",
        ]
        for name, facts in worst(measured):
            lines.append(
                f"| {name} | {facts['scheme']} | {facts['relative_error']:.4f} | {decibels(facts)} "
                f"| {100 * facts['clipped_fraction']:.3f} % |"
            )
    lines += [
        "",
        "## Serving",
        "",
        "```bash",
        "pip install zaya-tools  # beside vLLM, for versions of it that have no ZAYA1 of their own",
        "vllm serve PATH_OF_THIS_FOLDER",
        "```",
        "",
        "`zaya validate PATH_OF_THIS_FOLDER --reference BASE` measures it against the checkpoint it was made from.",
        "`zaya_manifest.json` has the digest of every file and source tensor, and the errors of every weight.",
        "",
    ]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """A YAML scalar that reads as `text`, whatever is in it: YAML takes JSON's strings."""
    return json.dumps(text, ensure_ascii=False)


def _plain(text: str) -> str:
    """A name or a description in one line that cannot end a table cell or the front matter."""
    return " ".join(text.split()).replace("|", "\\|")
