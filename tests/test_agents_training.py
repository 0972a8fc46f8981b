"""Training on the fast twin: repeatable, resumable, exported exactly, settings checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

import kvpolicy.env
from kvpolicy.agents.exporting import export
from kvpolicy.agents.models import read_model
from kvpolicy.agents.settings import Settings, override, read_settings, settings_of
from kvpolicy.agents.training import Trained, last_model, train
from kvpolicy.cli.main import app
from kvpolicy.errors import UserError
from kvpolicy.learned.network import Network

REPLAY = kvpolicy.env.REPLAY
CONFIGS = sorted((Path(__file__).resolve().parents[1] / "agents" / "configs").glob("*.yaml"))

OF_ALGORITHM: dict[str, dict[str, Any]] = {
    "ppo": {"n_steps": 32, "batch_size": 64, "n_epochs": 2, "learning_rate": "lin_0.001"},
    "a2c": {"n_steps": 8},
    "sac": {"learning_starts": 64, "batch_size": 32, "buffer_size": 1000, "train_freq": 16},
    "dqn": {"learning_starts": 64, "batch_size": 32, "buffer_size": 1000, "train_freq": 16},
}


def tiny(algo: str = "ppo", **changes: Any) -> Settings:
    """A training of a second: 256 decisions, episodes cut after 16."""
    values: dict[str, Any] = {
        "n_envs": 4,
        "n_timesteps": 256,
        "normalize": True,
        "env_kwargs": {
            "scenario": "load-step",
            "fidelity": "curves",
            "max_steps": 16,
            "action": "discrete" if algo == "dqn" else "global",
        },
        "policy_kwargs": {"net_arch": [8, 8], "activation_fn": "relu" if algo == "sac" else "tanh"},
        "eval_every": 128,
        "eval_episodes": 2,
        "checkpoint_every": 128,
        **OF_ALGORITHM[algo],
    }
    return settings_of({**values, **changes}, algo, REPLAY)


def weights(trained: Trained) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = trained.model.policy.state_dict()
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Trained]]:
    """One training of each algorithm, made when it is asked for."""
    made: dict[str, tuple[Path, Trained]] = {}

    def get(algo: str) -> tuple[Path, Trained]:
        if algo not in made:
            folder = tmp_path_factory.mktemp(algo)
            made[algo] = folder, train(tiny(algo), folder, seed=3)
        return made[algo]

    return get


Run = Callable[[str], tuple[Path, Trained]]


def test_equal_seeds_give_equal_weights(run: Run, tmp_path: Path) -> None:
    first = run("ppo")[1]
    again = train(tiny(), tmp_path / "again", seed=3, tensorboard=False)
    other = train(tiny(), tmp_path / "other", seed=4, tensorboard=False)
    assert first.curve == again.curve and len(first.curve) >= 2
    for name, tensor in weights(first).items():
        assert torch.equal(tensor, weights(again)[name]), name
    assert any(not torch.equal(t, weights(other)[n]) for n, t in weights(first).items())


@pytest.mark.parametrize("algo", OF_ALGORITHM)
def test_the_artifact_decides_as_the_model_does(algo: str, run: Run) -> None:
    """Its deterministic action to 1e-5, on observations of every kind."""
    folder, trained = run(algo)
    content, artifact = export(folder / "last.zip", algo)
    assert artifact.spec.clip is not None and len(content) < 1 << 20
    network = Network(artifact)
    normalize = trained.model.get_vec_normalize_env()
    draw = np.random.default_rng(0)
    observations = draw.random((64, artifact.encoder.size), dtype=np.float32)
    observations[:4] = np.array([0.0, 1.0, 0.5, 1e-6])[:, None]
    spread = set()
    for observation in observations:
        seen = normalize.normalize_obs(observation)
        wanted, _ = trained.model.predict(seen, deterministic=True)
        found = network(observation)
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)
        spread.add(np.asarray(found).tobytes())
    assert len(spread) > 1


def test_a_resumed_training_goes_on(run: Run, tmp_path: Path) -> None:
    folder, trained = run("ppo")
    saved = last_model(folder)
    assert int(saved.about["steps"]) == 256
    for name, tensor in weights(trained).items():
        assert torch.equal(saved.parameters["policy"][name], tensor), name
    settings = override(saved.settings, {"n_timesteps": 384})
    went = train(settings, tmp_path, seed=3, resume=saved, tensorboard=False)
    assert went.model.num_timesteps == 384
    steps = went.model.policy.optimizer.state_dict()["state"][0]["step"]
    before = trained.model.policy.optimizer.state_dict()["state"][0]["step"]
    assert steps > before
    with pytest.raises(UserError, match="has 256 already"):
        train(tiny(), tmp_path, seed=3, resume=saved, tensorboard=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "4"], "--seed 4: the training was begun with 3"),
        (["--set", "gamma=0.5"], "gamma = 0.5: the training was begun with None"),
        (["--set", "env_kwargs.scenario=burst"], "env_kwargs = "),
        (["--config", str(CONFIGS[0])], "the training was begun with"),
        (["--seed", "3", "--set", "n_timesteps=256"], "has 256 already"),
        ([], "has 256 already"),  # as long as it was begun, not as the quick recipe is
    ],
)
def test_a_resumed_training_is_not_changed(options: list[str], message: str, run: Run) -> None:
    folder, _ = run("ppo")
    result = CliRunner().invoke(app, ["train", "--resume", "--output", str(folder), *options])
    assert result.exit_code == 2 and message in result.stderr


def test_a_name_that_is_too_long_is_one_clear_line(run: Run) -> None:
    folder, _ = run("ppo")
    with pytest.raises(UserError, match=r"name = 'n{101}': String should have at most 100"):
        export(folder / "last.zip", "n" * 101)


def test_what_a_run_folder_holds(run: Run) -> None:
    folder, trained = run("ppo")
    assert {"best.zip", "best.json", "best.npz", "last.zip", "step-128.zip"} <= {
        file.name for file in folder.iterdir()
    }
    about = json.loads((folder / "best.json").read_text())
    assert about["seed"] == 3 and about["reward"] == max(r for _, r in trained.curve)
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"eval/mean_reward", "rollout/ep_rew_mean", "train/value_loss"} <= tags
    assert {"policy/retained_mean", "policy/reserve_std", "policy/at_bound"} <= tags


def test_reading_a_model_executes_nothing(run: Run, tmp_path: Path) -> None:
    """SB3's pickled members are never unpickled: a model in which they are broken is read all the same."""
    import zipfile

    folder, _ = run("ppo")
    for ending in ("json", "npz"):
        (tmp_path / f"m.{ending}").write_bytes((folder / f"best.{ending}").read_bytes())
    with (
        zipfile.ZipFile(folder / "best.zip") as old,
        zipfile.ZipFile(tmp_path / "m.zip", "w") as new,
    ):
        for name in old.namelist():
            new.writestr(name, b"not even JSON" if name == "data" else old.read(name))
    assert read_model(tmp_path / "m.zip").parameters["policy"]
    (tmp_path / "m.zip").write_bytes(b"nothing")
    with pytest.raises(UserError, match="model"):
        read_model(tmp_path / "m.zip")
    with pytest.raises(UserError, match="No such file"):
        read_model(tmp_path / "none.zip")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_env": 4}, "did you mean 'n_envs'"),
        ({"n_epoch": 4}, "did you mean 'n_epochs'"),
        ({"n_envs": 0}, "at least 1"),
        ({"n_timesteps": 1.5}, "whole number"),
        ({"normalize": "yes"}, "true or false"),
        ({"policy": "CnnPolicy"}, "allowed: MlpPolicy"),
        ({"policy_kwargs": {"net_arh": []}}, "did you mean 'net_arch'"),
        ({"policy_kwargs": {"activation_fn": "gelu"}}, "allowed: tanh, relu"),
        ({"policy_kwargs": "dict(net_arch=[64])"}, "must be a mapping"),
        ({"env_kwargs": {"scenaro": "burst"}}, "did you mean 'scenario'"),
        ({"learning_rate": "lin_fast"}, "lin_NUMBER"),
        ({"learning_rate": True}, "lin_NUMBER"),
    ],
)
def test_wrong_settings_are_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny(**changes)


def test_actions_that_an_algorithm_has_not(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="dqn with"):
        settings = override(tiny("dqn"), {"env_kwargs.action": "global"})
        train(settings, tmp_path, tensorboard=False)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_settings_are_right(path: Path) -> None:
    algo = next((a for a in OF_ALGORITHM if path.stem.startswith(a)), "ppo")
    settings = read_settings(path, algo, REPLAY)
    assert (
        settings_of(
            {k: v for k, v in settings.to_dict().items() if k not in ("algo", "env")}, algo, REPLAY
        )
        == settings
    )


def test_files_name_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("default: {n_envz: 3}\n")
    with pytest.raises(UserError, match=r"c\.yaml.*did you mean 'n_envs'"):
        read_settings(path, "ppo", REPLAY)
    path.write_text("kvpolicy/ResidencyReplay-v1: {}\n")
    with pytest.raises(UserError, match="unknown environment"):
        read_settings(path, "ppo", REPLAY)
    with pytest.raises(UserError, match="unknown algorithm"):
        path.write_text("default: {n_epochs: 3}\n")
        read_settings(path, "pppo", REPLAY)
