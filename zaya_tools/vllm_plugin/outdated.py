"""The model's place in a vLLM that is too old for it: importing this, as vLLM does to look at the model, says so."""

from __future__ import annotations

import vllm

from zaya_tools.errors import ZayaError
from zaya_tools.releases import TOO_OLD, install_commands, releases

raise ZayaError(f"vLLM {vllm.__version__} is {TOO_OLD}: {releases()}", f"install another: {install_commands()}")
