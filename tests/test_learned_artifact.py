"""Policy artifacts: what is written is read, and nothing else; reading executes nothing."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.control.actions import make_actions
from kvpolicy.control.encoder import Encoder
from kvpolicy.controllers import make
from kvpolicy.errors import UserError
from kvpolicy.learned import artifact as module
from kvpolicy.learned.artifact import FORMAT, Spec, digest, read_artifact, write_artifact
from kvpolicy.learned.controller import shipped

Arrays = dict[str, Any]


def policy(action: str = "global", hidden: int = 8, **changes: Any) -> tuple[Spec, Arrays]:
    """A random policy of two layers, with normalisation."""
    encoder, actions = Encoder(), make_actions(action, 2, 3)
    outputs = sum(knob.levels or 1 for knob in actions.knobs)
    draw = np.random.default_rng(0)
    arrays: Arrays = {}
    for i, (rows, columns) in enumerate(((hidden, encoder.size), (outputs, hidden))):
        arrays[f"weight{i}"] = draw.normal(size=(rows, columns)).astype(np.float32)
        arrays[f"bias{i}"] = draw.normal(size=rows).astype(np.float32)
    arrays["mean"], arrays["scale"] = draw.random(encoder.size), draw.random(encoder.size) + 0.1
    values: dict[str, Any] = {
        "format": FORMAT,
        "name": "test",
        "algorithm": "ppo",
        "env": {"id": "kvpolicy/ResidencyReplay-v0"},
        "observation": encoder.spec(),
        "action": actions.spec(),
        "layers": 2,
        "activation": "tanh",
        "head": "clip" if actions.kind == "box" else "argmax",
        "clip": 10.0,
        "training": {"seed": 0},
    }
    return Spec.model_validate({**values, **changes}), arrays


def file_of(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def npy(array: Any, allow_pickle: bool = False) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=allow_pickle)
    return out.getvalue()


def members_of(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def refused(tmp_path: Path, content: bytes) -> str:
    """The message for a file with this content: one line that names it."""
    path = tmp_path / "policy.npz"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_artifact(path)
    with pytest.raises(UserError):
        make(f"learned:path={path}")
    text = str(error.value)
    assert "\n" not in text and str(path) in text and len(text) < 600
    return text


def signed(spec: Spec, arrays: Arrays, **changes: Any) -> bytes:
    """A file whose hash is right, whatever else is in it."""
    made = spec.model_copy(update=changes)
    made = made.model_copy(update={"sha256": digest(made, arrays)})
    text = np.frombuffer(json.dumps(made.model_dump()).encode(), dtype=np.uint8)
    return file_of({f"{k}.npy": npy(v) for k, v in {"spec": text, **arrays}.items()})


@pytest.mark.parametrize("action", ["global", "discrete", "per_store", "per_request_levels"])
def test_what_is_written_is_read(action: str, tmp_path: Path) -> None:
    spec, arrays = policy(action)
    content, artifact = write_artifact(spec, arrays)
    assert content == write_artifact(spec, arrays)[0]
    (tmp_path / "p.npz").write_bytes(content)
    again = read_artifact(tmp_path / "p.npz")
    assert again.spec == artifact.spec and len(again.spec.sha256) == 64
    assert set(again.arrays) == set(arrays)
    for name, array in arrays.items():
        assert (again.arrays[name] == array).all() and again.arrays[name].dtype == array.dtype


def test_every_changed_or_missing_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    """Damage is found; a byte that carries nothing (a time stamp) may change."""
    content, artifact = write_artifact(*policy(hidden=2))
    path = tmp_path / "p.npz"
    for at in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[at] ^= 0x55
        path.write_bytes(damaged)
        try:
            again = read_artifact(path)
        except UserError:
            continue
        assert again.spec == artifact.spec
        assert all((again.arrays[n] == a).all() for n, a in artifact.arrays.items())
    for length in range(0, len(content), 97):
        refused(tmp_path, content[:length])


@given(content=st.binary(max_size=400))
def test_noise_is_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("noise") / "p.npz"
    path.write_bytes(content)
    with pytest.raises(UserError):
        read_artifact(path)


class Bomb:
    """Says so when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch executed",)


def test_nothing_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec, arrays = policy()
    members = members_of(write_artifact(spec, arrays)[0])
    objects = np.array([Bomb()], dtype=object)
    pickled = npy(objects, allow_pickle=True)
    files = [
        pickle.dumps(Bomb()),
        pickled,
        file_of({**members, "weight0.npy": pickled}),
        file_of({**members, "spec.npy": pickled}),
        file_of({**members, "extra.npy": pickled}),
        file_of({**members, "data.pkl": pickle.dumps(Bomb())}),
        file_of({**members, "../../evil.npy": npy(np.zeros(1))}),
        file_of({"weight0.npy": pickle.dumps(Bomb())}),
    ]
    for content in files:
        refused(tmp_path, content)
    assert sorted(os.listdir(tmp_path)) == ["policy.npz"]


def test_members_that_unpack_to_too_much_are_not_unpacked(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weight0.npy", bytes(module.MOST_BYTES + 1))
    assert "unpack to more" in refused(tmp_path, out.getvalue())
    # A header that claims what the member has not.
    huge = npy(np.zeros(4, dtype=np.float32)).replace(b"(4,)", b"(4000000000000,)"[:4])
    header = npy(np.zeros((4,), dtype=np.float32))
    huge = header.replace(b"'shape': (4,), }           ", b"'shape': (4000000000,), }  ")
    assert huge != header
    members = members_of(write_artifact(*policy())[0])
    refused(tmp_path, file_of({**members, "bias0.npy": huge}))


def test_spaces_versions_and_shapes_must_fit(tmp_path: Path) -> None:
    spec, arrays = policy()
    other = spec.observation.model_copy(update={"version": "99"})
    assert "version '99'" in refused(tmp_path, signed(spec, arrays, observation=other))
    assert "format 7" in refused(tmp_path, signed(spec, arrays, format=7))
    few = spec.observation.model_copy(update={"groups": ["load"]})
    assert "weight0 of shape" in refused(tmp_path, signed(spec, arrays, observation=few))
    wrong = spec.observation.model_copy(update={"groups": ["lod"]})
    assert "did you mean 'load'" in refused(tmp_path, signed(spec, arrays, observation=wrong))
    action = spec.action.model_copy(update={"name": "per_store", "stores": 5})
    assert "weight1 of shape" in refused(tmp_path, signed(spec, arrays, action=action))
    assert "does not go with" in refused(tmp_path, signed(spec, arrays, head="argmax"))
    for name, array, message in (
        ("weight0", arrays["weight0"][:, :-1], "weight0 of shape"),
        ("weight0", arrays["weight0"].astype(np.float64), "weight0 of dtype"),
        ("bias1", np.full_like(arrays["bias1"], np.nan), "not finite"),
        ("bias0", arrays["bias0"][:-1], "weight0 of shape"),
        ("scale", np.zeros_like(arrays["scale"]), "above 0"),
        ("weight7", arrays["weight0"], "must be"),
    ):
        assert message in refused(tmp_path, signed(spec, {**arrays, name: array}))
    short = {name: array for name, array in arrays.items() if name != "mean"}
    assert "must be" in refused(tmp_path, signed(spec, short))


def test_the_hash_covers_the_spec(tmp_path: Path) -> None:
    spec, arrays = policy()
    members = members_of(write_artifact(spec, arrays)[0])
    text = bytes(np.load(io.BytesIO(members["spec.npy"])))
    members["spec.npy"] = npy(np.frombuffer(text.replace(b'"tanh"', b'"relu"'), dtype=np.uint8))
    assert "damaged" in refused(tmp_path, file_of(members))


def test_unknown_fields_are_refused(tmp_path: Path) -> None:
    spec, arrays = policy()
    values = {**spec.model_dump(), "hook": "os.system"}
    text = np.frombuffer(json.dumps(values).encode(), dtype=np.uint8)
    content = file_of({f"{k}.npy": npy(v) for k, v in {"spec": text, **arrays}.items()})
    assert "hook" in refused(tmp_path, content)


def test_files_that_are_not_there_or_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        make(f"learned:path={tmp_path / 'none.npz'}")
    with pytest.raises(UserError, match="directory"):
        make(f"learned:path={tmp_path}")
    with pytest.raises(UserError, match="must be the name of a file"):
        make("learned:path=3")
    assert "kvpolicy export" in refused(tmp_path, file_of({"data": b"{}", "policy.pth": b""}))


def test_the_shipped_artifact_is_small_and_says_how_it_was_made() -> None:
    artifact = read_artifact(shipped())
    assert shipped().stat().st_size <= 1 << 20
    training = artifact.spec.training
    assert training["settings"]["env_kwargs"]["scenario"] and training["steps"] > 0
    assert training["commit"] and "validation_reward" in training


def test_deciding_loads_neither_gymnasium_nor_torch(tmp_path: Path) -> None:
    """In a fresh interpreter in which importing any of them fails."""
    code = """
import sys
for name in ("gymnasium", "stable_baselines3", "torch", "tensorboard"):
    sys.modules[name] = None
from kvpolicy.learned.artifact import read_artifact
from kvpolicy.learned.controller import shipped
from kvpolicy.learned.network import Network
import numpy as np
artifact = read_artifact(shipped())
print(Network(artifact)(np.zeros(artifact.encoder.size, dtype=np.float32)).shape)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(3,)"
