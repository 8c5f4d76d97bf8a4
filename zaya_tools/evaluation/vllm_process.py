"""The vLLM of another interpreter: which one it is, and its answers from a process of its own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from zaya_tools.errors import ZayaError
from zaya_tools.releases import TOO_OLD, age, install_commands, package, releases

PATIENCE = 20.0
"""Minutes in which vLLM has to say something: of shards that it loads, of windows that it has scored."""

_PROBE_SECONDS, _GRACE_SECONDS, _POLL_SECONDS = 120, 10, 0.5


_PROBE = """\
import re, sys
sys.path[:] = filter(None, sys.path)  # not what happens to lie in the current folder
from importlib import metadata, util
from pathlib import Path
plugins = metadata.entry_points(group="vllm.general_plugins")
ours = any(plugin.value.startswith("zaya_tools.") for plugin in plugins)
vllm, version = util.find_spec("vllm"), None
for place in vllm.submodule_search_locations or () if vllm else ():
    file = Path(place, "_version.py")
    if file.is_file() and not Path(place, "model_executor", "models", "zaya.py").is_file():
        version = re.search(r"^__version__ =.*'(.+)'", file.read_text(), re.M)
print("zaya-probe", int(vllm is not None), int(ours and util.find_spec("zaya_tools") is not None),
      version[1] if version else "?")
"""
"""Says whether vLLM is there, whether zaya-tools is, where vLLM will look for it, and vLLM's version where that
matters: one with a ZAYA1 of its own needs nothing of ours. Nothing is imported: that takes many seconds."""


def check_interpreter(python: str | None) -> str:
    """The interpreter that vLLM will run under (default: this one).

    ZayaError, saying what to install, where it has no vLLM or an old one, no zaya-tools beside it, or is no Python.
    """
    interpreter = python or sys.executable
    if os.sep in interpreter:
        # vLLM runs in a folder of its own. A link stays one: it is what makes a virtual environment.
        interpreter = str(Path(interpreter).absolute())
    install = f"install vLLM: {install_commands()}"
    try:
        said, code = _run([interpreter, "-c", _PROBE], None, _PROBE_SECONDS)
    except OSError as error:
        raise ZayaError(f"{interpreter} cannot be run: {error.strerror}", install) from error
    if code is None:
        raise ZayaError(f"{interpreter} said nothing for {_PROBE_SECONDS} seconds", install)
    found = next((line.split()[1:] for line in said.splitlines() if line.startswith("zaya-probe ")), None)
    if found is None:
        raise ZayaError(f"{interpreter} is not a Python of version 3.11 or newer", install)
    vllm, ours, version = found
    if vllm == "0":
        raise ZayaError(f"there is no vLLM for {interpreter}", install)
    if age(version) == TOO_OLD:
        raise ZayaError(f"vLLM {version} of {interpreter} is {TOO_OLD}: {releases()}", install)
    if ours == "0":
        raise ZayaError(
            f"there is no zaya-tools beside the vLLM of {interpreter}", f"{interpreter} -m pip install {package()}"
        )
    return interpreter


def ask(interpreter: str, request: dict[str, Any], patience: float = PATIENCE) -> dict[str, Any]:
    """The answer of `vllm_plugin.worker` to a request, from a process under an interpreter.

    ZayaError with vLLM's reason where it fails, and where it says nothing for `patience` minutes; then all that it
    said is on stderr, and nothing of it is left running.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source, destination = Path(scratch, "request.json"), Path(scratch, "result.json")
        source.write_text(json.dumps(request))
        command = [interpreter, "-m", "zaya_tools.vllm_plugin.worker", str(source), str(destination)]
        said, code = _run(command, scratch, patience * 60)
        answer: dict[str, Any] = json.loads(destination.read_text()) if destination.is_file() else {}
    if not answer or "error" in answer:
        # vLLM talks a lot, which nobody needs to read unless it failed.
        sys.stderr.write(said)
        if code is None:
            raise ZayaError(
                f"vLLM said nothing for {patience:g} minutes while it ran {request['model']}, and was stopped",
                "its own output is above; where it is only slow, --vllm-timeout MINUTES gives it longer",
            )
        reason, hint = answer.get("error", f"exit code {code}"), answer.get("hint")
        raise ZayaError(f"vLLM could not run {request['model']}: {reason}", hint or "its own output is above")
    return answer


def _run(command: list[str], folder: str | None, patience: float) -> tuple[str, int | None]:
    """What a command says, and its exit code; None where it was stopped after `patience` seconds of silence."""
    said = bytearray()
    # A session of its own: the processes that it starts can be stopped with it.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            code = _listen(process, said, patience)
        finally:
            _stop(process)
    return said.decode(errors="replace"), code


def _listen(process: subprocess.Popen[bytes], said: bytearray, patience: float) -> int | None:
    assert process.stdout is not None
    out, heard = process.stdout.fileno(), time.monotonic()
    while True:
        if select.select([out], [], [], min(_POLL_SECONDS, patience))[0]:
            chunk = os.read(out, 1 << 16)
            if not chunk:
                break
            said += chunk
            heard = time.monotonic()
        elif process.poll() is not None:
            break  # what it started may hold its output open
        elif time.monotonic() - heard > patience:
            return None
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and all of its session."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
