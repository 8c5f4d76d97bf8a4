"""The quantization_config of a checkpoint whose quantized tensors are carried across under new names."""

from __future__ import annotations

from typing import Any

from zaya_tools.errors import LayoutError
from zaya_tools.layouts.config_values import Config
from zaya_tools.layouts.match import Match
from zaya_tools.parameters import Role, parameters

_IGNORED = {
    Role.ATTENTION: [
        r"re:.*\.self_attn\.qkv_proj\.(q_proj|k_proj|v_proj_current|v_proj_delayed)$",
        r"re:.*\.self_attn\.o_proj$",
    ],
    Role.EXPERT: [r"re:.*\.mlp\.experts\..*"],
}
_ALWAYS_IGNORED = [r"re:.*\.mlp\.gate\..*"]


def carried_quantization(found: Match, config: Config) -> dict[str, Any] | None:
    """The quantization_config for the native module names, None when nothing is quantized.

    The scheme is the source's own; targets and ignore list are written anew, since the source's speak of module
    names that no longer exist. LayoutError when the source does not say its scheme, has several, or quantizes
    only some tensors of a role.
    """
    if not found.quantized:
        return None
    stated = config.get("quantization_config")
    groups = stated.get("config_groups") if isinstance(stated, dict) else None
    if not isinstance(stated, dict) or not isinstance(groups, dict) or not groups:
        raise LayoutError(
            "tensors are quantized but config.json has no compressed-tensors quantization_config",
            "add the one that the quantizer wrote: the scales mean nothing without it",
        )
    schemes = [{key: value for key, value in group.items() if key != "targets"} for group in groups.values()]
    if any(scheme != schemes[0] for scheme in schemes):
        raise LayoutError(
            f"config.json has {len(schemes)} different quantization schemes: only one can be carried across",
            "convert the unquantized checkpoint and quantize the result",
        )
    ignore = list(_ALWAYS_IGNORED)
    for role, patterns in _IGNORED.items():
        states = {bound.quantized for p in parameters(found.architecture) if p.role is role and len(p.shape) > 1
                  for bound in found.bound[p.name]}  # fmt: skip
        if states == {True, False}:
            raise LayoutError(
                f"only some tensors of the role '{role}' are quantized: such a mixture cannot be carried across",
                "convert the unquantized checkpoint and quantize the result",
            )
        if states == {False}:
            ignore += patterns
    if not any(bound.quantized for p in parameters(found.architecture) if p.role in (Role.HEAD, Role.EMBEDDING)
               for bound in found.bound[p.name]):  # fmt: skip
        ignore.append("lm_head")
    kept = {key: value for key, value in stated.items() if key not in ("config_groups", "ignore") and value is not None}
    return {**kept, "config_groups": {"group_0": {**schemes[0], "targets": ["Linear"]}}, "ignore": sorted(ignore)}
