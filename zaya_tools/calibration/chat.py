"""Conversations as the model sees them: through the chat template that travels with the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_tools.checkpoint.source import read_json
from zaya_tools.errors import ZayaError

_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
    # What the model writes when it calls a tool, and what comes back.
    "function_call": "assistant", "tool_call": "assistant",
    "tool": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
"""Roles that templates know, by the words of ShareGPT."""
_PATIENCE = 100


class ChatRenderer:
    """A function from a conversation's turns to text by the chat template in a folder, looked up when first used.

    Turns have `role` and `content`, or `from` and `value` as ShareGPT has them. A conversation that the template
    refuses, or with a role that nothing is known of, gives no text: `unusable` counts those, and `reason` says what
    was wrong with the first. ZayaError where the folder has no template, for turns that are none, and where so many
    conversations are refused that it is not they who are at fault.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: tuple[str, dict[str, str]] | None = None
        self._rendered = self.unusable = 0
        self.reason = ""

    def __call__(self, turns: Sequence[Any], where: str) -> str:
        """Text of the conversation that stands at `where`, empty where it cannot be used."""
        from transformers.utils.chat_template_utils import render_jinja_template

        if self._held is None:
            self._held = _template(self._folder), _special_tokens(self._folder)
        template, special = self._held
        messages = [_message(turn, where) for turn in turns]
        if any(message["role"] is None for message in messages):
            return self._left_out(f"{where}: a turn is from none of {', '.join(_ROLES)}")
        try:
            # Some releases give the rendered texts alone, others a pair with the assistant's spans.
            found: Any = render_jinja_template([messages], chat_template=template, **special)
        except Exception as error:  # templates raise whatever they like
            said = " ".join(str(error).split())[:200] or type(error).__name__
            return self._left_out(f"{where}: the conversation does not fit the chat template: {said}")
        self._rendered += 1
        texts = found[0] if isinstance(found, tuple) else found
        return str(texts[0])

    def check(self) -> None:
        """ZayaError where there were conversations and none could be used."""
        if self.unusable and not self._rendered:
            raise ZayaError(self.reason, "check the data, or name a folder with another chat template by --tokenizer")

    def _left_out(self, reason: str) -> str:
        self.unusable += 1
        self.reason = self.reason or reason
        if self.unusable >= _PATIENCE:
            self.check()
        return ""


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


def _message(turn: Any, where: str) -> dict[str, Any]:
    """A turn as templates take it; its role is None where ShareGPT's word for it says nothing."""
    if isinstance(turn, Mapping):
        if isinstance(turn.get("role"), str) and ("content" in turn or turn.get("tool_calls")):
            held = {key: value for key, value in turn.items() if value is not None}
            if isinstance(held.get("tool_calls"), list):
                calls = [_call(call) for call in held["tool_calls"]]
                held = {"content": "", **held, "tool_calls": calls}
            return held
        if isinstance(turn.get("from"), str) and isinstance(turn.get("value"), str):
            return {"role": _ROLES.get(turn["from"]), "content": turn["value"]}
    raise ZayaError(
        f"{where}: a turn of the conversation has no role and content",
        "turns are objects with role and content, or with from and value",
    )


def _call(call: Any) -> Any:
    """A tool call whose arguments, which travel as JSON in a string, are the object that templates go through."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):  # the template may take it as it is
        return call
    return {**call, "function": {**function, "arguments": arguments}}
