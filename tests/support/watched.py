"""What a captured step must not do, noticed on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that read a number of the device, or whose shapes depend on one.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.default")


class Watched(TorchDispatchMode):
    """Fails where a captured step would."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert not any(word in str(func) for word in WAITS), func
        if "index" in str(func):  # a mask as an index makes a shape of its own
            flat = torch.utils._pytree.tree_leaves(args[1:2])
            assert not any(isinstance(x, Tensor) and x.dtype == torch.bool for x in flat), func
        return func(*args, **(kwargs or {}))
