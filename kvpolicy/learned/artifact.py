"""A learned policy as one file: a NumPy archive (``.npz``) of float arrays, and JSON that says what they are.

Nothing in it is code, and nothing that reads it can execute any: arrays are read with
``allow_pickle=False``, the JSON is checked field by field, sizes are checked before memory is taken.
docs/learning.md has the format. The SHA-256 finds damage; it does not say who made the file.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvpolicy.control.actions import Actions, make_actions
from kvpolicy.control.encoder import Encoder
from kvpolicy.errors import UserError, reason

__all__ = ["FORMAT", "MOST_BYTES", "Artifact", "Spec", "read_artifact", "write_artifact"]

Arrays = dict[str, NDArray[Any]]

FORMAT = 1
# Ours take 30 to 300 KiB; a file beyond this is none.
MOST_BYTES = 16 << 20
# As deep as anybody's policy network; each layer costs a decision 2 us.
MOST_LAYERS = 8
# The header of a .npy member: 80 to 128 bytes are usual.
MOST_HEADER = 4096

_SPEC = "spec"
_HINT = "models of stable-baselines3 go through 'kvpolicy export'"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ObservationSpec(_Strict):
    """As :meth:`Encoder.spec` gives it."""

    version: str = Field(max_length=40)
    groups: list[str] = Field(max_length=32)
    stores: int = Field(ge=0, le=1024)
    requests: int = Field(ge=0, le=1024)


class ActionSpec(_Strict):
    """As :meth:`Actions.spec` gives it."""

    name: str
    requests: int = Field(default=0, ge=0, le=1024)
    stores: int = Field(default=0, ge=0, le=1024)


class Spec(_Strict):
    """What the arrays are. env: id and arguments of the environment it was trained in. layers: of the
    network; activation: between them. head: how the last layer's numbers become an action, ``clip`` or
    ``tanh`` for a box, ``argmax`` for levels. clip: bound of normalised observations, None without
    normalisation. training: the record of how it was made. sha256: of all else."""

    format: int
    name: str = Field(min_length=1, max_length=100)
    algorithm: str = Field(max_length=40)
    env: dict[str, Any]
    observation: ObservationSpec
    action: ActionSpec
    layers: int = Field(ge=1, le=MOST_LAYERS)
    activation: Literal["tanh", "relu"]
    head: Literal["clip", "tanh", "argmax"]
    clip: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    training: dict[str, Any]
    sha256: str = ""


@dataclass(frozen=True)
class Artifact:
    """A checked policy. arrays: ``weight0`` float32 [out, in] and ``bias0`` [out] for each layer, and with
    normalisation ``mean`` and ``scale`` float64 [size]."""

    spec: Spec
    arrays: Arrays
    encoder: Encoder
    actions: Actions


def make_artifact(spec: Spec, arrays: Arrays) -> Artifact:
    """Check that arrays and spaces fit each other. UserError where they do not."""
    if spec.format != FORMAT:
        raise UserError(f"format {spec.format}: this kvpolicy reads format {FORMAT}")
    encoder = Encoder.from_spec(spec.observation.model_dump())
    actions = make_actions(**spec.action.model_dump())
    if (spec.head == "argmax") != (actions.kind != "box"):
        raise UserError(f"head {spec.head!r} does not go with action space {spec.action.name!r}")
    outputs = sum(knob.levels or 1 for knob in actions.knobs)
    wanted: dict[str, tuple[tuple[int | None, ...], str]] = {}
    for i in range(spec.layers):
        first, last = i == 0, i == spec.layers - 1
        rows, columns = outputs if last else None, encoder.size if first else None
        wanted[f"weight{i}"] = ((rows, columns), "float32")
        wanted[f"bias{i}"] = ((rows,), "float32")
    if spec.clip is not None:
        wanted["mean"] = wanted["scale"] = ((encoder.size,), "float64")
    if set(arrays) != set(wanted):
        raise UserError(f"arrays {sorted(arrays)}: must be {sorted(wanted)}")
    for name, (shape, dtype) in wanted.items():
        _check_array(name, arrays[name], shape, dtype)
    width: int = encoder.size
    for i in range(spec.layers):
        weight, bias = arrays[f"weight{i}"], arrays[f"bias{i}"]
        if weight.shape != (len(bias), width):
            raise UserError(f"weight{i} of shape {weight.shape}: must be {(len(bias), width)}")
        width = len(bias)
    if spec.clip is not None and not bool((arrays["scale"] > 0).all()):
        raise UserError("scale: must be above 0")
    return Artifact(spec, arrays, encoder, actions)


def _check_array(name: str, array: NDArray[Any], shape: tuple[int | None, ...], dtype: str) -> None:
    if array.dtype != np.dtype(dtype):
        raise UserError(f"{name} of dtype {array.dtype}: must be {dtype}")
    fits = array.ndim == len(shape) and all(
        n in (None, m) for n, m in zip(shape, array.shape, strict=True)
    )
    if not fits:
        text = ", ".join("any" if n is None else str(n) for n in shape)
        raise UserError(f"{name} of shape {array.shape}: must be ({text})")
    if not bool(np.isfinite(array).all()):
        raise UserError(f"{name}: holds numbers that are not finite")


def digest(spec: Spec, arrays: Arrays) -> str:
    """SHA-256 of the spec without its own field, and of every array's name, shape, dtype and bytes."""
    text = json.dumps(spec.model_dump(exclude={"sha256"}), sort_keys=True)
    found = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def write_artifact(spec: Spec, arrays: Arrays) -> tuple[bytes, Artifact]:
    """The file's bytes, equal for equal input, and what is in them. UserError for what does not fit."""
    spec = spec.model_copy(update={"sha256": digest(spec, arrays)})
    artifact = make_artifact(spec, arrays)
    text = json.dumps(spec.model_dump(), sort_keys=True, allow_nan=False).encode()
    members = {_SPEC: np.frombuffer(text, dtype=np.uint8), **arrays}
    out = io.BytesIO()
    # np.savez would stamp the time of day into the archive.
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(members):
            member = io.BytesIO()
            np.lib.format.write_array(member, members[name], allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy")
            archive.writestr(info, member.getvalue(), zipfile.ZIP_DEFLATED)
    if out.tell() > MOST_BYTES:
        raise UserError(f"artifact of {out.tell():,} bytes: at most {MOST_BYTES:,} are read")
    return out.getvalue(), artifact


def read_artifact(path: str | Path) -> Artifact:
    """A policy from a file. UserError, in one line, for a file that is none, is damaged, or does not fit
    this version; nothing in it is executed."""
    what = f"policy artifact {str(path)!r}"
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        cause = (isinstance(error, OSError) and error.strerror) or reason(error)
        raise UserError(f"{what}: {cause}") from None
    try:
        return _parse(content)
    except UserError as error:
        raise UserError(f"{what}: {error}") from None
    except Exception as error:  # a damaged archive fails in many ways
        raise UserError(f"{what}: damaged, or no artifact at all ({reason(error)})") from None


def _parse(content: bytes) -> Artifact:
    if len(content) > MOST_BYTES:
        raise UserError(f"more than {MOST_BYTES:,} bytes")
    if content[:2] != b"PK":
        raise UserError(f"not a NumPy archive (.npz); {_HINT}")
    members = _members(content)
    text = members.pop(_SPEC, None)
    if text is None:
        raise UserError(f"no member 'spec.npy'; {_HINT}")
    if text.dtype != np.uint8 or text.ndim != 1:
        raise UserError("spec: must be bytes")
    try:
        values = json.loads(text.tobytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"spec: {reason(error)}") from None
    # Before its fields: another version may have others.
    if isinstance(values, dict) and values.get("format") != FORMAT:
        raise UserError(f"format {values.get('format')!r}: this kvpolicy reads format {FORMAT}")
    try:
        spec = Spec.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise UserError(f"spec: {where}: {first['msg']}") from None
    found = digest(spec, members)
    if found != spec.sha256:
        raise UserError(f"sha256 is {found[:12]}..., the file says {spec.sha256[:12]!r}: damaged")
    return make_artifact(spec, members)


def _members(content: bytes) -> Arrays:
    """Every array, after its claimed size was checked."""
    found: Arrays = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        infos = archive.infolist()
        if sum(info.file_size for info in infos) > MOST_BYTES:
            raise UserError(f"its members unpack to more than {MOST_BYTES:,} bytes")
        for info in infos:
            name, dot, ending = info.filename.rpartition(".")
            if ending != "npy" or not dot or not name.isalnum() or name in found:
                raise UserError(f"member {info.filename[:60]!r}: not one of an artifact; {_HINT}")
            with archive.open(info) as member:
                # Bounded by what the archive claims: zipfile reads no byte beyond it.
                found[name] = np.lib.format.read_array(
                    io.BytesIO(member.read()), allow_pickle=False, max_header_size=MOST_HEADER
                )
    return found
