"""A drafter's config.json, with the field names of the public checkpoints, validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpolicy.errors import UserError
from kvpolicy.geometry.hf_config import positive, whole

METHODS = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
}
"""``architectures`` of a checkpoint -> method."""

# Fields that public checkpoints keep in this object, and some at the top.
NESTED = "dflash_config"


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Dimensions and rules of one drafter.

    taps: target layers whose outputs it reads. block: rows fed, B. shift: row j predicts position
    anchor + j + 1 (DSpark), so K = B; else row j stands for position anchor + j, row 0 for the anchor
    itself, and K = B - 1. window: W, a row at p sees committed positions j with p - j < W. causal: whether
    a row of the block sees those before it only. conv_taps, conv_group, rank, candidates: of DFlash2's
    convolution and selector. rank: also of DSpark's Markov head, 0 for none. confidence: whether it has a
    confidence head. calibration: temperatures of its logits per token, for greedy and sampled requests.
    """

    method: str
    hidden: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    taps: tuple[int, ...]
    block: int
    window: int
    max_positions: int
    mask_token: int
    shift: bool = False
    causal: bool = False
    eps: float = 1e-6
    theta: float = 10_000.0
    rank: int = 0
    conv_taps: int = 2
    conv_group: int = 16
    candidates: int = 16
    confidence: bool = False
    calibration: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """K, the tokens proposed at once."""
        return self.block if self.shift else self.block - 1

    @property
    def layer_width(self) -> int:
        """Numbers of one context token in one draft layer: keys, then values."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def ring_width(self) -> int:
        """Numbers kept per committed token."""
        return self.layers * self.layer_width

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> DrafterConfig:
        """UserError naming the field where the drafter is not one that this runtime computes."""
        method = _method(config)
        found = {**config, **_nested(config)}
        _refuse(found)
        shift = _flag(found, "sample_from_anchor", method == "dspark")
        own = DrafterConfig(
            method=method,
            hidden=whole(found, "hidden_size"),
            vocab=whole(found, "vocab_size"),
            layers=whole(found, "num_hidden_layers"),
            heads=whole(found, "num_attention_heads"),
            kv_heads=whole(found, "num_key_value_heads"),
            head_dim=whole(found, "head_dim"),
            mlp=whole(found, "intermediate_size"),
            taps=_taps(found),
            block=whole(found, "block_size", least=1 if shift else 2),
            window=whole(found, "sliding_window"),
            max_positions=whole(found, "max_position_embeddings"),
            mask_token=whole(found, "mask_token_id", least=0),
            shift=shift,
            causal=_flag(found, "is_causal", False),
            eps=positive({"rms_norm_eps": 1e-6, **found}, "rms_norm_eps"),
            theta=positive({"rope_theta": 10_000.0, **found}, "rope_theta"),
            rank=_rank(found, method),
            conv_taps=whole(found, "conv_kernel_size", default=2),
            conv_group=whole(found, "conv_group_size", default=16),
            candidates=whole(found, "selector_top_k", default=16),
            confidence=method == "dspark" and _flag(found, "enable_confidence_head", True),
            calibration=_calibration(found),
        )
        own.check()
        return own

    def check(self) -> None:
        """UserError where two fields do not fit together."""
        problems = {
            "num_attention_heads": (
                self.heads % self.kv_heads,
                f"{self.heads} is no multiple of num_key_value_heads = {self.kv_heads}",
            ),
            "head_dim": (self.head_dim % 2, f"{self.head_dim} must be even"),
            "mask_token_id": (
                self.mask_token >= self.vocab,
                f"{self.mask_token} must be below vocab_size = {self.vocab}",
            ),
            "sliding_window": (
                self.window < self.block,
                f"{self.window} must be at least block_size = {self.block}",
            ),
            "sample_from_anchor": (
                self.shift and self.method == "dflash2",
                "true: DFlash2 fills in, its row 0 is the anchor",
            ),
            "conv_group_size": (
                self.method == "dflash2" and self.hidden % self.conv_group,
                f"{self.conv_group} must divide hidden_size = {self.hidden}",
            ),
            "selector_top_k": (
                self.method == "dflash2" and self.candidates > self.vocab,
                f"{self.candidates} must be at most vocab_size = {self.vocab}",
            ),
            "confidence_temperatures": (
                any(len(values) != self.tokens for values in self.calibration.values()),
                f"needs {self.tokens} numbers each, one per proposed token",
            ),
        }
        for name, (wrong, text) in problems.items():
            if wrong:
                raise UserError(f"config field {name}: {text}")

    def to_json(self) -> dict[str, Any]:
        """The object that :meth:`from_json` reads."""
        own: dict[str, Any] = {
            "architectures": [next(a for a, m in METHODS.items() if m == self.method)],
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "vocab_size": self.vocab,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp,
            "block_size": self.block,
            "sliding_window": self.window,
            "layer_types": ["sliding_attention"] * self.layers,
            "is_causal": self.causal,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "hidden_act": "silu",
            "attention_bias": False,
            "sample_from_anchor": self.shift,
            NESTED: {"mask_token_id": self.mask_token, "target_layer_ids": list(self.taps)},
            "dtype": "bfloat16",
        }
        if self.method == "dflash2":
            own[NESTED] |= {
                "conv_kernel_size": self.conv_taps,
                "conv_group_size": self.conv_group,
                "selector_rank": self.rank,
                "selector_top_k": self.candidates,
            }
        if self.method == "dspark":
            own |= {
                "markov_rank": self.rank,
                "markov_head_type": "vanilla",
                "enable_confidence_head": self.confidence,
                "confidence_head_with_markov": True,
            }
        if self.calibration:
            own["confidence_temperatures"] = {k: list(v) for k, v in self.calibration.items()}
        return own


def _method(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or name not in METHODS:
        raise UserError(
            f"config field architectures is {names!r}: allowed one of {', '.join(METHODS)}"
        )
    return METHODS[name]


def _nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get(NESTED, {})
    if not isinstance(nested, Mapping):
        raise UserError(f"config field {NESTED} is {nested!r}: needs an object")
    return nested


def _refuse(found: Mapping[str, Any]) -> None:
    """What this runtime does not compute, named."""
    allowed: dict[str, object] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "markov_head_type": "vanilla",
        "confidence_head_with_markov": True,
        "attention_sink_bias": False,
        "output_multiplier": 1.0,
        "input_embedding_scale": 1.0,
        "final_logit_softcapping": None,
        "rope_scaling": None,
    }
    for key, only in allowed.items():
        value = found.get(key, only)
        if value is not None and value != only:
            raise UserError(f"config field {key} is {value!r}: this runtime computes {only!r} only")


def _flag(found: Mapping[str, Any], key: str, default: bool) -> bool:
    value = found.get(key, default)
    if not isinstance(value, bool):
        raise UserError(f"config field {key} is {value!r}: must be true or false")
    return value


def _taps(found: Mapping[str, Any]) -> tuple[int, ...]:
    taps = found.get("target_layer_ids")
    whole_numbers = isinstance(taps, list) and all(
        isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in taps
    )
    if not isinstance(taps, list) or not taps or not whole_numbers or taps != sorted(set(taps)):
        raise UserError(
            f"config field target_layer_ids is {taps!r}: needs layer numbers, ascending, at least one"
        )
    return tuple(taps)


def _rank(found: Mapping[str, Any], method: str) -> int:
    if method == "dflash2":
        return whole(found, "selector_rank")
    return whole(found, "markov_rank", least=0) if method == "dspark" else 0


def _calibration(found: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    given = found.get("confidence_temperatures", {})
    if not isinstance(given, Mapping) or not set(given) <= {"greedy", "sampled"}:
        raise UserError(
            f"config field confidence_temperatures is {given!r}: needs an object of lists, allowed "
            "keys greedy and sampled"
        )
    numbers: dict[str, tuple[float, ...]] = {}
    for name, values in given.items():
        if not isinstance(values, list):
            raise UserError(
                f"config field confidence_temperatures.{name} is {values!r}: needs a list"
            )
        label = f"confidence_temperatures.{name}"
        numbers[name] = tuple(positive({"value": v}, "value", label) for v in values)
    return numbers


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """The public checkpoints' rule: from layer 1 to layer L - 3, evenly. layers: L, of the target."""
    if count == 1:
        return (layers // 2,)
    return tuple(sorted({round(1 + i * (layers - 4) / (count - 1)) for i in range(count)}))
