"""ZAYA1 in plain torch, on CPU and CUDA: one functional core for evaluation, for serving state and for plugins.

`ZayaModel` holds a whole model and `Session` serves requests with it; `build_block` and `run_sequences` run one a block
at a time. `cca`, `packing` and `router` are pure functions, for runtimes with linear and attention layers of their own.
"""
