from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.calibration.support import SMALL
from tests.synthetic import read_tensors, small, write_checkpoint
from zaya_tools import calibrate, quantize
from zaya_tools.calibration.data import Choice
from zaya_tools.checkpoint.source import open_source
from zaya_tools.data import TINY
from zaya_tools.errors import ZayaError
from zaya_tools.evaluation.likelihood import measure
from zaya_tools.evaluation.text import HELD_OUT, tokenize
from zaya_tools.evaluation.windows import cut
from zaya_tools.layouts.raw import RAW
from zaya_tools.model.weights import Weights
from zaya_tools.parameters import parameters, total
from zaya_tools.quantization.auto import Auto, choose_recipe, explanation
from zaya_tools.quantization.calibrated import Calibration
from zaya_tools.quantization.damage import Option, Unit, units_of
from zaya_tools.quantization.mixed import Chosen, choose, recipe_of, recipe_text
from zaya_tools.quantization.recipe import load_recipe
from zaya_tools.quantization.resolve import resolve


def unit(block: int, *options: tuple[str | None, int, float], role: str = "experts") -> Unit:
    return Unit(role, block, tuple(Option(*option) for option in options))


@settings(max_examples=60, deadline=None)
@given(
    tables=st.lists(
        st.lists(st.tuples(st.integers(1, 60), st.floats(0, 9)), min_size=1, max_size=4), min_size=1, max_size=4
    ),
    other=st.integers(0, 50),
    target=st.integers(0, 300),
)
def test_no_other_choice_of_that_size_costs_less(
    tables: list[list[tuple[int, float]]], other: int, target: int
) -> None:
    units = [unit(b, *((str(n), size, cost) for n, (size, cost) in enumerate(t))) for b, t in enumerate(tables)]
    possible = [
        (sum(o.damage for o in options), sum(o.nbytes for o in options))
        for options in product(*(u.options for u in units))
        if other + sum(o.nbytes for o in options) <= target
    ]
    if not possible:
        with pytest.raises(ZayaError, match="the smallest checkpoint"):
            choose(units, other, target)
        return
    found = choose(units, other, target)
    assert found.nbytes <= target
    assert found.nbytes == other + sum(option.nbytes for option in found.options)
    assert found.damage == pytest.approx(min(possible)[0], abs=1e-9)


def test_sizes_far_beyond_the_steps_keep_the_target() -> None:
    units = [
        unit(b, ("int4", 10**8 + b, 1.0), ("int8", 2 * 10**8 + 7 * b, 0.1), (None, 4 * 10**8, 0.0)) for b in range(80)
    ]
    target = 13 * 10**9
    found = choose(units, 10**9, target)
    assert target - 10**8 < found.nbytes <= target


@pytest.mark.parametrize("room", [0, 1, 10**12])
@pytest.mark.parametrize("odd", [0, 1])
def test_full_precision_is_chosen_where_everything_fits(room: int, odd: int) -> None:
    # With sizes that no large step divides, too: rounding them up must not keep the last one out.
    units = [unit(b, ("int4", 10**8 + odd * b, 1.0), (None, 4 * 10**8 + 3 * odd, 0.0)) for b in range(80)]
    whole = sum(u.options[-1].nbytes for u in units)
    found = choose(units, 10**9, 10**9 + whole + room)
    assert (found.damage, found.nbytes) == (0.0, 10**9 + whole)


def test_a_target_that_a_choice_meets_to_the_byte_is_met() -> None:
    packed, whole = 524_288 + 8192, 2_097_152
    units = [unit(b, ("int4", packed, 1.0), (None, whole, 0.0)) for b in range(80)]
    for full in range(81):
        found = choose(units, 0, (80 - full) * packed + full * whole)
        assert found.damage == 80 - full


def test_schemes_that_a_tensor_parallel_size_would_cut_are_no_options(tmp_path: Path) -> None:
    a = small(hidden_size=128, head_dim=64, expert_width=256)
    write_checkpoint(tmp_path, RAW, a)
    weights = Weights.open(tmp_path)
    every = ["int4", "int4-g32", "int8", None]
    for size, schemes in ((1, every), (4, every[1:]), (16, every[2:])):
        found = {unit.role: [option.scheme for option in unit.options] for unit in units_of(weights, size)}
        assert found == {"attention": every, "experts": schemes}


def test_the_recipe_says_what_was_chosen() -> None:
    options = {name: Option(name, 1, 0.0) for name in ("int4", "int8", None)}
    names = {"attention": ("int8", "int8", None, "int8"), "experts": ("int4", "int8", "int4", "int4")}
    units = [Unit(role, block, tuple(options.values())) for role in names for block in range(4)]
    chosen = Chosen(tuple(units), tuple(options[names[u.role][u.block]] for u in units), 1000, 0.0)
    resolved = resolve(recipe_of(recipe_text(chosen, "gptq", 2000)), Weights.open(TINY).architecture)
    for parameter in parameters(resolved.architecture):
        decision = resolved.decisions.get(parameter.name)
        if decision is None or parameter.block is None:
            continue
        role = "experts" if "experts" in parameter.name else "attention"
        wanted = names[role][parameter.block]
        assert (decision.scheme.name if decision.scheme else None) == wanted
        assert decision.observer == ("gptq" if wanted else None)


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("statistics")
    from dataclasses import replace

    return calibrate(TINY, folder / "stats", replace(SMALL, choice=Choice(samples=32, context=128))).file


@pytest.fixture(scope="module")
def auto(statistics: Path, tmp_path_factory: pytest.TempPathFactory) -> Auto:
    folder = tmp_path_factory.mktemp("auto")
    found = choose_recipe(TINY, folder / "out", Calibration(statistics=statistics), bits=5.5)
    assert list(folder.iterdir()) == []
    return found


def kl(folder: Path) -> float:
    windows = cut(tokenize(TINY, HELD_OUT, 4096), 256)
    divergence = measure(Weights.open(folder), windows, Weights.open(TINY)).divergence
    assert divergence is not None
    return divergence.kl.value


def test_the_damage_foretold_is_the_damage_done_and_less_than_a_fixed_recipes(
    auto: Auto, statistics: Path, tmp_path: Path
) -> None:
    given = Calibration(statistics=statistics)
    quantize(TINY, tmp_path / "auto", auto.recipe, calibration=given)
    nbytes = open_source(tmp_path / "auto").nbytes
    assert nbytes == auto.chosen.nbytes <= 5.5 * total(Weights.open(TINY).architecture) / 8
    done = kl(tmp_path / "auto")
    assert auto.chosen.damage == pytest.approx(done, rel=0.4)
    for name in ("int4-imatrix", "nvfp4a16"):  # a little smaller, and of its size
        quantize(TINY, tmp_path / name, name, calibration=given)
        assert done < 0.7 * kl(tmp_path / name)


def test_damage_falls_as_bits_rise(auto: Auto) -> None:
    assert len(auto.chosen.units) == 8
    for one in auto.chosen.units:
        names = [option.scheme for option in one.options]
        assert names == ["int4", "int4-g32", "int8", None]
        assert [o.nbytes for o in one.options] == sorted(o.nbytes for o in one.options)
        damages = [o.damage for o in one.options]
        assert damages == sorted(damages, reverse=True)
        assert damages[-1] == 0 < damages[-2]
    costs = [row[4].damage for row in explanation(auto)]
    assert costs == sorted(costs, reverse=True)


def test_sizes_are_those_of_the_files(auto: Auto, statistics: Path, tmp_path: Path) -> None:
    quantize(TINY, tmp_path / "out", "int4-imatrix", calibration=Calibration(statistics=statistics))
    written = read_tensors(tmp_path / "out")
    for one in auto.chosen.units:
        where = f"model.layers.{one.block}." + ("mlp.experts" if one.role == "experts" else "self_attn")
        own = sum(
            t.nbytes for n, t in written.items()
            if n.startswith(where) and n.rpartition(".")[2].startswith("weight_")
        )  # fmt: skip
        assert own == one.options[0].nbytes


def test_what_is_missing_is_said(tmp_path: Path, statistics: Path) -> None:
    given = Calibration(statistics=statistics)
    with pytest.raises(ZayaError, match="auto needs one target"):
        choose_recipe(TINY, tmp_path / "out", given)
    with pytest.raises(ZayaError, match="auto needs one target"):
        choose_recipe(TINY, tmp_path / "out", given, size=10, bits=4.0)
    with pytest.raises(ZayaError, match="needs to know its inputs"):
        choose_recipe(TINY, tmp_path / "out", Calibration(), bits=5.0)
    with pytest.raises(ZayaError, match="a pipe can be read once"):
        choose_recipe(TINY, tmp_path / "out", Calibration(choice=Choice("-")), bits=5.0)
    with pytest.raises(ZayaError, match="the smallest checkpoint of these schemes has"):
        choose_recipe(TINY, tmp_path / "out", given, bits=3.0)
    for bits in (0.0, -5.0, float("nan"), float("inf"), 1e308):
        with pytest.raises(ZayaError, match="bits a weight cannot be"):
            choose_recipe(TINY, tmp_path / "out", given, bits=bits)
    with pytest.raises(ZayaError, match="tensor-parallel size 7"):
        choose_recipe(TINY, tmp_path / "out", given, bits=6.0, planning={"tensor_parallel": 7})


def test_the_written_recipe_is_one_that_can_be_given_again(auto: Auto, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(auto.text)
    assert load_recipe(file).rules == auto.recipe.rules
