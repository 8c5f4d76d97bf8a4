from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compressed_tensors.quantization import preset_name_to_scheme

from zaya_tools.evaluation.likelihood import BlockFigures, Divergence, Likelihood
from zaya_tools.evaluation.statistics import Estimate
from zaya_tools.evaluation.verdict import DEFAULTS, FULL, Limits, judge, scheme_class

LIMITS = Limits(1.01, 0.02, 0.95, 0.9)
GOOD = Divergence(
    reference_perplexity=Estimate(3.0, 0.1), ratio=Estimate(1.005, 0.001), kl=Estimate(0.01, 0.001),
    percentiles={"50": 0.001}, maximum=1.0, top1=Estimate(0.97, 0.01), histogram=(),
)  # fmt: skip


def blocks(*agreements: float | None, errors: tuple[float, ...] = (), coverage: tuple[int, ...] = (3, 4, 0)) -> Any:
    padded = (*errors, *[0.01] * len(agreements))
    return tuple(BlockFigures(i, coverage, a, e) for i, (a, e) in enumerate(zip(agreements, padded, strict=False)))


def likelihood(perplexity: float = 3.0, own: Any = None, **changes: Any) -> Likelihood:
    return Likelihood(7, Estimate(perplexity, 0.1), own or blocks(0.95, 0.93, 0.99), replace(GOOD, **changes))


def failures(found: Likelihood, limits: Limits = LIMITS) -> list[str]:
    return [finding.message for finding in judge(found, limits, 320).failures]


def test_a_good_model_passes() -> None:
    result = judge(likelihood(), LIMITS, 320)
    assert result.check == "likelihood"
    assert result.findings == ()
    assert result.figures == likelihood().as_dict()


CASES = [
    ({"ratio": Estimate(1.0101, 0.002)}, "perplexity is 1.0101 +- 0.0020 times the reference's, at most 1.01 passes"),
    ({"kl": Estimate(0.0201, 0.001)}, "mean KL is 0.0201 +- 0.001 nats a token, at most 0.02 passes"),
    ({"top1": Estimate(0.9499, 0.001)}, "94.99% of the most likely tokens are the reference's, at least 95.00% passes"),
    ({"own": blocks(0.95, 0.8999, 0.99)},
     "block 1 routes 89.99% of the tokens like the reference, at least 90.00% passes"),
    ({"own": blocks(0.95, 0.95, 0.95, errors=(0.1, float("nan"), float("nan")))},
     "hidden states after block 1 are not finite"),
    ({"perplexity": 160.0}, "perplexity 160 of a vocabulary of 320: the model only guesses"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), CASES)
def test_each_limit_has_its_words(changes: dict[str, Any], message: str) -> None:
    assert failures(likelihood(**changes)) == [message]


@pytest.mark.parametrize("name", ["ratio", "kl", "top1"])
def test_the_limit_itself_passes(name: str) -> None:
    limit = {"ratio": LIMITS.max_perplexity_ratio, "kl": LIMITS.max_kl, "top1": LIMITS.min_top1}[name]
    changes: dict[str, Any] = {name: Estimate(limit, 0.1)}
    assert failures(likelihood(**changes)) == []
    assert failures(likelihood(own=blocks(LIMITS.min_router_agreement))) == []


@pytest.mark.parametrize("name", ["ratio", "kl", "top1", "perplexity"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_does_not_pass(name: str, value: float) -> None:
    if name == "top1" and value == np.inf:
        value = -np.inf
    changes: dict[str, Any] = {name: value if name == "perplexity" else Estimate(value, np.nan)}
    assert len(failures(likelihood(**changes))) == 1


def test_all_faults_are_told() -> None:
    changes: dict[str, Any] = {}
    for case, _ in CASES:
        changes |= case
    changes["own"] = blocks(0.5, 0.6, errors=(0.1, np.inf))
    assert len(failures(likelihood(**changes))) == len(CASES)


def test_without_a_reference_only_guessing_is_a_fault() -> None:
    alone = Likelihood(7, Estimate(12.0, 1.0), blocks(None, None), None)
    assert failures(alone) == []
    assert len(failures(replace(alone, perplexity=Estimate(np.nan, np.nan)))) == 1
    assert len(failures(replace(alone, perplexity=Estimate(320.0, 1.0)))) == 1


def test_no_limit_on_routing() -> None:
    assert failures(likelihood(own=blocks(0.0)), replace(LIMITS, min_router_agreement=0)) == []
    assert failures(Likelihood(7, Estimate(3, 0.1), (), GOOD)) == []  # an engine that does not see into blocks


def test_unused_experts_are_noted() -> None:
    own = (
        *blocks(0.95, coverage=(0, 4, 0, 9)),
        BlockFigures(1, (1, 1, 1, 0), 0.95, 0.1),
        BlockFigures(2, (0, 0, 2, 0), 1, 0),
    )
    result = judge(likelihood(own=own), LIMITS, 320)
    assert not result.failures
    (note,) = result.findings
    assert note.severity == "note"
    assert note.message == "no token reached these experts: block 0: 0, 2; block 2: 0, 1"


def group(scheme: str) -> dict[str, Any]:
    dumped: dict[str, Any] = preset_name_to_scheme(scheme, ["Linear"]).model_dump(mode="json")
    return dumped


@pytest.mark.parametrize(
    ("schemes", "expected"),
    [
        (["FP8_DYNAMIC"], "8-bit"), (["FP8"], "8-bit"), (["FP8_BLOCK"], "8-bit"), (["W8A8"], "8-bit"),
        (["MXFP8"], "8-bit"), (["W8A16"], "8-bit"), (["W4A16"], "4-bit"), (["W4A16_ASYM"], "4-bit"),
        (["NVFP4"], "4-bit"), (["MXFP4"], "4-bit"), (["W4A8"], "4-bit"), (["FP8_DYNAMIC", "W4A16"], "4-bit"),
        (["W2A16"], "4-bit"),
    ],
)  # fmt: skip
def test_limits_go_by_the_fewest_bits(schemes: list[str], expected: str) -> None:
    groups = {f"group_{number}": group(scheme) for number, scheme in enumerate(schemes)}
    config = {"quantization_config": {"config_groups": groups}}
    assert scheme_class(config, True) == expected
    assert scheme_class(config, False) == FULL


@pytest.mark.parametrize("stated", [None, {}, {"config_groups": {}}, {"config_groups": {"a": 3}}, "x"])
def test_what_is_not_said_gets_the_widest_limits(stated: Any) -> None:
    assert scheme_class({"quantization_config": stated}, True) == "4-bit"
    assert scheme_class({}, True) == "4-bit"


def test_fewer_bits_never_have_tighter_limits() -> None:
    full, eight, four = (DEFAULTS[name] for name in (FULL, "8-bit", "4-bit"))
    for tight, wide in ((full, eight), (eight, four)):
        assert tight.max_perplexity_ratio < wide.max_perplexity_ratio
        assert tight.max_kl < wide.max_kl
        assert tight.min_top1 > wide.min_top1
        assert tight.min_router_agreement > wide.min_router_agreement
    assert set(full.as_dict()) == {"max_perplexity_ratio", "max_kl", "min_top1", "min_router_agreement"}
