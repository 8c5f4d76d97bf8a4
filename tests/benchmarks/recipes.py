"""What every recipe costs in quality on the bundled checkpoint: run by hand, reported in the README.

    python -m tests.benchmarks.recipes --tokens 32768

Each recipe that needs no data, and each 4-bit one with scales by minmax too, quantizes the tiny checkpoint; `zaya
validate` measures the result against it on held-out text, in float32.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.quantization.support import DATA_FREE
from zaya_tools import quantize, validate
from zaya_tools.data import TINY
from zaya_tools.evaluation.validation import Settings
from zaya_tools.quantization.conversion import Quantization
from zaya_tools.quantization.recipe import load_recipe
from zaya_tools.quantization.summary import summarize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--only", nargs="*", default=None, help="recipes by name")
    options = parser.parse_args()
    print("| recipe | scales by | bytes | bits per weight | perplexity ratio | mean KL | same top token | verdict |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.only or DATA_FREE:
            observers = sorted({rule.observer for rule in load_recipe(name).rules if rule.observer})
            for choice in ("minmax", "mse") if observers == ["mse"] else (None,):
                file = Path(scratch) / "recipe.yaml"
                extra = f"observer: {choice}\n" if choice else ""
                file.write_text(f"name: {name}\ndescription: {name}.\nextends: {name}\n{extra}")
                label = choice or ", ".join(observers) or "-"
                print(_row(name, label, file, Path(scratch), options.tokens))


def _row(name: str, observer: str, recipe: Path, scratch: Path, tokens: int) -> str:
    target = scratch / "out"
    work = quantize(TINY, target, recipe, force=True).conversion
    assert isinstance(work, Quantization)
    found = summarize(work)
    settings = Settings(checks=("structure", "weights", "likelihood"), max_tokens=tokens, context=256)
    document = validate(target, TINY, settings).document
    figures = document["checks"]["likelihood"]["figures"]
    kl, ratio = figures["kl"]["mean"], figures["perplexity_ratio"]["value"]
    return (
        f"| `{name}` | {observer} | {found.after:,} | {found.bits:.2f} | {ratio:.4f} "
        f"| {kl['value']:.5f} +- {kl['error']:.5f} | {figures['same_top_token']['value']:.2%} "
        f"| {document['verdict']} |"
    )


if __name__ == "__main__":
    main()
