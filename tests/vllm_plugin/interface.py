"""What the plugin uses of vLLM, held against the sources of any release without importing or installing it.

    python -m tests.vllm_plugin.interface FOLDER   # the folder `vllm` out of a wheel or an environment

Every name that the plugin imports must be there; everything that it calls must take the arguments that it gives;
base classes must ask for no method that it lacks; and what it reads off vLLM's objects must be declared.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import zaya_tools.vllm_plugin

PLUGIN = Path(zaya_tools.vllm_plugin.__file__).parent
_LAYERS = "model_executor/layers/"
_MOE = f"{_LAYERS}fused_moe/"

ARGUMENTS = {
    (f"{_MOE}layer.py", "FusedMoEFactory"): (
        "num_experts", "top_k", "hidden_size", "intermediate_size", "params_dtype", "renormalize", "quant_config",
        "prefix", "custom_routing_function", "routed_experts_cls",
    ),
    (f"{_MOE}routed_experts.py", "RoutedExperts._get_quant_method"): ("prefix", "quant_config", "moe_config"),
    (f"{_MOE}routed_experts.py", "RoutedExperts.weight_loader"): (
        "param", "loaded_weight", "weight_name", "shard_id", "expert_id", "return_success",
    ),
    (f"{_MOE}routed_experts.py", "RoutedExperts._map_global_expert_id_to_local_expert_id"): ("expert_id",),
    (f"{_MOE}runner/moe_runner.py", "MoERunner.forward"): ("hidden_states", "router_logits"),
    (f"{_MOE}fused_moe_method_base.py", "FusedMoEMethodBase.apply"): (
        "layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input",
    ),
    (f"{_MOE}fused_moe_method_base.py", "FusedMoEMethodBase.create_weights"): (
        "layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype",
    ),
    (f"{_LAYERS}linear.py", "ReplicatedLinear.__init__"): (
        "input_size", "output_size", "bias", "quant_config", "prefix", "return_bias",
    ),
    (f"{_LAYERS}attention/attention.py", "Attention.__init__"): (
        "num_heads", "head_size", "scale", "num_kv_heads", "cache_config", "quant_config", "prefix",
        "per_layer_sliding_window",
    ),
    (f"{_LAYERS}vocab_parallel_embedding.py", "VocabParallelEmbedding.__init__"): (
        "num_embeddings", "embedding_dim", "quant_config", "prefix",
    ),
    (f"{_LAYERS}vocab_parallel_embedding.py", "ParallelLMHead.__init__"): (
        "num_embeddings", "embedding_dim", "bias", "quant_config", "prefix",
    ),
    (f"{_LAYERS}vocab_parallel_embedding.py", "ParallelLMHead.tie_weights"): ("embed_tokens",),
    (f"{_LAYERS}logits_processor.py", "LogitsProcessor.forward"): ("lm_head", "hidden_states", "embedding_bias"),
    (f"{_LAYERS}quantization/compressed_tensors/compressed_tensors.py", "CompressedTensorsConfig.get_scheme_dict"): (
        "layer", "layer_name",
    ),
    ("utils/torch_utils.py", "direct_register_custom_op"): (
        "op_name", "op_func", "mutates_args", "fake_impl", "target_lib",
    ),
    ("compilation/decorators.py", "support_torch_compile"): ("dynamic_arg_dims",),
    ("entrypoints/llm.py", "LLM.apply_model"): ("func",),
    ("v1/attention/backend.py", "AttentionBackend.supports_head_size"): ("head_size",),
}  # fmt: skip
"""Arguments that functions must have, by file and name."""

FIELDS = {
    ("v1/attention/backends/mamba_attn.py", "BaseMambaAttentionMetadata"): (
        "num_prefills", "num_decodes", "has_initial_states_p", "query_start_loc_p", "state_indices_tensor_p",
        "state_indices_tensor_d",
    ),
    ("v1/attention/backend.py", "AttentionBackend"): ("get_name", "get_supported_head_sizes"),
    ("forward_context.py", "ForwardContext"): ("no_compile_layers", "attn_metadata"),
    ("config/compilation.py", "CompilationConfig"): ("static_forward_context", "splitting_ops"),
    ("config/parallel.py", "ParallelConfig"): (
        "pipeline_parallel_size", "enable_dbo", "enable_eplb", "enable_ep_weight_filter",
    ),
    ("config/vllm.py", "VllmConfig"): (
        "model_config", "cache_config", "parallel_config", "compilation_config", "quant_config", "lora_config",
        "num_speculative_tokens",
    ),
    ("v1/attention/backends/registry.py", "MambaAttentionBackendEnum"): ("SHORT_CONV",),
    (f"{_LAYERS}vocab_parallel_embedding.py", "VocabParallelEmbeddingShardIndices"): (
        "org_vocab_start_index", "org_vocab_end_index",
    ),
    (f"{_MOE}config.py", "FusedMoEConfig"): ("moe_parallel_config", "tp_rank", "tp_size"),
    ("sampling_params.py", "SamplingParams"): (
        "max_tokens", "temperature", "prompt_logprobs", "detokenize", "ignore_eos",
    ),
}  # fmt: skip
"""Fields, properties or members that classes must have."""

ABSTRACT = {
    (f"{_LAYERS}mamba/abstract.py", "MambaBase"): {"get_state_shape", "get_state_dtype", "mamba_type"},
    (f"{_MOE}fused_moe_method_base.py", "FusedMoEMethodBase"): {"create_weights", "get_fused_moe_quant_config"},
    (f"{_LAYERS}quantization/base_config.py", "QuantizeMethodBase"): {"create_weights", "apply"},
}
"""The abstract methods that the plugin's subclasses implement: all that there may be."""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _names(body: list[ast.stmt]) -> Iterator[str]:
    """Names that statements bind, inside conditions too."""
    for statement in body:
        if isinstance(statement, Definition):
            yield statement.name
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.If | ast.Try):
            yield from _names(statement.body)
            yield from _names(statement.orelse)


def _find(root: Path, file: str, name: str) -> list[Definition]:
    """All definitions of `Class.method`, overloads included."""
    body = _tree(root / file).body
    found: list[Definition] = []
    for part in name.split("."):
        found = [entry for entry in body if isinstance(entry, Definition) and entry.name == part]
        body = [entry for definition in found for entry in definition.body]
    return found


def _imports() -> Iterator[tuple[str, str]]:
    for file in sorted(PLUGIN.glob("*.py")):
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from (((node.module or ""), alias.name) for alias in node.names)


def problems(root: Path) -> list[str]:
    """What the plugin uses and the sources in `root` do not have."""
    found = []
    for module, name in sorted(set(_imports())):
        place = root.joinpath(*module.split(".")[1:])
        source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if not source.is_file():
            found.append(f"no module {module}")
        # The package itself gives its names lazily, from a table.
        elif name not in set(_names(_tree(source).body)) and not (root == place and f'"{name}"' in source.read_text()):
            found.append(f"no {name} in {module}")
    for (file, name), wanted in ARGUMENTS.items():
        taken = {
            argument.arg
            for entry in _find(root, file, name) if not isinstance(entry, ast.ClassDef)
            for argument in (*entry.args.posonlyargs, *entry.args.args, *entry.args.kwonlyargs)
        }  # fmt: skip
        found += [f"{name} in {file} takes no {argument}" for argument in wanted if argument not in taken]
    for (file, name), wanted in FIELDS.items():
        held = {entry for definition in _find(root, file, name) for entry in _names(definition.body)}
        found += [f"{name} in {file} has no {field}" for field in wanted if field not in held]
    for (file, name), known in ABSTRACT.items():
        asked = {
            entry.name
            for definition in _find(root, file, name) for entry in definition.body
            if isinstance(entry, ast.FunctionDef)
            and any(isinstance(mark, ast.Name) and mark.id == "abstractmethod" for mark in entry.decorator_list)
        }  # fmt: skip
        found += [f"{name} in {file} asks for {method}" for method in sorted(asked - known)]
    return found


if __name__ == "__main__":
    for line in (wrong := problems(Path(sys.argv[1]))):
        print(line)
    print(f"{len(wrong)} problems with {len(set(_imports()))} imports, {len(ARGUMENTS)} calls, {len(FIELDS)} classes")
    sys.exit(bool(wrong))
