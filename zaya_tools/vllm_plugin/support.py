"""What of vLLM's settings the model takes part in, and the geometry that its config states."""

from __future__ import annotations

from typing import Any

from zaya_tools.architecture import Architecture
from zaya_tools.errors import ZayaError
from zaya_tools.layouts.geometry import resolve
from zaya_tools.layouts.native import NATIVE


def architecture_of(vllm_config: Any) -> Architecture:
    """The geometry of vLLM's model config. LayoutError for a config that is not a native ZAYA1's."""
    return resolve(NATIVE, vllm_config.model_config.hf_config.to_dict(), {}, None)


def check_supported(vllm_config: Any) -> None:
    """ZayaError for settings that would be ignored or give wrong numbers."""
    parallel = vllm_config.parallel_config
    refused = (
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism", "use --tensor-parallel-size instead"),
        (vllm_config.num_speculative_tokens > 0, "speculative decoding", "leave --speculative-config out"),
        (vllm_config.lora_config is not None, "LoRA", "merge the adapter into the checkpoint"),
        (parallel.enable_dbo, "dual batch overlap", "leave --enable-dbo out"),
        (parallel.enable_eplb, "expert load balancing", "leave --enable-eplb out"),
        # Completeness is checked from what the loader yields, which then lacks the other ranks' experts on purpose.
        (parallel.enable_ep_weight_filter, "the expert weight filter", "leave --enable-ep-weight-filter out"),
    )
    for wanted, what, hint in refused:
        if wanted:
            raise ZayaError(f"ZAYA1 in vLLM does not support {what}", hint)


def check_heads(backend: Any, channels: int) -> None:
    """ZayaError where an attention backend of vLLM has no kernels for heads of so many channels.

    vLLM's CPU backend would find out when the first request is there.
    """
    if not backend.supports_head_size(channels):
        sizes = ", ".join(map(str, backend.get_supported_head_sizes()))
        raise ZayaError(
            f"vLLM's {backend.get_name()} has no kernels for heads of {channels} channels"
            + (f", only of {sizes}" if sizes else ""),
            "serve it on another device; `zaya validate` without --engine vllm runs heads of any size",
        )


def describe(model: Any) -> str:
    """Module and name of a model's class. Here, where every process of an engine can import it."""
    return f"{type(model).__module__}.{type(model).__qualname__}"
