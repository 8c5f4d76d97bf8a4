"""One Architecture out of a config and the shapes of the tensors, which have to agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zaya_tools.architecture import Architecture
from zaya_tools.errors import LayoutError
from zaya_tools.layouts import native_config, raw_config
from zaya_tools.layouts.base import Layout
from zaya_tools.layouts.config_values import Config
from zaya_tools.layouts.detect import RAW_FAMILY

Shapes = Mapping[str, tuple[int, ...]]

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def measure(layout: Layout, shapes: Shapes) -> dict[str, int]:
    """What the tensors say, by Architecture field, each from the first block that has the tensor for it.

    `shapes` are keyed by canonical names. Fields that no tensor tells are absent.
    """
    blocks = layout.count_blocks(list(shapes))

    def shape(local: str, rank: int) -> tuple[int, ...] | None:
        names = (layout.local_name(local, block) for block in range(blocks))
        found = (shapes[name] for name in names if name in shapes)
        return next((entry for entry in found if len(entry) == rank), None)

    found: dict[str, int] = {"blocks": blocks}

    def note(field: str, entry: tuple[int, ...] | None, value: Callable[[tuple[int, ...]], int]) -> None:
        if entry is not None:
            found[field] = value(entry)

    qkv = "self_attn.qkv_proj."
    embedding = shapes.get(layout.embedding, ())
    note("hidden_size", embedding if len(embedding) == 2 else shape("input_layernorm.weight", 1), lambda s: s[-1])
    note("vocab_size", embedding if len(embedding) == 2 else None, lambda s: s[0])
    note("time0", shape(f"{qkv}conv_qk_depthwise.weight", 3), lambda s: s[2])
    grouped = shape(f"{qkv}conv_qk_grouped.weight", 3)
    note("time1", grouped, lambda s: s[2])
    # The grouped convolution has one group a head, so a group's inputs are a head's channels.
    note("head_dim", grouped, lambda s: s[1])
    note("kv_heads", shape("self_attn.qk_norm.temp", 1), lambda s: s[0])
    head = found.get("head_dim")
    if head:
        note("query_heads", shape(f"{qkv}q_proj.weight", 2), lambda s: s[0] // head)
    note("router_width", shape("mlp.gate.down_proj.weight", 2), lambda s: s[0])
    note("experts", shape("mlp.gate.router_mlp.out_proj.weight", 2), lambda s: s[0] - 1)
    return found


def resolve(layout: Layout, config: Config, shapes: Shapes, dtype: str | None) -> Architecture:
    """The geometry that config and tensors agree on.

    `shapes` are keyed by canonical names, `dtype` is the embedding's safetensors dtype. LayoutError when the
    config is of another layout, when it and the tensors contradict each other, or when neither tells a field.
    """
    raw_family = layout in RAW_FAMILY
    own, other = (
        (raw_config.MARKERS, native_config.MARKERS) if raw_family else (native_config.MARKERS, raw_config.MARKERS)
    )
    if not own & config.keys() and other & config.keys():
        key = sorted(other & config.keys())[0]
        raise LayoutError(
            f"the tensors are in the {layout.name} layout but config.json is not: it has {key}",
            "put the config.json that belongs to these tensors beside them",
        )
    stated = raw_config.declared(config) if raw_family else native_config.declared(config)
    measured: dict[str, Any] = dict(measure(layout, shapes))
    if dtype in _DTYPES:
        stated.setdefault("dtype", _DTYPES[dtype])
    _head_size(config, stated, measured)
    for field, value in measured.items():
        # Fewer blocks than stated are missing tensors, which the caller names one by one.
        too_few = field == "blocks" and value < stated.get("blocks", 0)
        if field in stated and stated[field] != value and not too_few:
            raise LayoutError(
                f"config.json says {field} = {stated[field]}, the tensors say {value}",
                "the config must be the one of this checkpoint; nothing is guessed",
            )
    if raw_family:
        _attention_heads(config, stated, measured)
    merged = {**measured, **stated}
    required = ("blocks", "hidden_size", "query_heads", "kv_heads", "head_dim", "experts", "expert_width",
                "router_width", "vocab_size")  # fmt: skip
    absent = [field for field in required if field not in merged]
    if raw_family and "rope_theta" not in merged:
        absent.append("rope_theta (rotary_base)")
    if absent:
        raise LayoutError(f"config.json does not say {', '.join(absent)}", "add the missing keys to config.json")
    return Architecture(**merged)


def _head_size(config: Config, stated: dict[str, Any], measured: dict[str, Any]) -> None:
    """Configs of the 74B model state no head size: it is the hidden size divided by `num_attention_heads`."""
    heads = config.get("num_attention_heads")
    hidden = stated.get("hidden_size", measured.get("hidden_size"))
    if "head_dim" not in {**stated, **measured} and isinstance(heads, int) and heads > 0 and hidden:
        stated["head_dim"] = hidden // heads


def _attention_heads(config: Config, stated: dict[str, Any], measured: dict[str, Any]) -> None:
    """`num_attention_heads` means the query heads (8B) or hidden size / head size (base, 74B): accept either."""
    heads = raw_config.head_counts(config).get("num_attention_heads")
    if heads is None:
        return
    if "query_heads" not in stated and "query_heads" not in measured:
        stated["query_heads"] = heads
        return
    merged = {**measured, **stated}
    accepted = {merged["query_heads"]}
    if "head_dim" in merged and "hidden_size" in merged:
        accepted.add(merged["hidden_size"] // merged["head_dim"])
    if heads not in accepted:
        raise LayoutError(
            f"config.json says num_attention_heads = {heads}, the tensors have {merged['query_heads']} query heads",
            "expected the query heads, or the hidden size divided by the head size",
        )
