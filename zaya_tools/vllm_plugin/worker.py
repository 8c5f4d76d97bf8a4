"""One checkpoint through vLLM, for another process: `python -m zaya_tools.vllm_plugin.worker REQUEST RESULT`.

The request is a JSON file: `model` (folder), `dtype`, `windows` (token ids to score), `prompts` and `new_tokens` (to
continue greedily, all at once) and `engine` (further arguments of vllm.LLM). The result is one too: `vllm` (version),
`model_class`, `logprobs` (nats, one a token but the first of each window), `ranked_first` (whether that token was
the most likely one), `generated` (token ids); or `error`, one line, and maybe `hint`. Who waits for it sees on stderr
how far it is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from zaya_tools.errors import ZayaError
from zaya_tools.releases import age, releases
from zaya_tools.vllm_plugin.support import describe

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Nobody is told of it over the network.
    "VLLM_NO_USAGE_STATS": "1",
    # A window may be as long as the model's context, and scoring it makes one token more.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
}
"""What a short run wants of vLLM, where the user has not said otherwise: no second process, no bound cores."""


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request as described above."""
    import vllm
    from vllm import LLM, SamplingParams

    windows, prompts, new = request["windows"], request["prompts"], request["new_tokens"]
    longest = max([len(window) + 1 for window in windows] + [len(prompt) + new for prompt in prompts])
    settings = {
        "dtype": request["dtype"], "max_model_len": longest, "skip_tokenizer_init": True, "enforce_eager": True,
        "enable_prefix_caching": False, "disable_log_stats": True, **request.get("engine", {}),
    }  # fmt: skip
    llm = LLM(request["model"], **settings)
    (model_class,) = set(llm.apply_model(describe))
    score = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    greedy = SamplingParams(max_tokens=new, temperature=0, detokenize=False, ignore_eos=True)
    scored = llm.generate([{"prompt_token_ids": ids} for ids in windows], score) if windows else []
    made = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy) if prompts else []
    found = [
        [entry[token] for token, entry in zip(ids[1:], out.prompt_logprobs[1:], strict=True)]
        for ids, out in zip(windows, scored, strict=True)
    ]
    return {
        "vllm": vllm.__version__,
        "model_class": model_class,
        "logprobs": [[entry.logprob for entry in window] for window in found],
        "ranked_first": [[entry.rank == 1 for entry in window] for window in found],
        "generated": [list(out.outputs[0].token_ids) for out in made],
    }


def _version_hint() -> str | None:
    """What may be to blame where vLLM is of a release that nobody knew."""
    try:
        import vllm
    except ImportError:
        return None
    old_or_new = age(vllm.__version__)
    return (
        f"this is vLLM {vllm.__version__}, {old_or_new}: {releases()}; its own output is above" if old_or_new else None
    )


def end_with_parent(parent: int) -> None:
    """Nobody is left to read the answer where the process that asked is gone, however it went."""
    while os.getppid() == parent:
        time.sleep(1)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Answer the request in the first file in the second."""
    source, destination = map(Path, sys.argv[1:3])
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        result = serve(json.loads(source.read_text()))
    except ZayaError as error:
        result = {"error": error.message, "hint": error.hint}
    except Exception as error:
        # The whole story is on stderr already, or not worth more than its first line.
        result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", "hint": _version_hint()}
    destination.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
