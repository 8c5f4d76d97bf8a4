"""Typed values out of a config.json that a person or a trainer wrote, or one line saying which key is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zaya_tools.dtypes import NAMES
from zaya_tools.errors import LayoutError

Config = Mapping[str, Any]


def whole(config: Config, key: str) -> int | None:
    """A whole number, None when the key is absent or null."""
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise LayoutError(f"config.json: {key} must be a whole number, found {value!r}")
    return value


def number(config: Config, key: str) -> float | None:
    """A number, None when the key is absent or null."""
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LayoutError(f"config.json: {key} must be a number, found {value!r}")
    return float(value)


def flag(config: Config, key: str) -> bool | None:
    """True or false, None when the key is absent or null."""
    value = config.get(key)
    if value is None or isinstance(value, bool):
        return value
    raise LayoutError(f"config.json: {key} must be true or false, found {value!r}")


def table(config: Config, key: str) -> Mapping[str, Any]:
    """A nested table, empty when the key is absent, null or false (trainers write `rope_scaling: false`)."""
    value = config.get(key)
    if value is None or value is False:
        return {}
    if not isinstance(value, Mapping):
        raise LayoutError(f"config.json: {key} must be a table, found {value!r}")
    return value


def sequence(config: Config, key: str) -> list[Any] | None:
    """A list, None when the key is absent or null."""
    value = config.get(key)
    if value is None or isinstance(value, list):
        return None if value is None else list(value)
    raise LayoutError(f"config.json: {key} must be a list, found {value!r}")


def first_stated(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def agreed(name: str, stated: Mapping[str, Any]) -> Any:
    """The one value that several keys state for `name`; LayoutError when they differ, None when none states it."""
    given = {key: value for key, value in stated.items() if value is not None}
    if len(set(given.values())) > 1:
        said = ", ".join(f"{key} = {value}" for key, value in given.items())
        raise LayoutError(f"config.json contradicts itself about {name}: {said}")
    return next(iter(given.values()), None)


def token_id(config: Config, key: str, default: int) -> int | None:
    """A token id; `default` when the key is absent, None when it is null."""
    return whole(config, key) if key in config else default


def token_ids(config: Config, key: str, default: int) -> int | tuple[int, ...] | None:
    """A token id or several; `default` when the key is absent, None when it is null."""
    value = config.get(key, default)
    ids = value if isinstance(value, list) else [0 if value is None else value]
    if any(isinstance(entry, bool) or not isinstance(entry, int) for entry in ids):
        raise LayoutError(f"config.json: {key} must be a token id or a list of them, found {value!r}")
    return tuple(value) if isinstance(value, list) else value


def dtype_name(config: Config) -> str | None:
    """The stated dtype without its `torch.` prefix, None when none is stated (or left to be found out: "auto")."""
    value = first_stated(config.get("dtype"), config.get("torch_dtype"))
    name = None if value is None else str(value).removeprefix("torch.")
    if name not in (None, "auto", *NAMES):
        raise LayoutError(f"config.json: dtype must be one of {', '.join(NAMES)}, found {value!r}")
    return None if name == "auto" else name


def rotary_extras(parameters: Config) -> tuple[tuple[str, Any], ...]:
    """Rotary parameters beyond base and fraction, frozen; nothing for plain rotary and for a linear factor of 1."""
    kind = first_stated(parameters.get("rope_type"), parameters.get("type"), "default")
    if kind == "default" or (kind == "linear" and parameters.get("factor") == 1):
        return ()
    dropped = {"rope_theta", "partial_rotary_factor", "type", "rope_type"}
    extras = {key: value for key, value in parameters.items() if key not in dropped} | {"rope_type": kind}
    return tuple(sorted((key, tuple(value) if isinstance(value, list) else value) for key, value in extras.items()))
