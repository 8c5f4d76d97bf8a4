"""A matrix that stays on disk: a vocabulary's embedding and head are as large as blocks, and only parts are used."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from zaya_tools.checkpoint.ranges import Files, read_range
from zaya_tools.tensors import TensorInfo


class StoredRows:
    """The rows of a matrix [rows, columns] in a file, read when they are asked for; of dtype `dtype`, on `device`."""

    def __init__(self, tensor: TensorInfo, dtype: torch.dtype, device: torch.device) -> None:
        """Open the file; it is closed when this goes away."""
        self.shape, self.dtype, self.device = torch.Size(tensor.shape), dtype, device
        self._tensor = tensor
        self._files = Files()
        self._files(tensor.file)
        weakref.finalize(self, self._files.__exit__)
        self._buffer = torch.empty(0, dtype=dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Tensor:
        """Rows [start, stop) as a tensor that is valid until the next are asked for."""
        start, stop, _ = rows.indices(len(self))
        size = max(0, stop - start) * self.shape[1]
        if len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=self.dtype)
        out = self._buffer[:size].view(-1, self.shape[1])
        self._read(out, start)
        return out.to(self.device)

    def lookup(self, ids: Tensor) -> Tensor:
        """The rows with these numbers [...], int64, as [..., columns]."""
        wanted, places = torch.unique(ids, return_inverse=True)
        found = torch.empty((len(wanted), self.shape[1]), dtype=self.dtype)
        for place, row in enumerate(wanted.tolist()):
            self._read(found[place], row)
        return found.to(self.device)[places]

    def _read(self, out: Tensor, row: int) -> None:
        start = row * self.shape[1] * self.dtype.itemsize
        read_range(self._tensor, start, out.view(-1).view(torch.uint8).numpy(), self._files)
