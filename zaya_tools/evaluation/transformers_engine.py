"""A native checkpoint in transformers' own ZayaForCausalLM: the model that we did not write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zaya_tools.checkpoint.source import open_source, read_bytes
from zaya_tools.dtypes import to_float32
from zaya_tools.errors import LayoutError, ZayaError, listing
from zaya_tools.evaluation import statistics
from zaya_tools.evaluation.likelihood import Likelihood, divergence
from zaya_tools.evaluation.windows import Windows
from zaya_tools.layouts.match import match, require
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.parameters import Role, parameters


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """ZayaForCausalLM in `dtype` on the CPU, in evaluation mode, with every weight and buffer as stored.

    transformers fills what it does not find with random numbers, and overwrites every block's skip bias with -1;
    so missing or unexpected weights are a LayoutError, and the balancing biases are copied back from the files.
    """
    from transformers import ZayaForCausalLM
    from transformers.utils import logging

    source = open_source(folder)
    found = require(match(source.tensors, source.config, str(folder)))
    if found.layout is not NATIVE:
        form = (
            "stores its experts one by one"
            if found.layout is NATIVE_PER_EXPERT
            else f"has the {found.layout.name} layout"
        )
        raise LayoutError(f"{folder} {form}, which transformers cannot load", "use --engine stream")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, report = ZayaForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    finally:
        if shown:
            logging.enable_progress_bar()
    wrong = [str(key) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in report[kind]]
    if wrong:
        raise LayoutError(
            f"transformers did not load {folder} completely: {listing(sorted(wrong))}", "use --engine stream"
        )
    buffers = dict(model.named_buffers())
    for parameter in parameters(found.architecture):
        tensor = found.bound[parameter.name][0].tensor
        if parameter.role is Role.BALANCING and tensor is not None:
            buffers[parameter.name].copy_(torch.from_numpy(to_float32(read_bytes(tensor), tensor.dtype).copy()))
    return model.eval()


def measure(
    folder: Path, windows: Windows, reference: Path | None = None, dtype: torch.dtype = torch.float32
) -> Likelihood:
    """The likelihood of windows, and the divergence from a reference, by transformers with whole models in memory.

    What blocks do is not seen from outside, so the result has no figures of blocks. Errors as in `load`.
    """
    models = [load(path, dtype) for path in (folder, reference) if path is not None]
    nll: list[list[torch.Tensor]] = [[] for _ in models]
    kl, same = [], []
    with torch.inference_mode():
        for ids, scored in zip(windows.ids, windows.scored, strict=True):
            keep = scored[1:]
            targets = ids[1:][keep]
            logs = [
                m(input_ids=ids[None], use_cache=False).logits[0, :-1][keep].float().log_softmax(-1) for m in models
            ]
            for found, log in zip(nll, logs, strict=True):
                found.append(-log.gather(-1, targets[:, None])[:, 0])
            if len(logs) == 2:
                mine, wanted = logs
                kl.append((wanted.exp() * (wanted - mine)).sum(-1).clamp_min(0))
                same.append(mine.argmax(-1) == wanted.argmax(-1))
    scores = [torch.cat(found).double().numpy() for found in nll]
    against = None
    if reference is not None:
        against = divergence(scores[0], scores[1], torch.cat(kl).double().numpy(), torch.cat(same).double().numpy())
    return Likelihood(len(scores[0]), statistics.mean(scores[0], np.exp), (), against)


def perplexity(model: Any, tokens: Sequence[int], context: int, batch: int = 8) -> float:
    """exp of the mean negative log-likelihood in nats a token, over windows of `context` tokens side by side.

    The first token of each window has nothing before it and is not counted; a rest shorter than a window is left
    out. Logits [batch, context, vocabulary] are the largest thing held. ZayaError for less than one window.
    """
    windows = torch.tensor(tokens[: len(tokens) // context * context]).view(-1, context)
    if context < 2 or not len(windows):
        raise ZayaError(f"{len(tokens)} tokens are less than one window of {context}", "give more text")
    total = 0.0
    with torch.inference_mode():
        for ids in torch.split(windows, batch):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            total += torch.nn.functional.cross_entropy(
                logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), reduction="sum"
            ).item()
    return math.exp(total / (windows.shape[0] * (context - 1)))
