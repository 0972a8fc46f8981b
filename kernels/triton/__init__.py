"""Triton forms of the compute kernels; the plain-torch truth of each lies one folder up.

Nothing here is imported before ``kvpolicy.kernels.backend.prepare_triton`` has said how triton runs
in this process: compiled for a GPU, or interpreted on the CPU.

One rule keeps a row's bits apart from its neighbours: a kernel is compiled once per call site. Sizes
that change from step to step are not specialised, and a pointer that may lose its alignment is
realigned (``launch.aligned``), so a row always runs through the same instructions, in the same
order, whatever stands beside it.
"""

import os

from ..interpreted import fix_dots

if os.environ.get("TRITON_INTERPRET") == "1":
    fix_dots()
