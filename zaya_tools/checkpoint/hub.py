"""Where a checkpoint is: a folder, or a model on the Hugging Face hub that is fetched into its cache."""

from __future__ import annotations

import re
from pathlib import Path

from zaya_tools.checkpoint.sidefiles import COPIED
from zaya_tools.errors import SourceError

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "config.json", *COPIED]


def locate(source: str) -> tuple[Path, str]:
    """(folder, name) of a checkpoint: `source` is a folder, or a hub id `org/name` or `org/name@revision`.

    A folder always wins over a hub id. SourceError when it is neither, or when the hub cannot be reached or
    does not have it.
    """
    if not source:
        raise SourceError("the name of the source is empty", "give a folder, or a hub id like org/name")
    folder = expand(source)
    if folder.exists():
        return folder, folder.resolve().name
    found = _HUB_ID.fullmatch(source)
    if not found or source.startswith((".", "/", "~")):
        return folder, folder.name  # opening it says that it does not exist
    return _download(found["repo"], found["revision"], source), source


def expand(path: str | Path) -> Path:
    """A path with ~ replaced by the home folder; left as it is where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _download(repo: str, revision: str | None, source: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_PATTERNS))
    except GatedRepoError as error:
        raise SourceError(f"{repo} is gated", "accept its terms on the hub, then `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"there is no folder {source} and no model {repo} on the hub",
            "check the spelling; private models need `hf auth login`",
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{repo} has no revision {revision}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise SourceError(
            f"there is no folder {source}, and the hub cannot be reached to look for a model of that name",
            "check the path, or the network (HF_HUB_OFFLINE must not be set)",
        ) from error
    except (HFValidationError, HfHubHTTPError) as error:
        raise SourceError(f"the hub refused {source}: {_first_line(error)}") from error
    except Exception as error:  # whatever the network stack or a full cache disk raises, with its own words
        raise SourceError(
            f"{source} could not be fetched: {_first_line(error)}", "run it again: what was fetched is kept"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
