"""Whatever stands in a config.json, the command says so in one line: nothing else gets out, and nothing hangs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Zaya
from tests.synthetic import CONFIGS, LAYOUTS, headers, sliding, small, write_checkpoint
from zaya_tools.errors import ZayaError
from zaya_tools.layouts.match import match

VALUES: list[Any] = [
    None, True, -1, 0, 1, 3, 0.5, 2**31, 10**30, math.inf, math.nan, "x", "\ud800", [], {}, [[]], [None], [{}], [0, 1],
    ["a", 3], [1] * 4, {"a": 1}, {"rope_type": "yarn", "factor": 2}, {"rope_theta": "x"}, {"type": []},
]  # fmt: skip
EXTRA = [
    "swa_layers", "sliding_window", "rope_scaling", "rope_parameters", "quantization_config", "torch_dtype", "dtype",
    "num_experts", "kv_channels", "zaya_layers", "smoe_layers", "layer_types", "head_dim", "num_query_groups",
    "use_rope_scaling", "rotary_base", "norm_epsilon",
]  # fmt: skip


@pytest.mark.parametrize("layout", ["raw", "smoe", "native"])
def test_any_value_of_any_key_is_understood_or_refused(layout: str) -> None:
    architecture = small(**sliding(2))
    tensors, config = headers(LAYOUTS[layout], architecture), CONFIGS[layout](architecture)
    assert not match(tensors, config).problems
    refused = []
    for key in {*config, *EXTRA}:
        for value in VALUES:
            try:
                match(tensors, {**config, key: value})
            except ZayaError as error:
                refused.append(error.message)
    assert len(refused) > 100
    assert not [message for message in refused if "\n" in message or len(message) > 1000]


@pytest.mark.parametrize("key", ["layer_types", "rope_parameters", "num_hidden_layers", "quantization_config"])
def test_the_command_says_it_in_one_line(zaya: Zaya, tmp_path: Path, key: str) -> None:
    write_checkpoint(tmp_path / "source", LAYOUTS["native"], small(**sliding(2)))
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    for value in VALUES:
        (tmp_path / "source" / "config.json").write_text(json.dumps({**config, key: value}))
        result = zaya("inspect", tmp_path / "source", "--json")
        if result.code == 2:
            assert result.out == ""
            assert len(result.err.splitlines()) in (1, 2)
            assert result.err.startswith("error: ")
        else:
            assert result.document()["layout"] == "native"
