"""Quantized embeddings and output heads of untied models: vLLM's own, and emulated where the CPU has no kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.synthetic import read_tensors, write_tensors
from zaya_tools import quantize

from .engine import ask, geometry, model_of, prompts_of, running, streaming, write_random
from .test_loading import refused

pytestmark = pytest.mark.vllm

# A vocabulary that vLLM pads, and a float32 source: its scales are float32 too, and must not be rounded.
UNTIED = geometry(
    blocks=2, hidden_size=128, expert_width=128, experts=4, router_width=16, tied=False, vocab_size=200, head_bias=True
)


def write(place: Path, head: str | None, embedding: str | None, experts: str | None = None) -> Path:
    rules = [("head", head), ("embedding", embedding), ("experts", experts)]
    lines = [f"  - {{role: {role}, scheme: {scheme}}}" for role, scheme in rules if scheme]
    recipe = place / "mine.yaml"
    recipe.write_text("\n".join(["name: mine", "description: Ends.", "rules:", *lines, ""]))
    quantize(write_random(place / "full", UNTIED), place / "model", str(recipe))
    return place / "model"


@pytest.mark.parametrize(
    ("head", "embedding", "experts", "emulated"),
    [
        ("int8", None, None, False),
        ("fp8", None, None, False),
        ("int4", "int4", "int4", True),
        ("mxfp4", None, "fp8", True),
        ("nvfp4a16", "int4-g32", None, True),
    ],
)
def test_ends(tmp_path: Path, head: str, embedding: str | None, experts: str | None, emulated: bool) -> None:
    folder = write(tmp_path, head, embedding, experts)
    with running(folder) as llm:
        model = model_of(llm)
        assert (type(model.lm_head.quant_method).__name__ == "StoredVocabulary") == emulated
        found = type(model.model.embed_tokens.quant_method).__name__
        assert (found == "StoredVocabulary") == (embedding is not None)
        del model
        answers = ask(llm, prompts_of(UNTIED, 1, 2, 17, 40))
    gaps = torch.cat([answer.gap(streaming(folder))[0] for answer in answers])
    # Activations in 8 bits go the other way here and there; what is left is float32 noise.
    assert gaps.median() < 1e-5


def test_compiled_and_cut(tmp_path: Path) -> None:
    """The lookup is hidden from the compiler, and ranks hold rows of their own."""
    folder = write(tmp_path, "mxfp4", "int4")
    for settings in ({"enforce_eager": False}, {"tensor_parallel_size": 2}):
        with running(folder, **settings) as llm:
            answers = ask(llm, prompts_of(UNTIED, 1, 30))
        assert max(answer.gap(streaming(folder))[0].max() for answer in answers) < 1e-4


def test_a_missing_scale(tmp_path: Path) -> None:
    folder = write(tmp_path, "int4", "int4")
    tensors = read_tensors(folder)
    del tensors["lm_head.weight_scale"]
    write_tensors(tmp_path / "broken", tensors, json.loads((folder / "config.json").read_text()))
    refused(tmp_path / "broken", r"lm_head\.weight_scale")
