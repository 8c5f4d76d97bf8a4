"""`zaya calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zaya_tools.cli.output import Output, count
from zaya_tools.cli.validate import Dtype

if TYPE_CHECKING:
    from zaya_tools.calibration.run import Calibrated, Progress

_LISTED = 12


def calibrate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Full-precision checkpoint, any layout, or a hub id.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="STATS", help="File for the statistics (.safetensors).")
    ],
    data: Annotated[
        str,
        typer.Option(
            help="Text or conversations: a file or pipe (.txt, .jsonl, .parquet), - for stdin, a hub dataset "
            "ORG/NAME:CONFIG@SPLIT, or library (Python's own sources)."
        ),
    ] = "library",
    field: Annotated[str, typer.Option(help="Field of jsonl, parquet and datasets with text or turns.")] = "text",
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder with tokenizer.json and chat template.", show_default=False),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Sequences to run.")] = 256,
    context: Annotated[int, typer.Option(min=2, help="Tokens a sequence.")] = 512,
    seed: Annotated[int, typer.Option(help="Decides the order in which text is taken.")] = 0,
    balance: Annotated[
        bool, typer.Option("--balance", help="Choose sequences that feed the starved experts, among 8 times as many.")
    ] = False,
    min_expert_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="Exit 1 where an expert has seen fewer tokens.")
    ] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Type to compute in.")] = Dtype.float32,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the coverage: .svg or .html.", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an unfinished run of the same settings.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace statistics of that name, and what an unfinished run left.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Run text through a model block by block and keep what its activations are like, for recipes that need to know."""
    from zaya_tools.calibration.data import Choice
    from zaya_tools.calibration.plot import check_ending, write_plot
    from zaya_tools.calibration.run import Settings
    from zaya_tools.calibration.run import calibrate as run

    out = Output(as_json)
    if plot is not None:
        check_ending(plot)
    settings = Settings(
        Choice(data, field, samples, context, seed),
        tokenizer=tokenizer,
        device=device,
        dtype=dtype.value,
        balance=balance,
        min_expert_tokens=min_expert_tokens,
    )
    with out.counting("calibrating") as advance:
        result = run(
            model, output, settings, resume=resume, force=force,
            report=lambda done: advance(done.block + 1, done.blocks, progress_line(done)),
        )  # fmt: skip
    if plot is not None:
        write_plot(result.statistics, plot)
    out.document({"statistics": str(result.file), "already_complete": result.already_complete,
                  "min_expert_tokens": min_expert_tokens,
                  "below": [{"block": b, "expert": e, "tokens": n} for b, e, n in result.starved],
                  **result.document})  # fmt: skip
    show(out, result)
    if plot is not None:
        out.text(f"coverage drawn: {plot}")
    if result.starved:
        out.warn(f"{len(result.starved)} experts saw fewer than {min_expert_tokens} tokens")
        raise typer.Exit(1)


def progress_line(done: Progress) -> str:
    """What the block just done has shown, in a few words."""
    coverage = done.coverage
    least = min(coverage.expert_tokens)
    rate = (done.block + 1) * done.tokens / done.seconds if done.seconds else 0.0
    return (
        f"{done.stage}, block {done.block}: least-fed expert {least:,} tokens, "
        f"skip {coverage.skipped / coverage.tokens:.1%}, {count(rate)} tokens/s a block"
    )


def show(out: Output, result: Calibrated) -> None:
    """Coverage by block, and which experts no token reached."""
    from zaya_tools.calibration.data import shortfalls

    statistics = result.statistics
    out.table(
        "Coverage",
        ["block", "least tokens", "median", "most", "skip", "router entropy"],
        [
            [
                str(b.block),
                f"{min(b.expert_tokens):,}",
                f"{sorted(b.expert_tokens)[len(b.expert_tokens) // 2]:,}",
                f"{max(b.expert_tokens):,}",
                f"{b.skipped / b.tokens:.2%}",
                f"{b.router_entropy:.3f} nats",
            ]
            for b in statistics.blocks
        ],
    )
    data = result.document["data"]
    out.text(
        f"{data['windows']:,} sequences of {data['context']} tokens from {data['data']}, seed {data['seed']}"
        + (f", {data['duplicates']:,} repeated passages left out" if data["duplicates"] else "")
    )
    never = statistics.starved()
    for number, (block, expert, _) in enumerate(never):
        if number == _LISTED:
            out.text(f"and {len(never) - _LISTED:,} more")
            break
        out.text(f"never reached: block {block}, expert {expert}")
    lost = (data["unusable_conversations"], data["unusable_first"])
    for line in shortfalls(data["windows"], data["samples"], *lost):
        out.warn(line)
    out.heading(f"{result.file} is already complete" if result.already_complete else f"wrote {result.file}")
