"""The program as a whole: help, version, wrong use, exit codes, and what it must not load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import zaya_tools
from tests.checkpoint.support import ROOT, model
from tests.cli.conftest import Zaya
from zaya_tools.checkpoint import conversion
from zaya_tools.cli.app import main
from zaya_tools.errors import SourceError


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_commands(zaya: Zaya, flag: str) -> None:
    result = zaya(flag)
    assert (result.code, result.err) == (0, "")
    assert all(f" {command} " in result.out for command in ("inspect", "convert", "demo"))


@pytest.mark.parametrize("command", ["inspect", "convert", "demo"])
def test_every_command_has_help_and_json(zaya: Zaya, command: str) -> None:
    result = zaya(command, "--help")
    assert result.code == 0
    assert "--json" in result.out


def test_convert_offers_what_is_promised(zaya: Zaya) -> None:
    out = zaya("convert", "--help").out
    for option in ("--to", "--dtype", "--max-shard-size", "--dry-run", "--resume", "--force", "--workers"):
        assert option in out


def test_version(zaya: Zaya) -> None:
    result = zaya("--version")
    assert (result.code, result.out, result.err) == (0, f"zaya {zaya_tools.__version__}\n", "")


def test_no_command_shows_the_help(zaya: Zaya) -> None:
    result = zaya()
    assert result.code == 2
    assert "inspect" in result.out
    assert result.err == ""


@pytest.mark.parametrize(
    ("arguments", "message", "command"),
    [
        (["frobnicate"], "No such command 'frobnicate'", "zaya --help"),
        (["--frobnicate"], "No such option: --frobnicate", "zaya --help"),
        (["inspect"], "Missing argument", "zaya inspect --help"),
        (["convert", "a"], "Missing argument", "zaya convert --help"),
        (["convert", "a", "b", "c"], "unexpected extra argument", "zaya convert --help"),
        (["convert", "a", "b", "--bogus"], "No such option: --bogus", "zaya convert --help"),
        (["convert", "a", "b", "--dtype", "fp8"], "'fp8'", "zaya convert --help"),
        (["convert", "a", "b", "--to", "gguf"], "'gguf'", "zaya convert --help"),
        (["convert", "a", "b", "--workers", "0"], "--workers", "zaya convert --help"),
        (["convert", "a", "b", "--workers", "two"], "--workers", "zaya convert --help"),
    ],
)
def test_wrong_use_is_one_line_and_a_hint(zaya: Zaya, arguments: list[str], message: str, command: str) -> None:
    found, hint = zaya(*arguments).error()
    assert message in found
    assert command in hint


HEAVY = ("torch", "transformers", "numpy", "safetensors", "blake3", "huggingface_hub", "tokenizers", "yaml")


def loaded(arguments: list[str], packages: tuple[str, ...]) -> set[str]:
    """Which of these packages the program has loaded when it ends."""
    done = python(
        f"import sys; sys.argv = {['zaya', *arguments]!r}\n"
        "from zaya_tools.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        f"print(*(name for name in {packages!r} if name in sys.modules), file=sys.stderr)"
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["convert", "--help"], ["inspect", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    assert loaded(arguments, HEAVY) == set()


def test_commands_load_no_torch(tmp_path: Path) -> None:
    model(tmp_path / "source")
    packages = ("torch", "transformers", "safetensors", "huggingface_hub")
    assert loaded(["inspect", str(tmp_path / "source"), "--json"], packages) == set()
    assert loaded(["convert", str(tmp_path / "source"), str(tmp_path / "out")], packages) == set()
    assert loaded(["convert", str(tmp_path / "out"), str(tmp_path / "b"), "--to", "raw"], packages) == set()


def test_the_package_loads_nothing_heavy() -> None:
    done = python(f"import sys, zaya_tools\nprint(*(name for name in {HEAVY!r} if name in sys.modules))")
    assert (done.returncode, done.stdout.split()) == (0, [])


def test_the_installed_command_and_the_module(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("zaya")
    commands = [[sys.executable, "-m", "zaya_tools.cli.app"], *([[str(command)]] if command.exists() else [])]
    for start in commands:
        done = subprocess.run([*start, "inspect", "nowhere"], cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: nowhere does not exist\nhint: ")


def test_ctrl_c_is_130_one_line_and_a_hint(zaya: Zaya, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "plan_conversion", interrupted)
    message, hint = zaya("convert", "a", "b").error(130)
    assert message == "interrupted"
    assert "--resume" in hint


def test_what_the_system_says_is_one_line(zaya: Zaya, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/x/y")

    monkeypatch.setattr(conversion, "plan_conversion", fail)
    result = zaya("convert", "a", "b")
    assert (result.code, result.out, result.err) == (2, "", "error: /x/y: Permission denied\n")


def test_a_fault_of_the_program_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(conversion, "plan_conversion", fail)
    monkeypatch.setattr(sys, "argv", ["zaya", "convert", "a", "b"])
    with pytest.raises(ZeroDivisionError, match="a fault"):
        main()
    assert "error:" not in capsys.readouterr().err


def test_a_traceback_can_be_asked_for(zaya: Zaya, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" not in zaya("inspect", "nowhere").err
    monkeypatch.setenv("ZAYA_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["zaya", "inspect", "nowhere"])
    with pytest.raises(SourceError, match="does not exist"):
        main()


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "source"], ["inspect", "source", "--json"],
                                       ["convert", "source", "out", "--dry-run"]])  # fmt: skip
def test_a_reader_that_goes_away_causes_no_traceback(tmp_path: Path, arguments: list[str]) -> None:
    model(tmp_path / "source")
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "zaya_tools.cli.app", *arguments],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=write, stderr=subprocess.PIPE, text=True,
        check=False,
    )  # fmt: skip
    os.close(write)
    assert done.stderr == ""
    assert done.returncode != 0
