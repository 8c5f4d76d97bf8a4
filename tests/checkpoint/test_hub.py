"""Hub ids, without a network: what is asked for, and what every refusal says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from tests.checkpoint.support import model
from zaya_tools.checkpoint.conversion import convert, plan_conversion
from zaya_tools.checkpoint.hub import expand, locate
from zaya_tools.checkpoint.sidefiles import COPIED
from zaya_tools.errors import SourceError

Fake = Callable[..., str]


def install(monkeypatch: pytest.MonkeyPatch, fake: Fake) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)


def http(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    # Not a client's own response: which client the hub library uses depends on its version.
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind(f"{status} from the hub\nsecond line", response=response)


def test_offline_is_one_line_and_a_hint() -> None:
    with pytest.raises(SourceError, match="no folder org/name, and the hub cannot be reached") as caught:
        plan_conversion("org/name")
    assert "\n" not in caught.value.message
    assert caught.value.hint is not None
    assert "HF_HUB_OFFLINE" in caught.value.hint


@pytest.mark.parametrize(("source", "revision"), [("org/name", None), ("org/name@v1.0", "v1.0"),
                                                  ("org/na.me-2@refs/pr/1", "refs/pr/1")])  # fmt: skip
def test_what_is_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, revision: str | None
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def fake(repo: str, **options: Any) -> str:
        asked.append((repo, options))
        return str(tmp_path)

    install(monkeypatch, fake)
    assert locate(source) == (tmp_path, source)
    ((repo, options),) = asked
    assert (repo, options["revision"]) == (source.partition("@")[0], revision)
    patterns = options["allow_patterns"]
    assert {"*.safetensors", "*.safetensors.index.json", "config.json", *COPIED} <= set(patterns)
    assert not any(name.endswith((".bin", ".pt", ".pth")) or name == "*" for name in patterns)


def test_a_fetched_model_is_converted_under_its_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(tmp_path / "snapshot")
    install(monkeypatch, lambda *_, **__: str(tmp_path / "snapshot"))
    work = convert("org/name@main", tmp_path / "out").conversion
    assert work.name == "org/name@main"
    assert '"name": "org/name@main"' in (tmp_path / "out" / "zaya_manifest.json").read_text()


def test_a_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> str:
        raise AssertionError("the hub was asked")

    install(monkeypatch, never)
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "org" / "name")
    assert locate("org/name") == (Path("org/name"), "name")
    assert plan_conversion("org/name").name == "name"


@pytest.mark.parametrize("source", ["./org/name", "../name", "/abs/name", "~/nowhere", "~nobody-of-this-name/x", "name",
                                    "a/b/c", "org/name/", "org name/x"])  # fmt: skip
def test_paths_are_never_looked_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str) -> None:
    def never(*_: object, **__: object) -> str:
        raise AssertionError("the hub was asked")

    install(monkeypatch, never)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match="does not exist"):
        plan_conversion(source)


def test_an_empty_name_is_not_the_current_folder() -> None:
    with pytest.raises(SourceError, match="the name of the source is empty"):
        locate("")


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand("~/x") == tmp_path / "x"
    assert expand("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (http(errors.GatedRepoError, 403), "org/name is gated", "accept its terms"),
        (http(errors.RepositoryNotFoundError, 404), "no model org/name on the hub", "spelling"),
        (http(errors.RevisionNotFoundError, 404), "org/name has no revision main", None),
        (http(errors.HfHubHTTPError, 500), "the hub refused org/name@main: 500 from the hub", None),
        (errors.HFValidationError("bad id"), "the hub refused org/name@main: bad id", None),
        (errors.HFValidationError(), "the hub refused org/name@main: HFValidationError", None),
        (errors.LocalEntryNotFoundError("not cached"), "the hub cannot be reached", "network"),
        (errors.OfflineModeIsEnabled("offline"), "the hub cannot be reached", "network"),
        (RuntimeError("timed out\nmore"), "could not be fetched: timed out", "again"),
        (EOFError("peer closed"), "could not be fetched: peer closed", "again"),
        (OSError(28, "No space left on device"), "No space left on device", "again"),
        (ValueError(), "could not be fetched: ValueError", "again"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str, hint: str | None) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    install(monkeypatch, fail)
    with pytest.raises(SourceError, match=message) as caught:
        locate("org/name@main")
    assert "\n" not in caught.value.message
    assert (hint is None) == (caught.value.hint is None)
    assert hint is None or hint in str(caught.value.hint)


def test_ctrl_c_during_a_download_is_not_an_error_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    install(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        locate("org/name")
