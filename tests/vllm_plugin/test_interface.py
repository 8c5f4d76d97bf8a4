"""The plugin uses what the installed vLLM has, and the check that says so of other releases sees what is missing."""

from __future__ import annotations

import shutil
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from zaya_tools.errors import ZayaError
from zaya_tools.vllm_plugin import ARCHITECTURE, MODEL, register

from .interface import problems

pytestmark = pytest.mark.vllm


@pytest.fixture
def sources() -> Path:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def test_everything_that_is_used_is_there(sources: Path) -> None:
    assert problems(sources) == []


def test_changes_are_seen(sources: Path, tmp_path: Path) -> None:
    copy = tmp_path / "vllm"
    shutil.copytree(sources, copy, ignore=lambda _, names: [n for n in names if Path(n).suffix not in (".py", "")])
    for file, old, new in (
        ("model_executor/layers/fused_moe/layer.py", "routed_experts_cls: type", "routed_experts_class: type"),
        ("v1/attention/backends/registry.py", "SHORT_CONV =", "SHORTER_CONV ="),
        ("forward_context.py", "def get_forward_context", "def the_forward_context"),
        ("model_executor/layers/mamba/abstract.py", "    def get_kv_cache_spec",
         "    @abstractmethod\n    def get_kv_cache_spec"),
    ):  # fmt: skip
        text = (copy / file).read_text()
        assert old in text
        (copy / file).write_text(text.replace(old, new))
    assert sorted(problems(copy)) == [
        "FusedMoEFactory in model_executor/layers/fused_moe/layer.py takes no routed_experts_cls",
        "MambaAttentionBackendEnum in v1/attention/backends/registry.py has no SHORT_CONV",
        "MambaBase in model_executor/layers/mamba/abstract.py asks for get_kv_cache_spec",
        "no get_forward_context in vllm.forward_context",
    ]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the plugin logs from here on."""
    from vllm import ModelRegistry

    assert ModelRegistry  # loaded with loggers of its own
    lines: list[str] = []

    def info(text: str, *values: object) -> None:
        lines.append(text % values)

    monkeypatch.setattr("vllm.logger.init_logger", lambda _: SimpleNamespace(info=info, warning=info))
    return lines


def test_the_entry_point_registers_the_model(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    from vllm import ModelRegistry

    import zaya_tools.vllm_plugin as plugin

    monkeypatch.setattr(plugin, "_ours", False)
    monkeypatch.setattr(ModelRegistry, "models", {k: v for k, v in ModelRegistry.models.items() if k != ARCHITECTURE})
    (found,) = [point for point in entry_points(group="vllm.general_plugins") if point.value.startswith("zaya_tools")]
    assert found.load() is register
    register()
    register()
    entry = ModelRegistry.models[ARCHITECTURE]
    assert f"{entry.module_name}:{entry.class_name}" == MODEL
    (line,) = log
    assert "ZayaForCausalLM comes from zaya-tools" in line


@pytest.mark.parametrize(("version", "served"), [("0.31.2", False), ("0.99.0", True)])
def test_a_release_that_is_not_known(
    monkeypatch: pytest.MonkeyPatch, log: list[str], version: str, served: bool
) -> None:
    """An old one refuses to load the model, where it would run another that is wrong; a new one may do."""
    import vllm
    from vllm import ModelRegistry

    import zaya_tools.vllm_plugin as plugin

    monkeypatch.setattr(plugin, "_ours", False)
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(ModelRegistry, "models", {k: v for k, v in ModelRegistry.models.items() if k != ARCHITECTURE})
    register()
    assert log[0].startswith(f"vLLM {version} is ")
    assert log[0].endswith("zaya-tools serves with vLLM 0.32 and 0.33")
    entry = ModelRegistry.models[ARCHITECTURE]
    if served:
        assert f"{entry.module_name}:{entry.class_name}" == MODEL
        return
    with pytest.raises(ZayaError, match=r"vLLM 0\.31\.2 is too old: zaya-tools serves with vLLM 0\.32 and 0\.33"):
        entry.load_model_cls()


def test_a_model_of_vllm_s_own_wins(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    from vllm import ModelRegistry

    import zaya_tools.vllm_plugin as plugin

    monkeypatch.setattr(plugin, "_ours", False)
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    ModelRegistry.register_model(ARCHITECTURE, "vllm.model_executor.models.zaya:ZayaForCausalLM")
    register()
    assert ModelRegistry.models[ARCHITECTURE].module_name == "vllm.model_executor.models.zaya"
    assert not plugin._ours
    (line,) = log
    assert "has its own ZayaForCausalLM" in line
