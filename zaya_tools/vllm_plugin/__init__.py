"""ZAYA1 for vLLM releases that have no model of their own for it, found through the entry point `vllm.general_plugins`.

Thin modules of vLLM's kinds (linear, attention, fused experts, state cache) around the functional core in `model`.
"""

from __future__ import annotations

ARCHITECTURE = "ZayaForCausalLM"
MODEL = f"zaya_tools.vllm_plugin.model:{ARCHITECTURE}"

_ours = False


def register() -> None:
    """Tell vLLM of the model, unless it has one: its own wins. The log says which. May be called more than once."""
    global _ours  # noqa: PLW0603
    import vllm
    from vllm import ModelRegistry
    from vllm.logger import init_logger

    # Below vLLM's own name, whose handlers print it.
    logger = init_logger("vllm.zaya_tools")
    if _ours:
        return
    if ARCHITECTURE in ModelRegistry.get_supported_archs():
        logger.info("vLLM %s has its own %s, the one of zaya-tools stays out", vllm.__version__, ARCHITECTURE)
        return
    ModelRegistry.register_model(ARCHITECTURE, MODEL)
    _ours = True
    logger.info("%s comes from zaya-tools, vLLM %s has none", ARCHITECTURE, vllm.__version__)
