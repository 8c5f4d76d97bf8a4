"""ZAYA1 checkpoints: convert, quantize, inspect and prove them, from a script as from the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zaya_tools.calibration.run import calibrate
    from zaya_tools.checkpoint.conversion import convert
    from zaya_tools.checkpoint.inspection import inspect
    from zaya_tools.checkpoint.opening import Reading
    from zaya_tools.evaluation.validation import validate
    from zaya_tools.quantization.conversion import quantize

__version__ = "0.1.0"
__all__ = ["Reading", "__version__", "calibrate", "convert", "inspect", "quantize", "validate"]

_HOMES = {
    "Reading": "zaya_tools.checkpoint.opening",
    "calibrate": "zaya_tools.calibration.run",
    "convert": "zaya_tools.checkpoint.conversion",
    "inspect": "zaya_tools.checkpoint.inspection",
    "quantize": "zaya_tools.quantization.conversion",
    "validate": "zaya_tools.evaluation.validation",
}


def __getattr__(name: str) -> Any:
    # Lazy: `import zaya_tools` and `zaya --help` must not pay for what a command alone needs.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
