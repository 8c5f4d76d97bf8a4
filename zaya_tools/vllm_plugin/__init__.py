"""ZAYA1 for vLLM releases that have no model of their own for it, found through the entry point `vllm.general_plugins`.

Thin modules of vLLM's kinds (linear, attention, fused experts, state cache) around the functional core in `model`.
"""

from __future__ import annotations

ARCHITECTURE = "ZayaForCausalLM"
MODEL = f"zaya_tools.vllm_plugin.model:{ARCHITECTURE}"
REFUSAL = f"zaya_tools.vllm_plugin.outdated:{ARCHITECTURE}"

_ours = False


def register() -> None:
    """Tell vLLM of the model, unless it has one: its own wins. The log says which. May be called more than once."""
    global _ours  # noqa: PLW0603
    import vllm
    from vllm import ModelRegistry
    from vllm.logger import init_logger

    from zaya_tools.releases import TOO_OLD, age, releases

    # Below vLLM's own name, whose handlers print it.
    logger = init_logger("vllm.zaya_tools")
    if _ours:
        return
    if ARCHITECTURE in ModelRegistry.get_supported_archs():
        logger.info("vLLM %s has its own %s, the one of zaya-tools stays out", vllm.__version__, ARCHITECTURE)
        return
    _ours = True
    old_or_new = age(vllm.__version__)
    if old_or_new:
        logger.warning("vLLM %s is %s: %s", vllm.__version__, old_or_new, releases())
    if old_or_new == TOO_OLD:
        # Without a model of that name it would fall back to one that runs and is wrong.
        ModelRegistry.register_model(ARCHITECTURE, REFUSAL)
        return
    ModelRegistry.register_model(ARCHITECTURE, MODEL)
    logger.info("%s comes from zaya-tools, vLLM %s has none", ARCHITECTURE, vllm.__version__)
