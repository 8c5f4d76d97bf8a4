"""vLLM in this process, started as the worker of `zaya validate` starts it."""

from __future__ import annotations

import os

from zaya_tools.vllm_plugin.worker import ENVIRONMENT

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
