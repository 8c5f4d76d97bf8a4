"""Embedding and output head: vLLM's, or emulated ones where it has no kernel for the scheme on this CPU.

Both are cut by vocabulary rows under tensor parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import Library
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from zaya_tools.architecture import Architecture
from zaya_tools.errors import LayoutError
from zaya_tools.evaluation.stored import Decoder
from zaya_tools.vllm_plugin.emulation import FAULTS, Form, decoder_of, say_emulated


def build_embedding(architecture: Architecture, quant_config: Any, name: str) -> Any:
    """A layer ids [rows] -> [rows, hidden], quantized as the config says for this name."""
    a = architecture
    if not _may_emulate(quant_config):
        return VocabParallelEmbedding(a.vocab_size, a.hidden_size, quant_config=quant_config, prefix=name)
    layer = VocabParallelEmbedding(a.vocab_size, a.hidden_size, prefix=name)
    decoder = decoder_of(quant_config, layer, name)
    if decoder is not None:
        say_emulated(NotImplementedError("quantized embeddings are looked up by a Triton kernel"), name)
        StoredVocabulary(layer, decoder, name).install()
    return layer


def build_head(architecture: Architecture, quant_config: Any, name: str) -> Any:
    """A layer [rows, hidden] -> logits, for vLLM's logits processor, quantized as the config says for this name."""
    a = architecture

    def head(rows: int, config: Any, *, bias: bool) -> Any:
        return ParallelLMHead(rows, a.hidden_size, bias=bias, quant_config=config, prefix=name)

    if a.tied or not _may_emulate(quant_config):
        return head(a.vocab_size, None if a.tied else quant_config, bias=a.head_bias)
    layer = head(a.vocab_size, None, bias=a.head_bias)
    decoder = decoder_of(quant_config, layer, name)
    if decoder is None:
        return layer
    try:
        _try_out(head(layer.padding_size * layer.tp_size, quant_config, bias=False))
    except FAULTS as error:
        say_emulated(error, name)
        StoredVocabulary(layer, decoder, name).install()
        return layer
    return head(a.vocab_size, quant_config, bias=a.head_bias)


def _may_emulate(quant_config: Any) -> bool:
    return current_platform.is_cpu() and hasattr(quant_config, "get_scheme_dict")


def _try_out(layer: Any) -> None:
    """Run a head of vLLM's on zeros: schemes are refused when it is built, when it is repacked, or only then."""
    for parameter in layer.parameters():
        parameter.data.zero_()
    layer.quant_method.process_weights_after_loading(layer)
    dtype = get_current_vllm_config().model_config.dtype
    layer.quant_method.apply(layer, torch.zeros(2, layer.embedding_dim, dtype=dtype))


class StoredVocabulary(QuantizeMethodBase):
    """How an embedding or a head computes from what is stored, dequantized where it is used."""

    def __init__(self, layer: Any, decoder: Decoder, name: str) -> None:
        config = get_current_vllm_config()
        self.layer, self.name = layer, name
        self.dtype = config.model_config.dtype
        shard = layer.shard_indices
        self.start, rows = shard.org_vocab_start_index, shard.org_vocab_end_index - shard.org_vocab_start_index
        if layer.tp_size > 1 and decoder.scheme.weights.block_structure:
            raise LayoutError(f"{name} has scales for blocks of rows, which ranks cannot share")
        self.whole = Form(decoder, self.dtype, layer.org_vocab_size, layer.embedding_dim)
        self.own = Form(decoder, self.dtype, rows, layer.embedding_dim)
        config.compilation_config.static_forward_context[name] = layer

    def install(self) -> None:
        """Give the layer this method and its parameters, instead of those that it was built with."""
        del self.layer.weight
        self.layer.quant_method = self
        self.create_weights(self.layer)

    def create_weights(self, layer: Any, *_: Any, **__: Any) -> None:
        """Register what is stored of this rank's rows, each with a `weight_loader` that takes the tensor of all."""
        for suffix, (dtype, shape) in self.own.share().items():
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            parameter.weight_loader = self._loader(suffix)  # type: ignore[attr-defined]
            layer.register_parameter(suffix, parameter)

    def _loader(self, suffix: str) -> Any:
        def load(parameter: Tensor, tensor: Tensor) -> None:
            tensor = self.whole.cut(suffix, tensor)
            if tensor.shape != parameter.shape:
                tensor = tensor.narrow(0, self.start, parameter.shape[0])
            parameter.data.copy_(tensor)

        return load

    def _state(self) -> dict[str, Tensor]:
        return {suffix: getattr(self.layer, suffix).data for suffix in self.own.share()}

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits [rows, this rank's padded vocabulary] of x [rows, hidden]."""
        out = self.own.linear(self.name, self._state())(x)
        out = F.pad(out, (0, layer.num_embeddings_per_partition - out.shape[-1]))
        return out if bias is None else out + bias

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Rows [..., hidden] of ids [...] below this rank's number of rows."""
        out: Tensor = torch.ops.zaya.stored_rows(input_.reshape(-1), self.name, self.own.columns, self.dtype)
        return out.view(*input_.shape, -1)

    def rows(self, ids: Tensor) -> Tensor:
        """What `embedding` gives for ids [rows], out of the compiler's sight."""
        part = Form(self.own.decoder, self.dtype, len(ids), self.own.columns)
        # What there is a row of comes by row, a scale of the whole matrix as it is.
        state = {
            suffix: tensor if tensor.shape[:1] != (self.own.rows,) else tensor[ids]
            for suffix, tensor in self._state().items()
        }
        linear: Any = part.linear(self.name, state)
        found: Tensor = linear.weight()
        return found


def _stored_rows(ids: Tensor, layer: str, columns: int, dtype: torch.dtype) -> Tensor:
    return get_forward_context().no_compile_layers[layer].quant_method.rows(ids)  # type: ignore[no-any-return]


def _stored_rows_fake(ids: Tensor, layer: str, columns: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty((ids.shape[0], columns), dtype=dtype)


_library = Library("zaya", "FRAGMENT")  # type: ignore[no-untyped-call]
direct_register_custom_op("stored_rows", _stored_rows, fake_impl=_stored_rows_fake, target_lib=_library)
