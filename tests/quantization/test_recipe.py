"""Recipe files: what they may say, and what a person is told who says something else."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.quantization.support import DATA_FREE
from tests.synthetic import GEOMETRIES, small
from zaya_tools.errors import ZayaError
from zaya_tools.parameters import BLOCK_NAMES, PROTECTED, Role, parameters
from zaya_tools.quantization import recipe as module
from zaya_tools.quantization.recipe import Recipe, RecipeError, load_recipe, recipe_names, recipes_folder
from zaya_tools.quantization.scheme import AWQ, CALIBRATED, GPTQ, INFORMED, OBSERVERS, SCHEMES, SMOOTH, Kind, Observer
from zaya_tools.quantization.words import (
    PROJECTIONS,
    REASONS,
    BadWord,
    parse_blocks,
    parse_projections,
    parse_role,
    parse_scheme,
    protected_role,
)

BUILT_IN = (
    "bf16", "fp8", "fp8-block", "fp8-experts", "fp8-static", "int4", "int4-awq", "int4-experts-fp8-attention",
    "int4-g32", "int4-gptq", "int4-imatrix", "int8", "int8-smooth", "mxfp4", "nvfp4", "nvfp4a16",
)  # fmt: skip
EXPERTS: dict[str, Any] = {"role": "experts", "scheme": "fp8"}
ATTENTION: dict[str, Any] = {"role": "attention", "scheme": "int8"}


def write(folder: Path, *rules: Any, name: str = "mine", text: str | None = None, **keys: Any) -> Path:
    """A recipe file of these rules; `keys` replace or add keys, `text` replaces the whole."""
    document = {"name": name, "description": "one of mine", "rules": list(rules), **keys}
    document = {key: value for key, value in document.items() if value is not ...}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document) if text is None else text, encoding="utf-8")
    return path


def read(folder: Path, *rules: Any, **keys: Any) -> Recipe:
    return load_recipe(write(folder, *rules, **keys))


def refused(folder: Path, *rules: Any, **keys: Any) -> tuple[str, str]:
    """Message, without the file's folder, and hint."""
    path = write(folder, *rules, **keys)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert isinstance(caught.value, ZayaError)
    assert caught.value.exit_code == 2
    assert caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value.message.replace(f"{folder}/", ""), caught.value.hint


def test_the_recipes_that_come_with_the_package() -> None:
    assert recipe_names() == BUILT_IN
    named = {**SCHEMES, **CALIBRATED}
    for name in BUILT_IN:
        recipe = load_recipe(name)
        assert recipe.name == name
        assert recipe.description.endswith(".")
        assert recipe.runs_on.endswith(".")
        assert [rule.role for rule in recipe.rules] in ([], ["experts"], ["experts", "attention"])
        for rule in recipe.rules:
            assert rule.scheme is named[rule.scheme_name], "built-in recipes use schemes that have a name"
            if name in DATA_FREE:
                assert rule.observer == ("mse" if rule.scheme.bits == 4 else "minmax")
            else:
                assert rule.observer in INFORMED or rule.scheme.activations.calibrated
    assert {load_recipe(n).rules[0].scheme for n in BUILT_IN if n != "bf16"} == set(named.values())


def test_recipes_are_found_inside_an_installed_package_and_beside_a_source_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "zaya_tools"
    (package / "quantization").mkdir(parents=True)
    monkeypatch.setattr(module, "__file__", str(package / "quantization" / "recipe.py"))
    with pytest.raises(RecipeError, match="came without its recipes"):
        recipes_folder()
    beside = tmp_path / "site-packages" / "recipes"
    beside.mkdir()
    assert recipes_folder() == beside
    (package / "recipes").mkdir()
    assert recipes_folder() == package / "recipes"


def test_a_file_with_everything(tmp_path: Path) -> None:
    recipe = read(
        tmp_path,
        {**EXPERTS, "blocks": [0, "2-4", "36-"]},
        {"role": "attention", "projections": ["q_proj", "k_proj"], "scheme": {"kind": "int4", "group": 64}},
        {"role": "head", "scheme": "none"},
        observer="mse",
        runs_on="here",
    )
    experts, attention, head = recipe.rules
    assert str(experts) == "experts, blocks 0, 2-4, 36-: fp8"
    assert str(attention) == "attention (q_proj, k_proj): int4-g64"
    assert (head.scheme, head.observer) == (None, None)
    assert [rule.observer for rule in (experts, attention)] == ["mse", "mse"]
    assert (attention.scheme and attention.scheme.columns) == 64
    assert recipe.runs_on == "here"
    assert recipe.as_dict()["rules"][1] == {
        "role": "attention", "blocks": None, "projections": ["q_proj", "k_proj"], "scheme": "int4-g64",
        "observer": "mse", "recipe": "mine",
    }  # fmt: skip
    assert str(tmp_path) not in str(recipe.as_dict()), "a record does not depend on where the file was"


def test_extending(tmp_path: Path) -> None:
    recipe = read(tmp_path, {**ATTENTION, "projections": "k_proj"}, extends="int4")
    assert [str(rule) for rule in recipe.rules] == ["experts: int4", "attention: int4", "attention (k_proj): int8"]
    assert [rule.recipe for rule in recipe.rules] == ["int4", "int4", "mine"]
    assert [rule.observer for rule in recipe.rules] == ["mse", "mse", "minmax"]
    assert (recipe.extends, recipe.runs_on) == ("int4", "")  # its own rules may run elsewhere
    quick = read(tmp_path, rules=..., extends="int4", observer="minmax")
    assert [rule.observer for rule in quick.rules] == ["minmax", "minmax"]
    assert quick.runs_on == load_recipe("int4").runs_on
    write(tmp_path, EXPERTS, name="base")
    assert read(tmp_path, ATTENTION, extends="./base.yaml").rules[0].recipe == "base"
    message, hint = refused(tmp_path, name="third", extends="./mine.yaml")
    assert "third extends mine, which itself extends ./base.yaml" in message
    assert "at most once" in hint
    message, _ = refused(tmp_path, name="loop", extends="./loop.yaml")
    assert "loop extends loop, which itself extends" in message


def test_names_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is no recipe 'fp8-blok'") as caught:
        load_recipe("fp8-blok")
    assert caught.value.hint is not None
    assert "did you mean 'fp8-block'?" in caught.value.hint
    with pytest.raises(RecipeError, match="there is no recipe file"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match="there is no recipe file"):
        load_recipe("fp9.yaml")
    with pytest.raises(RecipeError, match="auto is no recipe of its own"):
        load_recipe("auto")
    with pytest.raises(RecipeError, match="there is no recipe 'fp9'"):
        read(tmp_path, EXPERTS, extends="fp9")


@pytest.mark.parametrize(
    ("rules", "keys", "message", "hint"),
    [
        ([{**EXPERTS, "sheme": "fp8"}], {}, "rule 1: 'sheme' is not a key of a rule", "did you mean 'scheme'?"),
        ([EXPERTS], {"calibration": {"samples": 64}}, "'calibration' is not a key of a recipe", "the keys are name"),
        ([EXPERTS], {"rule": []}, "'rule' is not a key of a recipe", "did you mean 'rules'?"),
        ([EXPERTS, {"role": "attention"}], {}, "rule 2: scheme is missing", "role, scheme, blocks"),
        ([{"scheme": "fp8"}], {}, "rule 1: role is missing", "role, scheme, blocks"),
        ([EXPERTS], {"description": ...}, "description is missing", "a recipe has name"),
        ([EXPERTS], {"description": ""}, "description is empty", "a recipe has name"),
        ([EXPERTS], {"description": 8}, "description has to be text, found 8", "a recipe has name"),
        ([], {"rules": ...}, "rules is missing", "rules: []"),
        ([], {"rules": {"role": "experts"}}, "rules has to be a list", "a recipe has name"),
        (["experts"], {}, "rule 1: not a mapping", "a rule has role"),
        ([{**EXPERTS, "observer": "mean"}], {}, "rule 1: 'mean' is not an observer", "minmax, mse"),
        ([EXPERTS], {"observer": "mean"}, "'mean' is not an observer", "minmax, mse"),
        ([{**EXPERTS, "scheme": "nvfp4a1"}], {}, "rule 1: 'nvfp4a1' is not a scheme", "did you mean 'nvfp4a16'?"),
        ([{**EXPERTS, "scheme": None}], {}, "rule 1: None is not a scheme", "none (full precision)"),
        ([{**EXPERTS, "scheme": {"kind": "nvfp4", "group": 64}}], {}, "no nvfp4 kernels for groups of 64", "of 16"),
        ([{**EXPERTS, "scheme": {"kind": "mxfp4", "group": 16}}], {}, "no mxfp4 kernels for groups of 16", "of 32"),
        ([{**EXPERTS, "scheme": {"kind": "int4", "group": 256}}], {}, "no int4 kernels for groups of 256", "32, 64"),
        ([{**EXPERTS, "scheme": {"kind": "int4", "group": True}}], {}, "groups of True", "32, 64, 128"),
        ([{**EXPERTS, "scheme": {"kind": "int4", "group": 64.0}}], {}, "groups of 64.0", "32, 64, 128"),
        ([{**EXPERTS, "scheme": {"kind": "int4", "group": -1.0}}], {}, "groups of -1.0", "32, 64, 128"),
        ([{**EXPERTS, "scheme": {"kind": ["int4"]}}], {}, "['int4'] is not a kind of scheme", "one of fp8"),
        ([{**EXPERTS, "scheme": {"kind": {"int4": 1}}}], {}, "is not a kind of scheme", "one of fp8"),
        ([{**EXPERTS, "blocks": "1 2"}], {}, "'1 2' is not a range of blocks", "0-3"),
        ([{**EXPERTS, "scheme": {"kind": "fp8", "group": 64}}], {}, "fp8 has one scale a row", "scheme: fp8"),
        ([{**EXPERTS, "scheme": {"kind": "int3"}}], {}, "'int3' is not a kind of scheme", "int4"),
        ([{**EXPERTS, "scheme": {"kind": "int4", "bits": 3}}], {}, "'bits' is not a key of a scheme", "kind and group"),
        ([{**EXPERTS, "blocks": "4-2"}], {}, "'4-2' ends before it starts", "2-4"),
        ([{**EXPERTS, "blocks": -3}], {}, "-3 is not a range of blocks", "0-3"),
        ([{**EXPERTS, "blocks": True}], {}, "True is not a range of blocks", "0-3"),
        ([{**EXPERTS, "blocks": []}], {}, "blocks is an empty list", "0-3"),
        ([{**EXPERTS, "blocks": 1.5}], {}, "1.5 is not a range of blocks", "0-3"),
        ([{**EXPERTS, "projections": "up_proj"}], {}, "one scheme for all matrices of a block's experts", "leave"),
        ([{**EXPERTS, "projections": "q_proj"}], {}, "which only attention has", "role: attention"),
        ([{**ATTENTION, "projections": "v_proj"}], {}, "'v_proj' is not a projection", "v_proj_delayed"),
        ([{**ATTENTION, "projections": []}], {}, "projections is an empty list", "q_proj"),
        ([{**ATTENTION, "projections": "conv_qk_grouped"}], {}, "'CCA convolution', which never loses", "q_proj"),
        ([{"role": ["experts"], "scheme": "fp8"}], {}, "['experts'] is not a role", "experts, attention"),
        ([{"role": "lm_head", "scheme": "fp8"}], {}, "'lm_head' is not a role", "did you mean 'head'?"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, rules: list[Any], keys: dict[str, Any], message: str, hint: str) -> None:
    said, advice = refused(tmp_path, *rules, **keys)
    assert said.startswith("mine.yaml")
    assert message in said
    assert hint in advice


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", "mine.yaml: line 1:"),
        ("", "not a mapping"),
        ("- fp8", "not a mapping"),
        ("name: a\ndescription: b\nrules: []\nrules: []", "line 4: 'rules' is there twice"),
        ("name: !!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("name: 2020-99-99", "mine.yaml: month must be in"),
        ("rules: " + "[" * 2000, "mine.yaml:"),
        ("rules: &again [*again]\nname: a\ndescription: b", "rule 1: not a mapping"),
    ],
    ids=["broken", "empty", "list", "twice", "code", "date", "deep", "recursive"],
)
def test_files_that_are_no_recipes(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text=text)[0]


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(path)


PROTECTED_NAMES = {
    (p.name, p.role)
    for fields in GEOMETRIES.values()
    for p in parameters(small(**fields))
    if p.role in PROTECTED
}  # fmt: skip


def spellings(name: str) -> set[str]:
    """Ways in which a person may speak of a parameter."""
    local = name.removeprefix("model.").split(".", 2)[-1] if ".layers." in name else name
    return {name, local, local.removesuffix(".weight"), local.removesuffix(".bias"), local.upper()}


def test_no_spelling_of_a_protected_parameter_is_a_role() -> None:
    assert {role for _, role in PROTECTED_NAMES} == PROTECTED == set(REASONS)
    for name, role in sorted(PROTECTED_NAMES):
        for spelling in spellings(name):
            for parse in (parse_role, parse_projections):
                with pytest.raises(BadWord, match="never loses precision") as caught:
                    parse(spelling)
                named = {r for r in PROTECTED if f"'{r}'" in caught.value.message}
                assert named, spelling
                if name.endswith((".gate.down_proj.weight", ".temp", "layernorm.weight", "conv_qk_grouped.weight")):
                    assert named == {role}, spelling


@pytest.mark.parametrize(
    ("word", "role"),
    [
        ("router", Role.ROUTER), ("ruoter", Role.ROUTER), ("Routers", Role.ROUTER), ("mlp.gate", Role.ROUTER),
        ("moe-gate", Role.ROUTER), ("gating", Role.ROUTER), ("roter", Role.ROUTER), ("convolution", Role.CONVOLUTION),
        ("convolutoin", Role.CONVOLUTION), ("conv_qk", Role.CONVOLUTION), ("temperature", Role.TEMPERATURE),
        ("temprature", Role.TEMPERATURE), ("norms", Role.NORM), ("LayerNorm", Role.NORM), ("res_scale", Role.RESIDUAL),
        ("residuals", Role.RESIDUAL), ("balancing", Role.BALANCING), ("balancing biases", Role.BALANCING),
    ],
)  # fmt: skip
def test_loose_words_for_protected_roles(word: str, role: Role) -> None:
    with pytest.raises(BadWord, match=f"'{role}'"):
        parse_role(word)


@pytest.mark.parametrize(
    "word", ["re:.*ruoter.*", ".*experts.*", "model.layers.[0-9]", "experts|attention", "exp*", "^head$"]
)
def test_patterns_are_refused(word: str) -> None:
    for parse in (parse_role, parse_projections):
        with pytest.raises(BadWord, match="is a pattern: recipes name roles"):
            parse(word)


@given(st.text(max_size=30))
def test_only_the_four_words_are_roles(word: str) -> None:
    try:
        assert parse_role(word) in ("experts", "attention", "embedding", "head")
    except BadWord as error:
        assert error.hint  # noqa: PT017


def test_projections_are_the_tables() -> None:
    weights = [n for n in BLOCK_NAMES if n.startswith("self_attn.") and n.endswith(".weight") and "conv" not in n]
    assert [name.split(".")[-2] for name in weights] == list(PROJECTIONS)
    assert all(protected_role(word) is None for word in (*PROJECTIONS, "experts", "attention", "embedding", "head"))


NUMBERS = st.integers(0, 99)


RANGES = st.one_of(NUMBERS, st.tuples(NUMBERS, NUMBERS).map(sorted), NUMBERS.map(lambda n: (n, None)))


@given(st.lists(RANGES, min_size=1))
def test_block_ranges(ranges: list[Any]) -> None:
    stated = [r if isinstance(r, int) else f"{r[0]}-" if r[1] is None else f"{r[0]}-{r[1]}" for r in ranges]
    wanted: set[int] = set()
    for entry in ranges:
        first, last = (entry, entry) if isinstance(entry, int) else entry
        wanted.update(range(first, 100 if last is None else last + 1))
    blocks = parse_blocks(stated)
    assert {block for block in range(100) if block in blocks} == wanted
    assert parse_blocks(str(blocks).split(", ")) == blocks


def test_blocks_that_a_model_lacks() -> None:
    assert parse_blocks(["0-39", "30-"]).beyond(40) == ()
    assert parse_blocks([39, "38-40", "40-", 7]).beyond(40) == (40, 40)


def test_inline_schemes() -> None:
    assert parse_scheme({"kind": "int4", "group": 128}) is SCHEMES["int4"]
    assert parse_scheme({"kind": "int4"}) is SCHEMES["int4"]
    assert parse_scheme({"kind": "int4", "group": 32}) is SCHEMES["int4-g32"]
    assert parse_scheme({"kind": "nvfp4", "group": 16}) is SCHEMES["nvfp4a16"]
    assert parse_scheme({"kind": "mxfp4"}) is SCHEMES["mxfp4"]
    assert parse_scheme({"kind": "fp8"}) is SCHEMES["fp8"]
    assert parse_scheme("none") is None
    middle, whole = parse_scheme({"kind": "int4", "group": 64}), parse_scheme({"kind": "int4", "group": -1})
    assert middle is not None
    assert whole is not None
    assert (middle.name, middle.columns, middle.kind, middle.format) == ("int4-g64", 64, Kind.INT4, "pack-quantized")
    assert (whole.name, whole.columns) == ("int4-channel", 0)
    assert parse_scheme({"kind": "int4", "group": "channel"}) == whole


@pytest.mark.parametrize("where", ["name: *h", "name: x\nrules: [{role: experts, scheme: *h}]"])
def test_nested_aliases_are_not_spelled_out(where: str, tmp_path: Path) -> None:
    """Ten aliases of ten aliases, seven times, are ten million words."""
    lines = ["a: &a [x]"]
    for above, below in pairwise("abcdefgh"):
        lines.append(f"{below}: &{below} [{', '.join([f'*{above}'] * 10)}]")
    (tmp_path / "bomb.yaml").write_text("\n".join([*lines, "description: d", where]))
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "bomb.yaml")
    assert len(caught.value.message) < 1000


def test_the_home_of_nobody(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"there is no recipe file ~nobody-at-all/x.yaml"):
        load_recipe("~nobody-at-all/x.yaml")


@pytest.mark.parametrize("observer", [*OBSERVERS, *INFORMED])
@pytest.mark.parametrize("scheme", [*SCHEMES, *CALIBRATED])
def test_observers_that_cannot_find_a_schemes_scales_are_refused(
    scheme: str, observer: Observer, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"name: mine\ndescription: x\nrules: [{{role: experts, scheme: {scheme}, observer: {observer}}}]\n")
    wrong = {"fp8-block": INFORMED, "fp8-static": (AWQ, SMOOTH)}
    wrong |= dict.fromkeys(("mxfp4", "nvfp4a16", "nvfp4"), (GPTQ,))
    if observer not in wrong.get(scheme, ()):
        assert load_recipe(file).rules[0].observer == observer
        return
    with pytest.raises(RecipeError, match=f"scheme {scheme} cannot have the observer {observer}: ") as caught:
        load_recipe(file)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(f"observers for {scheme}: minmax, mse")
    assert observer not in caught.value.hint


@pytest.mark.parametrize("stated", ["010", "0_9", "0x1", "1:30", "0b1"])
def test_numbers_are_what_people_read_in_them(stated: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"name: mine\ndescription: x\nrules: [{{role: experts, scheme: int4, blocks: {stated}}}]\n")
    if stated == "010":
        assert str(load_recipe(file).rules[0].blocks) == "10"
        return
    with pytest.raises(RecipeError, match="is not a range of blocks"):
        load_recipe(file)


@pytest.mark.parametrize("name", ["'  '", "''", "7", '"a\\nb"', '"a\\x1b[2Jb"', "[a]"])
def test_names_that_are_none(name: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"name: {name}\ndescription: x\nrules: []\n")
    with pytest.raises(RecipeError, match="is not a name") as caught:
        load_recipe(file)
    assert "\n" not in str(caught.value)
