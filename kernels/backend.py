"""Which kernels run, and how triton runs in this process.

Triton decides once, when it is first imported, whether its kernels are compiled for a GPU or
interpreted on the CPU (``TRITON_INTERPRET=1``). The reference kernels never import it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys

log = logging.getLogger(__name__)

REFERENCE, TRITON = "reference", "triton"
_SWITCH = "TRITON_INTERPRET"


class BackendError(RuntimeError):
    """A backend that cannot run here; the text says why."""


def choose_backend(backend: str, device_type: str) -> str:
    """``reference`` or ``triton``. ``auto`` is triton on a GPU where it can run, else the reference.

    device_type: ``cpu`` or ``cuda``. After ``triton``, ``kvpolicy.kernels.triton`` may be imported.
    BackendError if triton was asked for by name and cannot run on that device.
    """
    if backend == TRITON:
        prepare_triton(device_type)
        return TRITON
    if backend == REFERENCE or device_type == "cpu":
        return REFERENCE
    try:
        prepare_triton(device_type)
    except BackendError as error:
        log.warning("running the plain torch kernels: %s", error)
        return REFERENCE
    return TRITON


def prepare_triton(device_type: str) -> None:
    """Import triton for kernels on this device: interpreted on the CPU, compiled elsewhere.

    On the CPU sets TRITON_INTERPRET=1 in this process. BackendError if triton is not installed or
    was imported the other way already.
    """
    wanted = device_type == "cpu"
    if "triton" not in sys.modules:
        if importlib.util.find_spec("triton") is None:
            raise BackendError("triton is not installed here (there is one for Linux)")
        if wanted:
            os.environ[_SWITCH] = "1"
    if _interprets() != wanted or (not wanted and os.environ.get(_SWITCH) == "1"):
        now = "compiles for a GPU" if wanted else f"interprets on the CPU ({_SWITCH}=1)"
        raise BackendError(
            f"triton {now} in this process, which cannot change once it is imported; "
            f"device {device_type} needs a new process"
        )
    if wanted:
        os.environ[_SWITCH] = "1"  # read again when a kernel is decorated


def _interprets() -> bool:
    """How triton's own library of kernels was made when it was imported."""
    import triton
    import triton.language as tl

    return not isinstance(tl.sum, triton.runtime.JITFunction)
