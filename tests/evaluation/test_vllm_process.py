"""Which vLLM there is, what is said where there is none, and how long its process is waited for."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.model.support import BASE, random_tensors
from tests.synthetic import LAYOUTS, config_of, split, write_tensors
from zaya_tools.architecture import native_config
from zaya_tools.errors import ZayaError
from zaya_tools.evaluation import vllm_process
from zaya_tools.evaluation.validation import Settings, validate
from zaya_tools.evaluation.vllm_engine import serve
from zaya_tools.evaluation.vllm_process import ask, check_interpreter
from zaya_tools.evaluation.windows import cut
from zaya_tools.releases import age


def without_vllm(tmp_path: Path, error: str) -> ZayaError:
    """What is said of an interpreter that has neither vLLM nor zaya-tools: this one, without its site packages."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S -P "$@"\n')
    script.chmod(0o755)
    place = tmp_path / "model"
    write_tensors(place, random_tensors(BASE), native_config(BASE))
    with pytest.raises(ZayaError, match=error) as caught:
        serve(place, cut([1, 2, 3, 4], 4), [], 2, "float32", str(script))
    return caught.value


def test_no_vllm_gives_the_install_commands(tmp_path: Path) -> None:
    error = without_vllm(tmp_path, "there is no vLLM for")
    assert error.hint is not None
    assert "pip install vllm" in error.hint
    assert "--vllm-python" in error.hint
    assert "\n" not in error.message
    # From a source tree it is that which has to be installed: there is no release of what is being worked on.
    assert str(Path(__file__).parents[2]) in error.hint


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ZayaError, match="cannot be run: No such file"):
        check_interpreter(str(tmp_path / "nothing"))


def program(tmp_path: Path, text: str) -> str:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    return str(script)


def test_a_program_that_is_no_python(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZayaError, match="is not a Python of version 3"):
        check_interpreter(program(tmp_path, "echo hello; exit 0"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("said", "message"), [("0 0", "there is no vLLM for"), ("1 0", "no zaya-tools beside")])
def test_what_an_interpreter_lacks(tmp_path: Path, said: str, message: str) -> None:
    with pytest.raises(ZayaError, match=message) as caught:
        check_interpreter(program(tmp_path, f"echo noise; echo zaya-probe {said} 0.32.0"))
    assert "pip install" in str(caught.value.hint)


def test_an_interpreter_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_process, "_PROBE_SECONDS", 0.5)
    with pytest.raises(ZayaError, match=r"python said nothing for 0\.5 seconds"):
        check_interpreter(program(tmp_path, "sleep 100"))


def test_an_interpreter_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = program(tmp_path, "echo zaya-probe 1 1 0.32.0")
    monkeypatch.chdir(tmp_path)
    assert check_interpreter("./python") == own


def test_folders_that_are_named_like_packages_are_not_taken_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("vllm", "zaya_tools"):
        (tmp_path / name).mkdir()
    python = program(tmp_path, f'exec {sys.executable} -S "$@"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(ZayaError, match="there is no vLLM for"):
        check_interpreter(python)


def test_the_interpreter_is_looked_at_first(tmp_path: Path) -> None:
    with pytest.raises(ZayaError, match="cannot be run: No such file"):
        validate(tmp_path / "no model", settings=Settings(engine="vllm", vllm_python=str(tmp_path / "nothing")))


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.9.2", "too old"), ("0.31.1", "too old"), ("0.32.0", None), ("0.33.1rc1", None), ("0.34.0", "newer"),
     ("1.0", "newer"), ("0.1.dev1+g12ab", None), ("dev", None), ("?", None)],
)  # fmt: skip
def test_releases(version: str, expected: str | None) -> None:
    assert (age(version) or "").startswith(expected or "")
    assert (age(version) is None) == (expected is None)


@pytest.mark.parametrize(
    ("version", "own", "message"),
    [("0.11.2", False, "vLLM 0.11.2 of .* is too old: zaya-tools serves with vLLM 0.32 and 0.33"),
     ("0.11.2", True, "no zaya-tools beside"), ("0.33.0", False, "no zaya-tools beside")],
    ids=["old", "old with a ZAYA1 of its own", "known"],
)  # fmt: skip
def test_an_old_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, own: bool, message: str) -> None:
    package = tmp_path / "site" / "vllm"
    (package / "model_executor" / "models").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "_version.py").write_text(f"__version__: str\n\n__version__ = version = '{version}'\n")
    if own:
        (package / "model_executor" / "models" / "zaya.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    with pytest.raises(ZayaError, match=message) as caught:
        check_interpreter(program(tmp_path, f'exec {sys.executable} -S "$@"'))
    assert "pip install" in str(caught.value.hint)


def gone(process: int) -> bool:
    """Whether a process has ended, be it that nobody has asked for its exit code yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_silent_vllm_is_stopped_with_all_that_it_started(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    child = tmp_path / "pid"
    python = program(tmp_path, f"echo loading; sleep 1000 & echo $! > {child}; wait")
    with pytest.raises(
        ZayaError, match=r"vLLM said nothing for 0\.01 minutes while it ran m, and was stopped"
    ) as caught:
        ask(python, {"model": "m"}, 0.01)
    assert "--vllm-timeout" in str(caught.value.hint)
    assert "loading" in capfd.readouterr().err
    deadline = time.monotonic() + 10
    while not gone(int(child.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_slow_vllm_that_says_how_far_it_is_may_go_on(tmp_path: Path) -> None:
    said = "for n in 1 2 3 4 5 6; do sleep 0.5; echo window $n; done"
    python = program(tmp_path, f"""{said}; echo '{{"generated": []}}' > "$4" """)
    assert ask(python, {"model": "m"}, 1.5 / 60) == {"generated": []}


def test_what_is_left_running_is_not_waited_for(tmp_path: Path) -> None:
    python = program(tmp_path, """sleep 30 & echo '{"generated": [1]}' > "$4"; echo $! > """ + str(tmp_path / "pid"))
    begun = time.monotonic()
    assert ask(python, {"model": "m"}) == {"generated": [1]}
    assert time.monotonic() - begun < 20
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("answer", "message", "hint"),
    [("""echo '{"error": "no memory", "hint": "buy some"}' > "$4" """, "could not run m: no memory", "buy some"),
     ("""echo '{"error": "no memory", "hint": null}' > "$4" """, "could not run m: no memory", "above"),
     ("exit 7", "could not run m: exit code 7", "above")],
)  # fmt: skip
def test_what_vllm_says_when_it_fails(
    tmp_path: Path, answer: str, message: str, hint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ZayaError, match=message) as caught:
        ask(program(tmp_path, f"echo a trace; {answer}"), {"model": "m"})
    assert hint in str(caught.value.hint)
    assert capfd.readouterr().err == "a trace\n"


def test_no_time_is_no_time_to_wait() -> None:
    with pytest.raises(ZayaError, match="0 minutes are no time to wait"):
        validate("anything", settings=Settings(engine="vllm", vllm_timeout=0))


@pytest.mark.parametrize(
    ("engine", "layout", "message"),
    [("vllm", "raw", "has the raw layout, which vLLM cannot serve"), ("vllm", "native", r"has no tokenizer\.json"),
     ("stream", "raw", r"has no tokenizer\.json")],
)  # fmt: skip
def test_what_cannot_be_run_is_said_before_anything_is_checked(
    tmp_path: Path, engine: str, layout: str, message: str
) -> None:
    place = tmp_path / "model"
    write_tensors(place, split(LAYOUTS[layout], BASE, random_tensors(BASE)), config_of(LAYOUTS[layout], BASE))
    python = program(tmp_path, "echo zaya-probe 1 1 0.32.0") if engine == "vllm" else None
    said: list[str] = []
    with pytest.raises(ZayaError, match=message):
        validate(place, settings=Settings(engine=engine, vllm_python=python), report=said.append)
    assert said == []
    # What needs neither is still to be had.
    assert validate(place, settings=Settings(engine=engine, vllm_python=python, checks=["structure"])).passed
