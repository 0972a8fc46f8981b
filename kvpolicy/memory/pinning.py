"""Page-locked host memory in large pieces: mapped, touched by several threads, then registered with CUDA.

torch pins 8 GiB in about 4.6 s; 33 GiB took 6 to 9 s this way (H200 in a virtual machine of 16 cores).
What a kernel reads from it is as fast either way.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the bytes that are ready and all bytes."""

# Registered one after the other, so that a large pool shows progress; a copy engine needs a range within
# one of them, kernels do not care.
CHUNK = 1 << 30
# Below this torch's own way takes less than half a second.
LARGE = 1 << 29
TOUCHING_THREADS = 8
# cudaHostRegisterPortable | cudaHostRegisterMapped
REGISTER_FLAGS = 3


class PinnedBuffer:
    """``capacity`` bytes of zeros in page-locked host memory, or in plain memory where ``pinned`` is False.

    bytes: uint8 [capacity]. progress: told how far it is, for large ones. RuntimeError where there is not
    so much memory. :meth:`close` before the process ends, and after it no kernel may use the memory.
    """

    def __init__(self, capacity: int, pinned: bool, progress: Progress | None = None) -> None:
        self._unpin: weakref.finalize[..., PinnedBuffer] | None = None
        if pinned and capacity >= LARGE:
            try:
                self.bytes = self._register(capacity, progress)
                return
            except (OSError, RuntimeError) as error:
                log.warning(
                    "host memory of %d bytes: registering failed (%s); torch pins it, which takes longer",
                    capacity,
                    str(error).splitlines()[0],
                )
        self.bytes = torch.empty(capacity, dtype=torch.uint8, pin_memory=pinned)

    def _register(self, capacity: int, progress: Progress | None) -> Tensor:
        pages = mmap.mmap(-1, capacity)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(pages, dtype=torch.uint8)
        chunks = [
            (whole.data_ptr() + start, min(CHUNK, capacity - start))
            for start in range(0, capacity, CHUNK)
        ]
        done: list[int] = []
        try:
            with ThreadPoolExecutor(1) as ahead:  # touches the next chunk while one is registered
                touched = [ahead.submit(touch, *chunk) for chunk in chunks]
                ready = 0
                for (address, size), wait in zip(chunks, touched, strict=True):
                    wait.result()
                    _check(torch.cuda.cudart().cudaHostRegister(address, size, REGISTER_FLAGS))
                    done.append(address)
                    ready += size
                    if progress is not None:
                        progress(ready, capacity)
        except BaseException:
            unregister(done)
            raise
        self._unpin = weakref.finalize(self, unregister, done)
        return whole

    def close(self) -> None:
        """Unpin, after the device has finished, and let go of the memory, which goes with the last tensor
        that reads it. A second call does nothing."""
        if self._unpin is not None:
            self._unpin()
        self.bytes = torch.empty(0, dtype=torch.uint8)


def touch(address: int, size: int, threads: int = TOUCHING_THREADS) -> None:
    """Write zeros over a range, in several threads (a page is made when it is first written)."""
    count = max(1, min(threads, os.cpu_count() or 1))
    part = -(-size // count)
    starts = range(0, size, part)
    with ThreadPoolExecutor(count) as pool:  # ctypes lets go of the interpreter's lock
        list(
            pool.map(
                lambda at: ctypes.memset(address + at, 0, min(part, size - at)) and None, starts
            )
        )


def unregister(addresses: Sequence[int]) -> None:
    """Undo registrations, once nothing on the device uses the memory any more."""
    if addresses:
        torch.cuda.synchronize()
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)


def _check(error: object) -> None:
    """RuntimeError for a CUDA error code."""
    if int(error) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"cudaHostRegister: error {int(error)}")  # type: ignore[call-overload]
