import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import zaya_tools
from zaya_tools.errors import LayoutError
from zaya_tools.layouts.raw_config import raw_config
from zaya_tools.training import export, measure, tiny, tokenizer
from zaya_tools.training.report import Report

BUNDLED = Path(zaya_tools.__file__).parent / "data" / "tiny"
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "README.md",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
SMALL = replace(
    tiny.TINY,
    blocks=2,
    experts=2,
    hidden_size=64,
    head_dim=16,
    expert_width=64,
    router_width=16,
    sliding=(True, False),
    sliding_window=8,
)
STEPS = tiny.Settings(steps=2, batch=2, context=32, threads=1, evaluation_bytes=600)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    for index in range(60):
        (folder / f"module{index}.py").write_text(f"def function_{index}(x):\n    return x + {index}\n" * 10)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, library: Path) -> tuple[Path, Report]:
    folder = tmp_path_factory.mktemp("made") / "tiny"
    return folder, tiny.make(folder, STEPS, SMALL, library)


def half_layer_names(index: int, blocks: int, experts: int) -> set[str]:
    """The published raw names of one half-layer, written out by hand."""
    residual = {f"res_scale.{stream}_{kind}" for stream in ("hidden_states", "residual") for kind in ("scale", "bias")}
    if index == 0:
        residual = {name for name in residual if "hidden_states" in name}
    if index % 2 == 0:
        own = {
            f"self_attn.qkv.{name}"
            for name in (
                "linear_q.weight",
                "linear_k.weight",
                "val_proj1.weight",
                "val_proj2.weight",
                "conv_qk.0.weight",
                "conv_qk.0.bias",
                "conv_qk.1.weight",
                "conv_qk.1.bias",
                "temp",
            )
        } | {"self_attn.o_proj.weight"}
    else:
        router = {
            "down_proj.weight",
            "down_proj.bias",
            "router_states_scale",
            "rmsnorm_eda.weight",
            "router_mlp.0.weight",
            "router_mlp.0.bias",
            "router_mlp.2.weight",
            "router_mlp.2.bias",
            "router_mlp.4.weight",
            "balancing_biases",
        }
        if index == 1:
            router.remove("router_states_scale")
        own = {f"zaya_block.router.{name}" for name in router} | {
            f"zaya_block.experts.local_experts.{expert}.linear_fc{matrix}.weight"
            for expert in range(experts)
            for matrix in (1, 2)
        }
    return {f"model.layers.{index}.{name}" for name in own | residual | {"input_norm.weight"}}


def expected_names(blocks: int, experts: int) -> set[str]:
    top = {"model.embed_tokens.weight", "model.final_norm.weight"} | {
        f"model.res_scale.{stream}_{kind}" for stream in ("hidden_states", "residual") for kind in ("scale", "bias")
    }
    return top.union(*(half_layer_names(index, blocks, experts) for index in range(2 * blocks)))


def raw_values(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


def test_two_steps_write_a_complete_checkpoint(made: tuple[Path, Report]) -> None:
    folder, report = made
    assert {path.name for path in folder.iterdir()} == FILES
    tensors = load_file(folder / "model.safetensors")
    assert set(tensors) == expected_names(SMALL.blocks, SMALL.experts)
    assert len(tensors) == SMALL.blocks * (30 + 2 * SMALL.experts) - 2 - 1 + 6
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    with safe_open(folder / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert report.measured.tokens == 600
    assert report.measured.skipped == 0


def test_the_same_seed_gives_the_same_file(made: tuple[Path, Report], library: Path, tmp_path: Path) -> None:
    tiny.make(tmp_path, STEPS, SMALL, library)
    assert (tmp_path / "model.safetensors").read_bytes() == (made[0] / "model.safetensors").read_bytes()


def test_the_readme_says_what_was_measured(made: tuple[Path, Report]) -> None:
    text = (made[0] / "README.md").read_text()
    assert f"{made[1].measured.perplexity:.4f}" in text
    assert "Apache-2.0" in text


def test_too_little_training_is_said(made: tuple[Path, Report]) -> None:
    assert any("perplexity" in problem for problem in made[1].problems())


def test_the_config_lists_one_value_a_half_layer(made: tuple[Path, Report]) -> None:
    config = raw_values(made[0])
    assert config["zaya_layers"] == ["a", 2, "a", 2]
    assert config["cca_num_q_heads"] == [4, 0, 4, 0]
    assert config["ffn_hidden_size_list"] == [0, 128, 0, 128]
    assert config["zaya_mlp_expansion"] == [0, 16, 0, 16]
    assert config["swa_layers"] == [7, 0, 0, 0]
    assert config["num_hidden_layers"] == 4
    assert config["rope_scaling"] is False


def test_gate_rows_come_first_and_experts_keep_their_order() -> None:
    model = measure.build_model(SMALL)
    native = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    raw = export.export_raw(SMALL, native)
    for expert in range(SMALL.experts):
        prefix = f"model.layers.3.zaya_block.experts.local_experts.{expert}."
        assert torch.equal(raw[f"{prefix}linear_fc1.weight"], native["model.layers.1.mlp.experts.gate_up_proj"][expert])
        assert torch.equal(raw[f"{prefix}linear_fc2.weight"], native["model.layers.1.mlp.experts.down_proj"][expert])


def test_import_is_the_inverse_of_export() -> None:
    model = measure.build_model(SMALL)
    native = {name: value.to(torch.bfloat16).float() for name, value in model.state_dict().items()}
    back = export.import_raw(SMALL, export.export_raw(SMALL, native))
    assert set(back) == set(native) - {"lm_head.weight"}
    assert all(torch.equal(back[name], native[name]) for name in back)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("model.norm.weight"), "model.norm.weight"),
        (lambda state: state.update(extra=torch.zeros(1)), "extra"),
        (lambda state: state["model.norm.weight"].fill_(float("nan")), "not finite"),
        (lambda state: state["model.layers.1.mlp.gate.balancing_biases"][:-1].fill_(-0.1), "skip"),
        (lambda state: state["model.layers.0.mlp.gate.balancing_biases"][-1:].fill_(-0.9), "skip"),
    ],
)
def test_export_refuses_what_is_not_a_sound_model(change: Any, message: str) -> None:
    state = {name: value.clone() for name, value in measure.build_model(SMALL).state_dict().items()}
    change(state)
    with pytest.raises(LayoutError, match=message):
        export.export_raw(SMALL, state)


def test_balancing_moves_biases_towards_equal_use_and_leaves_skip() -> None:
    biases = torch.tensor([0.2, -0.1, -0.1, -1.0])
    tiny.balance(biases, torch.tensor([90, 5, 5, 0]), 0.03)
    assert biases[-1] == -1
    torch.testing.assert_close(biases[:-1], torch.tensor([0.16, -0.08, -0.08]))


def test_balancing_leaves_some_bias_at_least_zero() -> None:
    biases = torch.zeros(9)
    biases[-1] = -1
    generator = torch.Generator().manual_seed(0)
    for _ in range(500):
        tiny.balance(biases, torch.randint(100, (9,), generator=generator), 0.05)
        assert biases[:-1].max() >= 0


def test_the_rate_rises_then_falls() -> None:
    settings = tiny.Settings(steps=100, warmup=10)
    rates = [tiny.schedule(step, settings) for step in range(100)]
    assert max(rates) == 1
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(settings.final_share, abs=0.01)


def test_windows_come_from_the_stream_and_half_begin_afresh() -> None:
    stream = tiny.token_stream(["héllo", "x" * 50])
    assert stream[:8].tolist() == [tokenizer.BOS, *tokenizer.byte_ids("héllo".encode()), tokenizer.EOS]
    settings = tiny.Settings(batch=400, context=16)
    windows = tiny.sample(stream, settings, torch.Generator().manual_seed(1))
    assert windows.shape == (400, 17)
    assert 120 < int((windows[:, 0] == tokenizer.BOS).sum()) < 280


def test_every_byte_is_scored_once_after_a_bos(made: tuple[Path, Report]) -> None:
    model = measure.load_model(made[0], SMALL)
    text = "def héllo():\n    pass\n" * 3
    measured = measure.measure(model, text, context=20, batch=2)
    data = text.encode()
    nats = 0.0
    for start in range(0, len(data), 20):
        targets = tokenizer.byte_ids(data[start : start + 20])
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[tokenizer.BOS, *targets[:-1]]]), use_cache=False).logits[0]
        nats -= float(logits.double().log_softmax(-1)[range(len(targets)), targets].sum())
    assert measured.tokens == len(data)
    assert measured.nats == pytest.approx(nats, rel=1e-5)
    assert all(sum(row) == len(data) for row in measured.use)


def test_measuring_nothing_is_refused(made: tuple[Path, Report]) -> None:
    with pytest.raises(ValueError, match="no text"):
        measure.measure(measure.load_model(made[0], SMALL), "")


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.write_tokenizer(folder, 1024)
    return PreTrainedTokenizerFast.from_pretrained(folder)


class TestTokenizer:
    @pytest.mark.parametrize(
        "text",
        ["", "a b  c\n\t d ", "héllo wörld", "日本語 テキスト", "🙂👩‍👩‍👧", "\x00\x7f\r\n", "Ġ ▁ ##a", "it's  ' s ."],
    )
    def test_any_text_comes_back(self, fast: Any, text: str) -> None:
        ids = fast(text)["input_ids"]
        assert ids == [tokenizer.BOS, *tokenizer.byte_ids(text.encode())]
        assert fast.decode(ids, skip_special_tokens=True) == text
        assert tokenizer.ids_to_bytes(ids) == text.encode()

    def test_every_byte_has_its_own_token(self, fast: Any) -> None:
        data = bytes(range(256))
        ids = tokenizer.byte_ids(data)
        assert ids == list(range(3, 259))
        assert tokenizer.ids_to_bytes(ids) == data
        assert len({fast.convert_ids_to_tokens(token) for token in ids}) == 256
        assert tokenizer.ids_to_bytes([0, 1, 2, 259, 319]) == b""

    def test_special_tokens_are_those_of_the_config(self, fast: Any) -> None:
        assert (fast.pad_token_id, fast.eos_token_id, fast.bos_token_id) == (0, 1, 2)
        assert len(fast) == 259 <= tokenizer.VOCABULARY
        assert fast("a", add_special_tokens=False)["input_ids"] == tokenizer.byte_ids(b"a")


class TestBundled:
    """What is shipped is what the script writes, and it was really trained."""

    def test_it_is_complete_and_small(self) -> None:
        assert {path.name for path in BUNDLED.iterdir()} == FILES
        assert sum(path.stat().st_size for path in BUNDLED.iterdir()) < 6_000_000
        assert set(load_file(BUNDLED / "model.safetensors")) == expected_names(tiny.TINY.blocks, tiny.TINY.experts)
        assert raw_values(BUNDLED) == raw_config(tiny.TINY, "list")

    def test_it_predicts_text_and_uses_every_expert(self) -> None:
        from zaya_tools.training.corpus import held_out_text

        measured = measure.measure(measure.load_model(BUNDLED, tiny.TINY), held_out_text(12_288))
        assert measured.perplexity < 4.2
        assert all(min(measured.shares(block)) > 0.02 for block in range(tiny.TINY.blocks))
        assert measured.skipped == 0

    def test_nothing_is_left_at_its_initial_value(self) -> None:
        flat = {"scale": 1.0, "bias": 0.0, "temp": 1.0, "norm.weight": 1.0, "rmsnorm_eda.weight": 1.0}
        for name, tensor in load_file(BUNDLED / "model.safetensors").items():
            for ending, value in flat.items():
                if name.endswith(ending):
                    assert (tensor != value).float().mean() >= 0.5, name
