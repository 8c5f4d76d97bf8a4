"""ZAYA1 in its raw layout, in plain float32 torch: the oracle for converted checkpoints.

Written from the model's description alone and importing nothing from the package, so that a mistake in
the package cannot hide here. Whole sequences, no caching, no padding. Geometry comes from the shapes of the
tensors; the config gives only what shapes cannot: rotary bases, windows, eps, clamping.

Letters in shapes and einsums: b batch, t/s token, h query head, k key/value head, d head channel, c channel.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

SkipOutput = Literal["zero", "identity"]


@dataclass(frozen=True)
class RawTrace:
    """What one pass gives: float32 logits [b, t, vocab] and, a block, the chosen class [b, t] (E is skip)."""

    logits: Tensor
    choices: list[Tensor]


@dataclass(frozen=True)
class Attention:
    """What the tensors do not tell of one attention layer.

    `rotary_fraction` of each head turns; a raw `window` of W sees W previous tokens and self, None is all.
    """

    rotary_base: float
    rotary_fraction: float
    window: int | None
    clamp_temp: bool


@dataclass(frozen=True)
class RawConfig:
    """What the tensors do not tell. `attention` has one entry a block."""

    eps: float
    attention: list[Attention]


class Weights:
    """Tensors by name, as float32. A bias is used where there is one."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].to(torch.float32)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = torch.einsum("...i,oi->...o", x, self[f"{name}.weight"])
        return out + self[f"{name}.bias"] if f"{name}.bias" in self else out

    def half_layers(self) -> int:
        found = (re.match(r"model\.layers\.(\d+)\.", name) for name in self._tensors)
        return 1 + max(int(match.group(1)) for match in found if match)


def raw_logits(
    config: dict[str, Any],
    tensors: Mapping[str, Tensor],
    input_ids: Tensor,
    *,
    skip_output: SkipOutput = "zero",
) -> Tensor:
    """float32 logits [batch, tokens, vocab] of a raw- or smoe-layout checkpoint.

    Every tensor is cast to float32 first. `skip_output` is what an expert layer gives for a token that chose
    skip: "zero" as the native layout does, "identity" (normed input times p of skip) as the trainers do.
    """
    return raw_forward(config, tensors, input_ids, skip_output=skip_output).logits


def raw_forward(
    config: dict[str, Any],
    tensors: Mapping[str, Tensor],
    input_ids: Tensor,
    *,
    skip_output: SkipOutput = "zero",
) -> RawTrace:
    """The same pass as `raw_logits`, with the router's choices. input_ids: integers [batch, tokens]."""
    w = Weights(tensors)
    blocks = w.half_layers() // 2
    cfg = parse_config(config, blocks)
    expert_key = "smoe_block" if "smoe_layers" in config else "zaya_block"

    # Layer 0 merges no sublayer: its res_scale only scales the embedding.
    first = "model.layers.0.res_scale"
    embedding = w["model.embed_tokens.weight"][input_ids]
    h = (embedding + w[f"{first}.hidden_states_bias"]) * w[f"{first}.hidden_states_scale"]

    router_state: Tensor | None = None
    choices: list[Tensor] = []
    for block in range(blocks):
        attention, experts = f"model.layers.{2 * block}", f"model.layers.{2 * block + 1}"
        # A half-layer's res_scale merges the output of the half-layer before it; the last one is at the top.
        after = f"model.layers.{2 * block + 2}" if block + 1 < blocks else "model"

        x = rms_norm(h, w[f"{attention}.input_norm.weight"], cfg.eps)
        out = cca_attention(w, f"{attention}.self_attn", x, cfg.attention[block])
        h = merge(w, f"{experts}.res_scale", out, h)

        x = rms_norm(h, w[f"{experts}.input_norm.weight"], cfg.eps)
        p, choice, router_state = route(w, f"{experts}.{expert_key}.router", x, router_state, cfg.eps)
        out = expert_layer(w, f"{experts}.{expert_key}.experts", x, (p, choice), skip_output)
        h = merge(w, f"{after}.res_scale", out, h)
        choices.append(choice)

    h = rms_norm(h, w["model.final_norm.weight"], cfg.eps)
    head = "lm_head" if "lm_head.weight" in w else "model.embed_tokens"
    return RawTrace(w.linear(h, head), choices)


def parse_config(config: dict[str, Any], blocks: int) -> RawConfig:
    """Read a raw config of any style. Raises ValueError where it asks for a model other than this one."""
    layers = config.get("smoe_layers") or config.get("zaya_layers")
    # A layer list is the truth, and num_hidden_layers beside it may be stale; alone, it counts half-layers.
    half_layers = len(layers) if layers else config["num_hidden_layers"]
    if half_layers != 2 * blocks:
        raise ValueError(f"the config has {half_layers} half-layers, the tensors {2 * blocks}")
    for flag in ("zaya_use_mod", "zaya_use_eda", "scale_residual_merge", "gated_linear_unit", "cca"):
        if not config.get(flag, True):
            raise ValueError(f"{flag} must be true")
    if config.get("moe_router_topk", 1) != 1:
        raise ValueError("only top-1 routing is described")

    # `rope_scaling: false` and null both mean none; a linear factor of 1 changes nothing.
    rope = config.get("rope_parameters") or {}
    for scaling in (rope, config.get("rope_scaling") or {}):
        if scaling.get("factor", 1.0) != 1.0:
            raise ValueError("scaled rotary positions are not described")
    base = _first(config, "rope_theta", "rotary_base", default=rope.get("rope_theta"))
    if base is None:
        raise ValueError("no rotary base in the config")
    sliding_base = _first(config, "swa_rotary_base", default=10000.0)
    rope_fraction = rope.get("partial_rotary_factor", 0.5)
    fraction = _first(config, "partial_rotary_factor", "rope_pct", default=rope_fraction)

    # One entry a half-layer, maybe padded beyond the last; 0 or null is full attention.
    swa = config.get("swa_layers") or []
    windows = [int(swa[2 * i]) if 2 * i < len(swa) and swa[2 * i] else None for i in range(blocks)]
    return RawConfig(
        eps=float(_first(config, "norm_epsilon", default=1e-5)),
        attention=[
            Attention(
                rotary_base=float(sliding_base if window else base),
                rotary_fraction=float(fraction),
                window=window,
                clamp_temp=bool(config.get("clamp_temp")),
            )
            for window in windows
        ],
    )


def _first(config: dict[str, Any], *keys: str, default: Any) -> Any:
    """The value of the first key that is present and not null."""
    return next((config[key] for key in keys if config.get(key) is not None), default)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def merge(w: Weights, name: str, out: Tensor, residual: Tensor) -> Tensor:
    scaled_out = (out + w[f"{name}.hidden_states_bias"]) * w[f"{name}.hidden_states_scale"]
    return scaled_out + (residual + w[f"{name}.residual_bias"]) * w[f"{name}.residual_scale"]


def cca_attention(w: Weights, name: str, x: Tensor, settings: Attention) -> Tensor:
    """CCA of a normed input x [b, t, hidden] -> [b, t, hidden]."""
    b, t, _ = x.shape
    q = w.linear(x, f"{name}.qkv.linear_q")
    k = w.linear(x, f"{name}.qkv.linear_k")
    temp = w[f"{name}.qkv.temp"]
    nk = temp.shape[0]
    d = k.shape[-1] // nk
    nq = q.shape[-1] // d
    g = nq // nk

    s = conv_heads(w, f"{name}.qkv.conv_qk", torch.cat([q, k], dim=-1), d)
    q, k = q.reshape(b, t, nq, d), k.reshape(b, t, nk, d)
    residual_q = (q + k.repeat_interleave(g, dim=2)) / 2  # query head h belongs to key head h // g
    residual_k = residual_q.reshape(b, t, nk, g, d).mean(dim=3)
    query = to_length_sqrt_d(s[:, :, :nq] + residual_q)
    key = to_length_sqrt_d(s[:, :, nq:] + residual_k)
    key = key * (torch.exp(temp.clamp(1e-7, 2.0)) if settings.clamp_temp else temp)[:, None]

    # The token before the first is a zero vector, so what it gives is the projection's bias, if there is one.
    previous = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
    current_half = w.linear(x, f"{name}.qkv.val_proj1")
    delayed_half = w.linear(previous, f"{name}.qkv.val_proj2")
    # Halves of all channels, then cut into heads: of two heads, one is this token and one the previous.
    value = torch.cat([current_half, delayed_half], dim=-1).reshape(b, t, nk, d)

    out = causal_attention(rotate(query, settings), rotate(key, settings), value, settings.window)
    return w.linear(out.reshape(b, t, nq * d), f"{name}.o_proj")


def conv_heads(w: Weights, name: str, s: Tensor, d: int) -> Tensor:
    """Depthwise, then one-group-a-head causal convolution of s [b, t, heads * d] -> [b, t, heads, d]."""
    b, t, channels = s.shape
    depthwise, grouped = w[f"{name}.0.weight"], w[f"{name}.1.weight"]
    time0, time1 = depthwise.shape[-1], grouped.shape[-1]
    # Zeros go before the raw vectors, once for both: before the start, the first convolution gives its bias.
    s = torch.cat([s.new_zeros(b, time0 + time1 - 2, channels), s], dim=1)

    between = t + time1 - 1
    first = w[f"{name}.0.bias"].expand(b, between, channels)
    for tap in range(time0):
        first = first + s[:, tap : tap + between] * depthwise[:, 0, tap]

    heads = channels // d
    first = first.reshape(b, between, heads, d)
    grouped = grouped.reshape(heads, d, d, time1)  # head, output channel, input channel, tap
    second = w[f"{name}.1.bias"].reshape(heads, d).expand(b, t, heads, d)
    for tap in range(time1):
        second = second + torch.einsum("bthi,hoi->btho", first[:, tap : tap + t], grouped[..., tap])
    return second


def to_length_sqrt_d(x: Tensor) -> Tensor:
    norm = x.norm(dim=-1, keepdim=True)
    # No eps: it would move every value. Only an exactly zero vector has no direction, and stays zero.
    return x * math.sqrt(x.shape[-1]) / torch.where(norm == 0, torch.ones_like(norm), norm)


def rotate(x: Tensor, settings: Attention) -> Tensor:
    """Rotary positions, NeoX halves, on the first channels of each head. x: [b, t, heads, d]."""
    turning = int(x.shape[-1] * settings.rotary_fraction)
    half = turning // 2
    pair = torch.arange(half, dtype=torch.float32, device=x.device)
    frequency = settings.rotary_base ** (-2 * pair / turning)
    position = torch.arange(x.shape[1], dtype=torch.float32, device=x.device)
    angle = (position[:, None] * frequency)[:, None, :]  # [t, 1, half]: the same for every head
    x1, x2, rest = x[..., :half], x[..., half:turning], x[..., turning:]
    return torch.cat([x1 * angle.cos() - x2 * angle.sin(), x2 * angle.cos() + x1 * angle.sin(), rest], dim=-1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Grouped-query attention, [b, t, heads, d] each. A raw `window` of W sees W previous tokens and self."""
    b, t, nq, d = query.shape
    nk = key.shape[2]
    query = query.reshape(b, t, nk, nq // nk, d)
    scores = torch.einsum("btkgd,bskd->bkgts", query, key) / math.sqrt(d)
    token = torch.arange(t, device=query.device)
    distance = token[:, None] - token[None, :]
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance > window)
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    return torch.einsum("bkgts,bskd->btkgd", weights, value).reshape(b, t, nq, d)


def route(
    w: Weights,
    name: str,
    x: Tensor,
    previous: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Top-1 routing of x [b, t, hidden]: p of the choice [b, t], the choice [b, t], the router state."""
    z = w.linear(x, f"{name}.down_proj")
    if previous is not None:  # the first block has no previous one, and its scale, if stored, is unused
        z = z + previous * w[f"{name}.router_states_scale"]
    hidden = rms_norm(z, w[f"{name}.rmsnorm_eda.weight"], eps)
    hidden = gelu(w.linear(hidden, f"{name}.router_mlp.0"), approximate="none")
    hidden = gelu(w.linear(hidden, f"{name}.router_mlp.2"), approximate="none")
    p = w.linear(hidden, f"{name}.router_mlp.4").softmax(dim=-1)
    choice = (p + w[f"{name}.balancing_biases"]).argmax(dim=-1)
    # The biases choose but do not weigh; the weight is the plain probability, not renormalised.
    return p.gather(-1, choice[..., None])[..., 0], choice, z


def expert_layer(
    w: Weights,
    name: str,
    x: Tensor,
    routed: tuple[Tensor, Tensor],
    skip_output: SkipOutput,
) -> Tensor:
    """Every token through its one SwiGLU expert, times p. The class after the last expert is skip."""
    p, choice = routed
    experts = 0
    out = torch.zeros_like(x)
    while f"{name}.local_experts.{experts}.linear_fc1.weight" in w:
        expert = f"{name}.local_experts.{experts}"
        chosen = choice == experts
        gate, up = w.linear(x[chosen], f"{expert}.linear_fc1").chunk(2, dim=-1)  # gate rows come first
        out[chosen] = w.linear(silu(gate) * up, f"{expert}.linear_fc2") * p[chosen][:, None]
        experts += 1
    if skip_output == "identity":
        chosen = choice == experts
        out[chosen] = x[chosen] * p[chosen][:, None]
    return out
