"""`zaya demo`: the main job, from start to end, on the checkpoint that travels with the package."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zaya_tools.cli.output import Output, size

if TYPE_CHECKING:
    from zaya_tools.evaluation.validation import Validation

RECIPES = ("fp8", "int4")
_CONTEXT = 256
_HELD_OUT_BYTES = 32 * 1024
_VERDICT_TOKENS = 8 * 1024


def demo(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder to create.", show_default=True)] = Path(
        "zaya-demo"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Convert and quantize the bundled checkpoint from a trainer's run, and give a verdict on every result.

    Quantized checkpoints go to DIR-fp8 and DIR-int4. An earlier demo in the same folders is replaced; anything else
    there is left alone and is an error.
    """
    from zaya_tools.checkpoint.conversion import convert
    from zaya_tools.checkpoint.inspection import inspect
    from zaya_tools.cli.convert import show_result, summary
    from zaya_tools.cli.inspect import show
    from zaya_tools.cli.quantize import document, show_roles
    from zaya_tools.cli.validate import show as show_verdict
    from zaya_tools.data import TINY
    from zaya_tools.quantization.conversion import Quantization, quantize
    from zaya_tools.training.corpus import held_out_text

    out = Output(as_json)
    with TemporaryDirectory(prefix="zaya-demo-") as scratch:
        run = Path(scratch) / TINY.name  # the name that model cards give as their base
        out.heading(f"$ zaya convert {TINY} {run} --to megatron")
        saved = convert(TINY, run, to="megatron")
        show_result(out, saved.conversion, run)
        report = inspect(run)
        out.heading(f"\n$ zaya inspect {run}")
        show(out, report)
        out.heading(f"\n$ zaya convert {run} {folder}")
        result = convert(run, folder, force=True)
        show_result(out, result.conversion, folder)
        works: dict[str, Quantization] = {}
        for recipe in RECIPES:
            out.heading(f"\n$ zaya quantize {run} {_quantized(folder, recipe)} --recipe {recipe}")
            done = quantize(run, _quantized(folder, recipe), recipe, force=True)
            assert isinstance(done.conversion, Quantization)
            works[recipe] = done.conversion
            show_roles(out, works[recipe])

    out.heading("\nHeld-out text in transformers' ZayaForCausalLM, float32")
    text = held_out_text(_HELD_OUT_BYTES)
    measured = _perplexity(folder, text)
    out.text(f"perplexity {measured:.3f} a byte on {len(text.encode()):,} bytes of the standard library not trained on")
    out.heading(f"\n$ zaya validate {folder} --reference {TINY}")
    verdict = _verdict(folder, TINY)
    show_verdict(out, verdict)
    verdicts = {"native": verdict}
    quantized: dict[str, Any] = {}
    for recipe, work in works.items():
        target = _quantized(folder, recipe)
        verdicts[recipe] = _verdict(target, TINY)
        quantized[recipe] = {"destination": str(target), **document(work), "validation": verdicts[recipe].document}
    files = sorted(entry.name for entry in folder.iterdir())
    out.heading(f"\nThe native checkpoint is in {folder.resolve()}")
    for name in files:
        out.text(f"  {name}")
    out.text()
    out.table(
        "Verdicts, against the raw checkpoint",
        ["checkpoint", "bytes", "perplexity ratio", "mean KL", "same top token", "verdict"],
        [[name, *_row(found.document)] for name, found in verdicts.items()],
    )
    out.document(
        {
            "inspection": report.as_dict(),
            "conversion": {"destination": str(folder), **summary(result.conversion)},
            "perplexity_per_byte": measured,
            "held_out_bytes": len(text.encode()),
            "validation": verdict.document,
            "quantized": quantized,
            "files": files,
        }
    )
    if not all(found.passed for found in verdicts.values()):
        raise typer.Exit(1)


def _quantized(folder: Path, recipe: str) -> Path:
    return folder.with_name(f"{folder.name}-{recipe}")


def _verdict(folder: Path, reference: Path) -> Validation:
    from zaya_tools.evaluation.validation import Settings, validate

    return validate(folder, reference, Settings(max_tokens=_VERDICT_TOKENS, context=_CONTEXT))


def _row(found: dict[str, Any]) -> list[str]:
    """Cells of a verdict."""
    figures = found["checks"].get("likelihood", {}).get("figures", {})
    if "kl" not in figures:  # structure or weights failed: the model was not run
        return [size(found["model"]["bytes"]), "-", "-", "-", found["verdict"]]
    return [
        size(found["model"]["bytes"]),
        f"{figures['perplexity_ratio']['value']:.5f}",
        f"{figures['kl']['mean']['value']:.5f}",
        f"{figures['same_top_token']['value']:.2%}",
        found["verdict"],
    ]


def _perplexity(folder: Path, text: str) -> float:
    from tokenizers import Tokenizer

    from zaya_tools.evaluation.transformers_engine import load, perplexity

    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return perplexity(load(folder), tokens, _CONTEXT)
