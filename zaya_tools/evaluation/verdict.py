"""What a model may differ from its reference by, and whether it does: the limits, by scheme, and the faults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zaya_tools.evaluation.findings import CheckResult, Finding
from zaya_tools.evaluation.likelihood import Likelihood

CHECK = "likelihood"
FULL = "full precision"


@dataclass(frozen=True)
class Limits:
    """The most, or the least, that passes: perplexity ratio, mean KL in nats, share of equal top tokens.

    `router_agreement` is the least share of tokens that any block routes like the reference; 0 switches it off.
    """

    max_perplexity_ratio: float
    max_kl: float
    min_top1: float
    min_router_agreement: float

    def as_dict(self) -> dict[str, float]:
        """Plain values."""
        return {
            "max_perplexity_ratio": self.max_perplexity_ratio,
            "max_kl": self.max_kl,
            "min_top1": self.min_top1,
            "min_router_agreement": self.min_router_agreement,
        }


# Two to three times what sound quantizations of a small trained ZAYA1 showed on held-out text: a fault in one block
# of many is far outside, a good scheme well inside.
DEFAULTS = {
    FULL: Limits(1.001, 1e-4, 0.999, 0.99),
    "8-bit": Limits(1.01, 0.02, 0.95, 0.9),
    "4-bit": Limits(1.04, 0.08, 0.88, 0.75),
}


def scheme_class(config: Mapping[str, Any], quantized: bool) -> str:
    """Which limits a checkpoint gets: those of the fewest bits that its quantization config stores weights in."""
    if not quantized:
        return FULL
    stated = config.get("quantization_config")
    groups = stated.get("config_groups") if isinstance(stated, Mapping) else None
    bits = [
        int(group["weights"]["num_bits"])
        for group in (groups or {}).values()
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping) and "num_bits" in group["weights"]
    ]
    return "8-bit" if bits and min(bits) >= 8 else "4-bit"


def judge(found: Likelihood, limits: Limits, vocabulary: int) -> CheckResult:
    """The likelihood figures against the limits. Without a reference only a model that merely guesses is a fault."""
    faults = []
    # Comparisons are written so that NaN is a fault too.
    if not math.isfinite(found.perplexity.value):
        faults.append("the likelihood is not a finite number: weights or activations overflow or hold NaN")
    elif not found.perplexity.value < vocabulary / 2:
        faults.append(
            f"perplexity {found.perplexity.value:.4g} of a vocabulary of {vocabulary:,}: the model only guesses"
        )
    against = found.divergence
    if against is not None:
        faults += _against(found, limits)
    notes = []
    starved = {b.block: unused for b in found.blocks if (unused := [e for e, n in enumerate(b.coverage[:-1]) if not n])}
    if starved:
        where = "; ".join(f"block {block}: {', '.join(map(str, unused))}" for block, unused in starved.items())
        notes.append(Finding(CHECK, "note", f"no token reached these experts: {where}"))
    findings = (*(Finding(CHECK, "fail", fault) for fault in faults), *notes)
    return CheckResult(CHECK, findings, found.as_dict())


def _against(found: Likelihood, limits: Limits) -> list[str]:
    faults = []
    against = found.divergence
    assert against is not None
    ratio, kl, top1 = against.ratio, against.kl, against.top1
    if not ratio.value <= limits.max_perplexity_ratio:
        faults.append(
            f"perplexity is {ratio.value:.4f} +- {ratio.error:.4f} times the reference's, "
            f"at most {limits.max_perplexity_ratio:g} passes"
        )
    if not kl.value <= limits.max_kl:
        faults.append(f"mean KL is {kl.value:.3g} +- {kl.error:.2g} nats a token, at most {limits.max_kl:g} passes")
    if not top1.value >= limits.min_top1:
        faults.append(
            f"{top1.value:.2%} of the most likely tokens are the reference's, at least {limits.min_top1:.2%} passes"
        )
    agreements = [(b.agreement, b.block) for b in found.blocks if b.agreement is not None]
    worst, block = min(agreements, default=(1.0, -1))
    if not worst >= limits.min_router_agreement:
        faults.append(
            f"block {block} routes {worst:.2%} of the tokens like the reference, "
            f"at least {limits.min_router_agreement:.2%} passes"
        )
    errors = [(b.error, b.block) for b in found.blocks if b.error is not None]
    broken = [index for error, index in errors if not math.isfinite(error)]
    if broken:
        faults.append(f"hidden states after block {broken[0]} are not finite")
    return faults
