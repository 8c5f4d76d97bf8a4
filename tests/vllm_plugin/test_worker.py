"""The worker of `zaya validate --engine vllm`, without vLLM."""

from __future__ import annotations

import subprocess
import sys
import time

from tests.evaluation.test_vllm_process import gone

CHILD = """
import os, threading, time
from zaya_tools.vllm_plugin.worker import end_with_parent
threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
print("ready", flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_it_ends_when_whoever_asked_is_gone() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not gone(child)
        parent.kill()
    deadline = time.monotonic() + 20
    while not gone(child):
        assert time.monotonic() < deadline
        time.sleep(0.1)
