from __future__ import annotations

import pytest
import torch

from zaya_tools.errors import LayoutError
from zaya_tools.model.block import run_sequences
from zaya_tools.model.model import ZayaModel
from zaya_tools.model.rotary import rotaries

from .support import BASE, GEOMETRIES, random_ids, random_model, random_tensors, transformers_model


@pytest.mark.parametrize("name", GEOMETRIES)
def test_logits_equal_those_of_transformers(name: str) -> None:
    a = GEOMETRIES[name]
    ids = random_ids(a, 2, 24)
    with torch.no_grad():
        expected = transformers_model(a)(ids, use_cache=False).logits
    torch.testing.assert_close(random_model(a).logits(ids), expected, atol=1e-4, rtol=0)


def test_random_models_use_every_class() -> None:
    model, ids = random_model(BASE), random_ids(BASE, 8, 32)
    hidden, carried, used = model.ends.embed(ids), None, []
    tables = rotaries(BASE, torch.arange(32))
    for block in model.blocks:
        out = run_sequences(hidden, carried, block, tables[False])
        hidden, carried = out.hidden, out.router_states
        used.append(torch.bincount(out.routing.choice.flatten(), minlength=BASE.experts + 1))
    # Skip is the last; without it, and without each expert, the comparisons here would prove little.
    assert (torch.stack(used).sum(0) > 0).all()
    assert all(counts[-1] > 0 for counts in used)


def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16() -> None:
    ids = random_ids(BASE, 8, 32)
    rounded = {name: tensor.bfloat16().float() for name, tensor in random_tensors(BASE).items()}
    for name, tensor in random_tensors(BASE).items():
        if name.endswith("balancing_biases"):
            rounded[name] = tensor
    exact = ZayaModel.of(BASE, rounded).logits(ids)
    ours = ZayaModel.of(BASE, random_tensors(BASE), dtype=torch.bfloat16).logits(ids)
    with torch.no_grad():
        theirs = transformers_model(BASE, torch.bfloat16)(ids, use_cache=False).logits
    assert ours.dtype == torch.bfloat16
    # Medians over tokens: where rounding changes an expert, one token is far off in either.
    error, reference = ((logits - exact).norm(dim=-1).median() for logits in (ours, theirs))
    assert error < 1.1 * reference
    assert error < 0.02 * exact.norm(dim=-1).median()


def test_padding_at_the_end_changes_nothing_before_it() -> None:
    ids = random_ids(BASE, 1, 12)
    padded = torch.cat([ids, torch.zeros(1, 5, dtype=ids.dtype)], dim=1)
    torch.testing.assert_close(random_model(BASE).logits(padded)[:, :12], random_model(BASE).logits(ids))


def test_surplus_tensors_are_named() -> None:
    tensors = {**random_tensors(BASE), "model.layers.0.mlp.gate.bias": torch.zeros(1)}
    with pytest.raises(LayoutError, match=r"model\.layers\.0\.mlp\.gate\.bias"):
        ZayaModel.of(BASE, tensors)


def test_weights_of_the_compute_dtype_are_shared() -> None:
    tensors = random_tensors(BASE)
    model = random_model(BASE)
    assert isinstance(model.ends.embedding, torch.Tensor)
    assert model.ends.embedding.data_ptr() == tensors["model.embed_tokens.weight"].data_ptr()
    assert model.ends.head is model.ends.embedding
