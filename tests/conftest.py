"""Shared by all tests: nothing here may reach the network, and small tensors do not need threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Waiting threads that spin make a shared machine several times slower; subprocesses inherit this.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is None:
        absent = pytest.mark.skip(reason="needs vLLM, which has an environment of its own: see Serving in the README")
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(absent)


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
