"""What a user may set, validated: every wrong key or value is one clear line (UserError)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
    field_serializer,
    field_validator,
)

from kvpolicy import evictions
from kvpolicy.errors import UserError, unknown_name
from kvpolicy.memory.rule import Admission, Eviction
from kvpolicy.yaml_values import read_yaml

if TYPE_CHECKING:
    from kvpolicy.controllers.registry import ControllerLike
else:
    ControllerLike = (
        Any  # controllers need numpy: 0.1 s of the 0.2 s that `kvpolicy --version` takes
    )

_Model = TypeVar("_Model", bound="Settings")


class Settings(BaseModel):
    """Base of every settings record: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    def __init__(self, **values: Any) -> None:
        for name, field in type(self).model_fields.items():
            key = field.alias or name
            if field.annotation is not bool and isinstance(values.get(key), bool):
                raise UserError(f"{key} = {values[key]!r}: should not be true or false")
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _user_error(type(self), values, error) from None


class SamplingParams(Settings):
    """How the tokens of one request are chosen.

    temperature 0 is greedy (ties to the lowest id). top_k 0 and top_p 1 are off. seed: the noise of
    a token depends on (seed, position) only. stop: generation ends where one of these texts
    appears; it is not part of the output. deadline_ms: the request is cancelled when it is not done
    this long after it came (milliseconds of the engine's clock), waiting included.
    """

    max_new_tokens: int = Field(default=64, ge=1, le=1_000_000)
    temperature: float = Field(default=0.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    seed: int = Field(default=0, ge=0, lt=2**63)
    stop: tuple[str | bytes, ...] = ()
    deadline_ms: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)

    def stop_bytes(self) -> tuple[bytes, ...]:
        """The stop texts as bytes, empty ones left out."""
        try:
            raw = [s.encode() if isinstance(s, str) else s for s in self.stop]
        except UnicodeEncodeError as error:
            raise UserError(f"stop = {error.object!r}: is not valid text") from None
        return tuple(s for s in raw if s)


class EngineConfig(Settings):
    """One engine. Sizes in MiB are named so; rows are per request and layer.

    model: an embedded model's name, or a checkpoint folder; with dummy_weights a preset, of which
    ``layers`` (None: all) get random weights, with ``vocab`` tokens (None: the layers' share).
    selection: with dummy_weights, where selections come from (the indexer works all the same): ``model``,
    ``process[:seed=N]``, or ``RECORDING:context=N``. dtype: of weights and activations; kv_dtype: of the
    rows and index keys kept. backend: the kernels; ``auto`` is triton on a GPU where it can run, else
    the reference; triton on the CPU is its interpreter, for tests.
    controller: NAME or PATH.py:NAME, with :key=value,... behind it; in Python also an object with
    ``decide`` or a function of an observation. controller_isolation: ``auto`` asks a controller that a
    spec names in a file or plug-in in a process of its own, where decisions have a deadline; ``thread``
    asks every controller in a thread of the engine's process.
    eviction, admission: None leaves the choice to the controller. drafter: who proposes tokens that the
    next step verifies, a name (``kvpolicy list``) or in Python an object; num_draft_tokens: at most so
    many per request and step (None: the drafter's own); verification: ``standard`` and ``block`` keep the
    law of sampled tokens, ``coupled`` the very tokens that come without a drafter; verify_length:
    ``scheduled`` verifies as many proposed tokens as pay for their rows and fetches.
    device_kv_mib: device memory for KV of all kinds (rows, index keys, maps, staging, in-flight).
    host_kv_mib: host memory for the history. staging_rows: transient rows shared by all requests
    (None: what max_concurrency requests can select at once; with a drafter as many times as they have rows,
    up to a quarter of the device memory). floor_rows: hot rows per request and
    layer that no controller can take. prefill_chunk: prompt rows computed in one step.
    control_interval: steps between two decisions. decision_deadline_ms: what one may take before the
    fallback controller decides (0: no deadline; none either where steps are the clock). decision_log:
    a file that every decision is appended to, as one JSON object a line. clock: ``wall``, or
    ``steps``: latencies counted in engine steps (one counts as 1 ms), the same in every run. bos:
    put the beginning-of-sequence token first. cuda_graphs: steps of plain decoding run as CUDA graphs
    where device and backend can; off, the same calls one by one. validate: check_integrity() after
    every step (YAML and keyword name ``validate``).
    """

    model_config = ConfigDict(populate_by_name=True)

    model: str = "tiny-dsa"
    dummy_weights: bool = False
    layers: int | None = Field(default=None, ge=1)
    vocab: int | None = Field(default=None, ge=1)
    selection: str = "model"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "reference", "triton"] = "auto"
    controller: SkipValidation[ControllerLike] = "hisparse"
    controller_isolation: Literal["auto", "thread"] = "auto"
    eviction: Eviction | None = None
    admission: Admission | None = None
    drafter: SkipValidation[Any] = "none"
    num_draft_tokens: int | None = Field(default=None, ge=1, le=64)
    verification: Literal["standard", "block", "coupled"] = "standard"
    verify_length: Literal["full", "scheduled"] = "full"
    device_kv_mib: float = Field(default=64.0, gt=0, le=1 << 20, allow_inf_nan=False)
    host_kv_mib: float = Field(default=512.0, gt=0, le=1 << 24, allow_inf_nan=False)
    staging_rows: int | None = Field(default=None, ge=1)
    floor_rows: int = Field(default=0, ge=0)
    max_concurrency: int = Field(default=16, ge=1, le=4096)
    prefill_chunk: int = Field(default=64, ge=1, le=65536)
    control_interval: int = Field(default=8, ge=1)
    decision_deadline_ms: float = Field(default=5.0, ge=0, le=1e6, allow_inf_nan=False)
    decision_log: str | None = None
    clock: Literal["wall", "steps"] = "wall"
    dtype: Literal["float32", "bfloat16"] = "float32"
    kv_dtype: Literal["float32", "bf16", "fp8"] = "float32"
    bos: bool = False
    cuda_graphs: bool = True
    validate_: bool = Field(default=False, alias="validate")

    @field_validator("controller", mode="plain")
    @classmethod
    def _controller(cls, value: Any) -> Any:
        """A spec is looked up when an engine is made; an object must be one that decides."""
        if not isinstance(value, str):
            from kvpolicy.controllers.targets import as_controller

            try:
                as_controller(value)
            except UserError:
                raise ValueError(
                    "should be a spec, an object with decide(), or a function of an observation"
                ) from None
        return value

    @field_serializer("controller")
    def _controller_name(self, value: Any) -> str:
        """Records name an object by its class, a function by its own name."""
        if isinstance(value, str):
            return value
        from kvpolicy.controllers.targets import name_of

        return name_of(value)

    @field_validator("drafter", mode="plain")
    @classmethod
    def _drafter(cls, value: Any) -> Any:
        """A name is looked up when an engine is made; an object must be one that proposes."""
        if not isinstance(value, str) and not callable(getattr(value, "propose", None)):
            raise ValueError("should be a name or an object with propose()")
        return value

    @field_serializer("drafter")
    def _drafter_name(self, value: Any) -> str:
        return (
            value if isinstance(value, str) else str(getattr(value, "name", type(value).__name__))
        )

    @field_validator("eviction")
    @classmethod
    def _eviction(cls, value: Eviction | None) -> Eviction | None:
        if value is not None:
            try:
                evictions.check(value)
            except UserError as error:
                raise ValueError(str(error)) from None
        return value


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, or UserError naming the file."""
    what = f"config {str(path)!r}"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{what} is not UTF-8 text") from None
    content = read_yaml(text, what)
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"{what}: must be a mapping of option names to values")
    return content


def parse_override(text: str) -> tuple[str, Any]:
    """``KEY=VALUE`` of the command line; the value is read as YAML."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise UserError(f"--set {text!r}: must be KEY=VALUE")
    return key.strip().replace("-", "_"), read_yaml(value, f"--set {text!r}: the value")


def _field_names(kind: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in kind.model_fields.items()]


def _user_error(
    kind: type[BaseModel], values: Mapping[str, Any], error: ValidationError
) -> UserError:
    """The first complaint of pydantic as one line: field, value, what is allowed."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else kind.__name__
    if first["type"] == "extra_forbidden":
        return unknown_name("option", name, _field_names(kind))
    message = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return UserError(f"{name} = {values.get(name)!r}: {message}")
