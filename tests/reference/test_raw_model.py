"""The oracle's own checks: causal, deterministic, windows of W + 1 tokens, skip acts only if chosen."""

import math

import pytest
import torch
from torch.nn.functional import conv1d, pad

from .raw_model import (
    Attention,
    Weights,
    causal_attention,
    cca_attention,
    conv_heads,
    raw_forward,
    raw_logits,
)
from .raw_random import example_configs, random_raw, raw_shape

CONFIGS = example_configs()
NAMES = sorted(CONFIGS)


def some_ids(seed: int = 1, batch: int = 2, tokens: int = 24) -> torch.Tensor:
    return torch.randint(0, 128, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_finite_of_order_one_and_deterministic(name: str) -> None:
    tensors, ids = random_raw(CONFIGS[name], seed=0), some_ids()
    logits = raw_logits(CONFIGS[name], tensors, ids)
    assert logits.shape == (2, 24, 128)
    assert logits.dtype == torch.float32
    assert 0.2 < logits.std().item() < 5
    again = random_raw(CONFIGS[name], seed=0)
    assert all(torch.equal(tensors[key], again[key]) for key in tensors)
    assert torch.equal(logits, raw_logits(CONFIGS[name], again, ids))


@pytest.mark.parametrize("name", NAMES)
def test_earlier_logits_do_not_see_a_later_token(name: str) -> None:
    tensors, ids = random_raw(CONFIGS[name], seed=0), some_ids()
    changed = ids.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 128
    before, after = (raw_logits(CONFIGS[name], tensors, i) for i in (ids, changed))
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before[:, 10:], after[:, 10:], atol=1e-2)


@pytest.mark.parametrize("name", ["attention_bias", "list", "smoe", "untied"])
def test_every_tensor_matters(name: str) -> None:
    # Random factors on any tensor must move the logits; balancing biases only choose.
    tensors, ids = random_raw(CONFIGS[name], seed=0, dtype=torch.float32), some_ids(batch=4)
    base = raw_logits(CONFIGS[name], tensors, ids)
    for key, tensor in tensors.items():
        if key.endswith("balancing_biases"):
            continue
        factor = 1 + 0.5 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7))
        changed = raw_logits(CONFIGS[name], tensors | {key: tensor * factor}, ids)
        assert (changed - base).abs().max() > 1e-4, key


def test_window_of_w_sees_w_previous_tokens_and_itself() -> None:
    query, key, value = torch.randn(3, 1, 12, 2, 8, generator=torch.Generator().manual_seed(0)).unbind()
    window = 4
    before = causal_attention(query, key, value, window)
    key, value = key.clone(), value.clone()
    key[:, 0] += 1
    value[:, 0] += 1
    changed = (causal_attention(query, key, value, window) != before).any(dim=-1).any(dim=-1)[0]
    assert changed.tolist() == [True] * (window + 1) + [False] * (12 - window - 1)


def test_sliding_block_reaches_a_window_beyond_the_convolutions() -> None:
    config = CONFIGS["scalar_sliding"]
    w = Weights(random_raw(config, seed=0))
    x = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(0))
    moved = x.clone()
    moved[:, 0] += 1
    window, history = 5, 2  # two convolutions of width 2 spread a token over the next two
    settings = Attention(rotary_base=10000.0, rotary_fraction=0.5, window=window, clamp_temp=False)
    before, after = (cca_attention(w, "model.layers.2.self_attn", i, settings) for i in (x, moved))
    difference = (after - before).abs().amax(dim=(0, 2))
    assert (difference[: window + history + 1] > 1e-6).all()
    # Matrix products may round a row differently by its neighbours, so this is not exact equality.
    assert (difference[window + history + 1 :] < 1e-6).all()


@pytest.mark.parametrize("name", ["scalar", "wide_conv"])
def test_loops_are_the_library_convolutions(name: str) -> None:
    shape = raw_shape(CONFIGS[name])
    tensors = random_raw(CONFIGS[name], seed=0, dtype=torch.float32)
    conv = "model.layers.0.self_attn.qkv.conv_qk"
    heads = shape.q_heads + shape.kv_heads
    s = torch.randn(2, 9, heads * shape.head_dim, generator=torch.Generator().manual_seed(0))
    padded = pad(s.transpose(1, 2), (shape.time0 + shape.time1 - 2, 0))
    first = conv1d(padded, tensors[f"{conv}.0.weight"], tensors[f"{conv}.0.bias"], groups=s.shape[-1])
    second = conv1d(first, tensors[f"{conv}.1.weight"], tensors[f"{conv}.1.bias"], groups=heads)
    ours = conv_heads(Weights(tensors), conv, s, shape.head_dim).reshape(s.shape)
    torch.testing.assert_close(ours, second.transpose(1, 2))


@pytest.mark.parametrize("name", NAMES)
def test_skip_output_matters_only_when_skip_is_chosen(name: str) -> None:
    config, ids = CONFIGS[name], some_ids(batch=4)
    experts = raw_shape(config).experts
    for alive in (False, True):
        tensors = random_raw(config, seed=0, skip_alive=alive)
        zero, identity = (raw_forward(config, tensors, ids, skip_output=o) for o in ("zero", "identity"))
        skipped = torch.stack(zero.choices) == experts
        if alive:
            assert 0.05 < skipped.float().mean() < 0.7
            assert not torch.allclose(zero.logits, identity.logits, atol=1e-2)
        else:
            assert not skipped.any()
            assert torch.equal(zero.logits, identity.logits)


@pytest.mark.parametrize("name", NAMES)
def test_choices_are_diverse(name: str) -> None:
    config = CONFIGS[name]
    for choice in raw_forward(config, random_raw(config, seed=0), some_ids(batch=4)).choices:
        share = torch.bincount(choice.flatten(), minlength=raw_shape(config).experts).float() / choice.numel()
        assert (share > 0.02).sum() >= 3
        assert share.max() < 0.8


def test_clamped_temp_is_the_exponential_of_the_clamp() -> None:
    config, ids = CONFIGS["clamp_temp"], some_ids()
    tensors = random_raw(config, seed=0, dtype=torch.float32)
    temps = {key: tensor for key, tensor in tensors.items() if key.endswith(".temp")}
    values = torch.cat(list(temps.values()))
    assert values.min() < 0  # both ends of the clamp act
    assert values.max() > 2
    baked = {key: torch.tensor([math.exp(min(max(v, 0.0), 2.0)) for v in t]) for key, t in temps.items()}
    plain = raw_logits(config | {"clamp_temp": False}, tensors | baked, ids)
    torch.testing.assert_close(raw_logits(config, tensors, ids), plain, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, raw_logits(config | {"clamp_temp": False}, tensors, ids), atol=1e-2)


def test_positions_are_relative() -> None:
    # One token repeated, so only rotary positions could tell its tokens apart, once the history is full.
    config = CONFIGS["scalar_sliding"] | {"swa_layers": [3, 0, 3, 0]}
    logits = raw_logits(config, random_raw(config, seed=0), torch.full((1, 40), 5))
    torch.testing.assert_close(logits[:, 30], logits[:, 39], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(logits[:, 0], logits[:, 39], atol=1e-2)


def test_a_count_of_layers_that_does_not_fit_is_refused() -> None:
    config = CONFIGS["scalar"]
    with pytest.raises(ValueError, match="half-layers"):
        raw_logits(config | {"num_hidden_layers": 8}, random_raw(config, seed=0), some_ids())
