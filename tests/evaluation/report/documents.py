"""Validation documents as `zaya validate` makes them, of any geometry."""

from __future__ import annotations

from typing import Any

import numpy as np

from zaya_tools.evaluation.likelihood import BINS

HOSTILE = "<script>alert('x')</script>\"&<img src=http://example.com/a.png>\x00\u202e|`````"


def full(blocks: int = 4, experts: int = 4, verdict: str = "PASS", tokens: int = 40_960) -> dict[str, Any]:
    """Every section filled, as after quantizing the experts."""
    rng = np.random.default_rng(blocks * 100 + experts)
    return {
        "verdict": verdict,
        "reasons": [] if verdict == "PASS" else [
            "block 1: gate and up of expert 3 are swapped: each half's error falls from 1.41 to 0.031 when exchanged",
            "KL divergence is 0.0312 ± 0.0011 nats a token, at most 0.02 is accepted for FP8",
        ],
        "warnings": ["block 0, expert 3 took no token: its quantization was not put to the test"],
        "notes": ["Tied output head: lm_head.weight is not stored.", "Skip cannot be chosen in any block."],
        "model": _model("zaya1-tiny-fp8", "float-quantized", blocks, experts, 1_204_336),
        "reference": _model("zaya1-tiny", None, blocks, experts, 2_113_024),
        "settings": {
            "data": "held-out text of the standard library", "tokens": tokens, "context": 512, "stride": 256,
            "dtype": "bfloat16", "device": "cpu", "engine": "stream",
        },
        "thresholds": {"max_perplexity_ratio": 1.02, "max_kl": 0.02, "min_top1": 0.95, "min_router_agreement": 0.9},
        "tool": {"zaya_tools": "0.1.0", "torch": "2.13.0"},
        "checks": {
            "structure": {"passed": True, "figures": {
                "tensors": {"expected": 43 * blocks, "found": 43 * blocks}, "scales": {"least": 2.1e-5, "most": 0.013},
                "quantized": [{"role": "expert", "quantized": 3 * blocks * experts, "of": 3 * blocks * experts}],
                "ignored": ["lm_head", "re:.*router.*"], "tied": True,
            }},
            "weights": {"passed": verdict == "PASS", "figures": _weights(rng, blocks, experts, verdict)},
            "likelihood": {"passed": verdict == "PASS", "figures": _likelihood(rng, blocks, experts, tokens, verdict)},
            "generation": {"passed": True, "figures": _generation()},
        },
    }  # fmt: skip


def hostile(document: Any) -> Any:
    """The document with every text, and every key of a free mapping, an attack."""
    if isinstance(document, dict):
        return {key: hostile(value) for key, value in document.items()} | {HOSTILE: HOSTILE}
    if isinstance(document, list):
        return [hostile(value) for value in document]
    return HOSTILE if isinstance(document, str) else document


def _model(name: str, scheme: str | None, blocks: int, experts: int, nbytes: int) -> dict[str, Any]:
    parameters = 262_144 * blocks * experts
    return {
        "name": name, "layout": "native", "parameters": parameters, "bytes": nbytes, "scheme": scheme,
        "blocks": blocks, "experts": experts,
        "scheme_class": "8-bit" if scheme else "full precision",
    }  # fmt: skip


def _weights(rng: np.random.Generator, blocks: int, experts: int, verdict: str) -> dict[str, Any]:
    rows = []
    for block in range(blocks):
        for expert in range(experts):
            for part in ("gate", "up", "down"):
                swapped = verdict == "FAIL" and (block, expert) == (1, min(3, experts - 1)) and part != "down"
                error = 1.413 if swapped else float(rng.uniform(0.022, 0.034))
                name = f"model.layers.{block}.mlp.experts.{expert}.{part}_proj.weight"
                rows.append({
                    "name": name, "block": block, "expert": expert, "part": part,
                    "sqnr_db": round(float(-20 * np.log10(error)), 3), "relative_error": error,
                })  # fmt: skip
    others = 38 * blocks + 4
    return {
        "layout": "native", "reference_layout": "raw", "tensors": others + len(rows), "compared": others + len(rows),
        "not_compared": 0, "equal": others - blocks, "quantized": len(rows), "different": 0, "widened": blocks,
        "limits": [{"scheme": "float 8 bits, channel", "sqnr_db_min": 25.0, "sqnr_db_usual": 31.5}],
        "by_role": [{"role": "expert", "part": part, "tensors": blocks * experts} for part in ("gate", "up", "down")],
        "by_tensor": rows,
    }  # fmt: skip


def _likelihood(rng: np.random.Generator, blocks: int, experts: int, tokens: int, verdict: str) -> dict[str, Any]:
    kl = np.exp(rng.normal(-6.2 if verdict == "PASS" else -4.4, 1.6, tokens))
    rows = []
    for block in range(blocks):
        share = rng.dirichlet(np.full(experts, 2.0))
        if block % 5 == 0:
            share[min(3, experts - 1)] = 0.0
        counts = rng.multinomial(tokens, share / share.sum())
        skipped = int(counts[0] // 20) if block % 7 == 6 else 0
        counts[0] -= skipped
        rows.append({
            "block": block, "expert_tokens": [int(n) for n in counts], "skipped_tokens": skipped,
            "router_agreement": float(1 - 0.028 * rng.beta(2, 4)),
            "hidden_error": float(0.004 + 0.02 * (block / max(1, blocks - 1)) ** 0.6 + rng.uniform(0, 0.002)),
        })  # fmt: skip
    return {
        "tokens": tokens,
        "perplexity": {"value": 4.3172, "error": 0.0611},
        "reference_perplexity": {"value": 4.2981, "error": 0.0607},
        "perplexity_ratio": {"value": 1.00444, "error": 0.00071},
        "kl": {
            "mean": {"value": float(kl.mean()), "error": 0.00011},
            "percentiles": {f"{p:g}": float(np.percentile(kl, p)) for p in (50, 90, 95, 99, 99.9)},
            "max": float(kl.max()),
        },
        "same_top_token": {"value": 0.9741, "error": 0.0012},
        "kl_histogram": {
            "edges": BINS.tolist(), "counts": [int(n) for n in np.histogram(np.minimum(kl, BINS[-1]), BINS)[0]],
        },
        "blocks": rows,
    }  # fmt: skip


def _generation() -> dict[str, Any]:
    same = "\n    for name in names:\n        value = getattr(self, name)\n        if value is None:\n            "
    return {
        "texts": [
            {"prompt": "def as_dict(self, names):\n    found = {}", "text": f"{same}continue\n",
             "reference_text": f"{same}raise KeyError(name)\n"},
            {"prompt": "import os\nimport sys\n", "text": "from pathlib import Path\n\n__all__ = ['walk']\n",
             "reference_text": "from pathlib import Path\n\n__all__ = ['walk']\n"},
        ],
        "prompts": 2, "new_tokens": 48, "largest_gap": 0.00021, "entropy": 1.372, "repetition": 0.04,
        "reference_entropy": 1.366, "reference_repetition": 0.03, "agreement": 0.89,
    }  # fmt: skip
