"""What tells one trained model from another, whatever layout or precision it is stored in."""

from __future__ import annotations

from blake3 import blake3

from zaya_tools.checkpoint.source import read_bytes
from zaya_tools.dtypes import to_float32
from zaya_tools.layouts.match import Match
from zaya_tools.parameters import Role, parameters


def identity(found: Match) -> str:
    """A digest of the norms' and balancing biases' values: small, never quantized, the same in every layout."""
    digest = blake3()
    for parameter in parameters(found.architecture):
        if parameter.role not in (Role.NORM, Role.BALANCING):
            continue
        digest.update(parameter.name.encode())
        for bound in found.bound[parameter.name]:
            if bound.tensor is not None:
                digest.update(to_float32(read_bytes(bound.tensor), bound.tensor.dtype).tobytes())
    return digest.hexdigest()[:32]
