"""What the three drafters have in common besides the body: the members that the engine reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from kvpolicy.speculative.drafters.body import Body, DraftTarget, Weights
from kvpolicy.speculative.drafters.config import DrafterConfig
from kvpolicy.speculative.drawing import RowSampling
from kvpolicy.speculative.proposal import Proposal


class Blockwise(ABC):
    """A ``kvpolicy.speculative.drafter.Drafter`` over one body. weights: tensors of ``shapes``, matrices
    in the dtype of the target's kernels, vectors in float32."""

    method: ClassVar[str]
    capturable = True

    def __init__(self, config: DrafterConfig, weights: Weights, target: DraftTarget) -> None:
        assert config.method == self.method
        self.config = config
        self.body = Body(config, weights, target)

    @staticmethod
    @abstractmethod
    def shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
        """Its tensors in a checkpoint, with their shapes."""

    @property
    def name(self) -> str:
        return self.method

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def window(self) -> int:
        return self.config.window

    @property
    def ring_width(self) -> int:
        return self.config.ring_width

    @property
    def tokens(self) -> int:
        return self.config.tokens

    def context(self, taps: Tensor, positions: Tensor) -> Tensor:
        """See ``Drafter.context``."""
        return self.body.context(taps, positions)

    @abstractmethod
    def propose(
        self,
        anchors: Tensor,
        positions: Tensor,
        context: Tensor,
        context_positions: Tensor,
        sampling: RowSampling,
        coupled: bool,
    ) -> Proposal:
        """See ``Drafter.propose``."""
