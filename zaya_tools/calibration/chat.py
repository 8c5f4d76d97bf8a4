"""Conversations as the model sees them: through the chat template that travels with the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_tools.checkpoint.source import read_json
from zaya_tools.errors import ZayaError
from zaya_tools.evaluation.text import Chat

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def chat_renderer(folder: Path) -> Chat:
    """A function from a conversation's turns to text by the chat template in `folder`, looked up when it is first used.

    Turns have `role` and `content`, or `from` and `value` as ShareGPT has them. The function raises ZayaError where
    the folder has no template, and where a conversation does not fit it.
    """
    held: list[tuple[str, dict[str, str]]] = []

    def render(turns: Sequence[Any]) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        if not held:
            held.append((_template(folder), _special_tokens(folder)))
        template, special = held[0]
        messages = [_message(turn) for turn in turns]
        try:
            # Some releases give the rendered texts alone, others a pair with the assistant's spans.
            found: Any = render_jinja_template([messages], chat_template=template, **special)
        except Exception as error:  # templates raise whatever they like
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ZayaError(f"a conversation does not fit the chat template: {reason}", "check the data") from error
        texts = found[0] if isinstance(found, tuple) else found
        return str(texts[0])

    return render


def _template(folder: Path) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        stated = read_json(folder / name).get("chat_template") if (folder / name).is_file() else None
        if isinstance(stated, list):  # several by name
            stated = next((entry.get("template") for entry in stated if entry.get("name") == "default"), None)
        if isinstance(stated, str):
            return stated
    raise ZayaError(
        f"{folder} has no chat template, and the data are conversations",
        "name a folder that has one with --tokenizer, or give plain text",
    )


def _special_tokens(folder: Path) -> dict[str, str]:
    """bos_token and the like, which templates mention by name."""
    file = folder / "tokenizer_config.json"
    stated = read_json(file) if file.is_file() else {}
    found = {}
    for name, value in stated.items():
        token = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(token, str):
            found[name] = token
    return found


def _message(turn: Any) -> dict[str, Any]:
    if isinstance(turn, Mapping):
        if isinstance(turn.get("role"), str) and "content" in turn:
            return {key: value for key, value in turn.items() if value is not None}
        if turn.get("from") in _ROLES and isinstance(turn.get("value"), str):
            return {"role": _ROLES[turn["from"]], "content": turn["value"]}
    raise ZayaError("a conversation has a turn without role and content", "check the data")
