"""Copies of weights, kept for inference where the kernels can't read the weight as it lies."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

READABLE_BYTES = 16  # the copy engine wants bases and row strides that are multiples of it
ROW_ELEMENTS = 64  # rows of a copy are a multiple of this many elements apart

_packing = threading.Lock()


def runs_kernels(matrix: Tensor) -> bool:
    """Whether kernels take a matrix of this dtype on this device."""
    return matrix.is_cuda and matrix.dtype in (torch.float16, torch.bfloat16)


def read_as_it_is(matrix: Tensor) -> bool:
    """Whether a kernel can read the matrix where it lies."""
    rows, columns = matrix.shape
    if matrix.numel() == 0:
        return True
    row_bytes = matrix.stride(0) * matrix.element_size()
    return (
        (columns == 1 or matrix.stride(1) == 1)
        and (rows == 1 or row_bytes % READABLE_BYTES == 0)
        and matrix.data_ptr() % READABLE_BYTES == 0
    )


class PackedCopy:
    """A matrix with its rows a multiple of ROW_ELEMENTS apart, and what it is a copy of.

    A deep copy or a pickle of it is None: who holds that packs anew.
    """

    def __init__(self, matrix: Tensor) -> None:
        # Other matrices may have come to lie at the same address: a storage is never mistaken.
        self._storage = weakref.ref(matrix.untyped_storage())
        self._key = _key(matrix)
        rows, columns = matrix.shape
        # Not an inference tensor, which autograd couldn't save for the inputs' gradients.
        with torch.inference_mode(False), torch.no_grad():
            buffer = matrix.new_zeros(rows, -(-columns // ROW_ELEMENTS) * ROW_ELEMENTS)
            self._copy = buffer[:, :columns]
            self._copy.copy_(matrix)
        self._stream, self._written = None, None
        if matrix.is_cuda:
            self._stream = torch.cuda.current_stream(matrix.device)
            self._written = self._stream.record_event()

    def is_of(self, matrix: Tensor) -> bool:
        """Whether the matrix is the one copied, and unchanged as far as torch counts changes."""
        return self._storage() is matrix.untyped_storage() and self._key == _key(matrix)

    def read(self) -> Tensor:
        """The copy, for work on the current stream."""
        if self._written is not None:
            stream = torch.cuda.current_stream(self._copy.device)
            if stream != self._stream:
                stream.wait_event(self._written)
                self._copy.record_stream(stream)
        return self._copy

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _key(matrix: Tensor) -> tuple[Any, ...]:
    place = matrix.data_ptr(), matrix.shape, matrix.stride()
    return matrix._version, matrix.dtype, matrix.device, place


def packed(module: nn.Module, slot: str, matrix: Tensor) -> Tensor:
    """The matrix, or the copy that the module's attribute `slot` keeps of it, as a kernel likes it.

    The matrix itself where
    - it is read as it is, or no kernel takes it;
    - a gradient to it is wanted. The copy is dropped then: trainers may write to weights behind
      torch's back (FSDP does);
    - the call is recorded (compiled, exported, traced, captured into a CUDA graph): what is
      recorded follows the weight itself, and the op packs in every call;
    - its changes can't be seen, as those of inference tensors.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return matrix
    if type(matrix) is not Tensor or not runs_kernels(matrix):
        return matrix
    if matrix.requires_grad and torch.is_grad_enabled():
        if getattr(module, slot) is not None:
            setattr(module, slot, None)
        return matrix
    if (
        matrix.is_inference()
        or torch._C._functorch.is_functorch_wrapped_tensor(matrix)
        or (matrix.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return matrix
    kept: PackedCopy | None = getattr(module, slot)
    if kept is not None and kept.is_of(matrix):
        return kept.read()
    if read_as_it_is(matrix):
        return matrix
    with _packing:  # once, when several threads come first
        kept = getattr(module, slot)
        if kept is None or not kept.is_of(matrix):
            kept = PackedCopy(matrix)
            setattr(module, slot, kept)
    return kept.read()
