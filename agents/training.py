"""Training on stable-baselines3: from settings to a folder with the best model, the last and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.logger import configure
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from kvpolicy.agents.average_reward import AverageReward
from kvpolicy.agents.callbacks import Checkpoints, Diagnostics, Evaluation, ProgressBar
from kvpolicy.agents.environments import make_vector, spaces_of
from kvpolicy.agents.models import Saved, read_model, restore, save_model
from kvpolicy.agents.settings import Settings, algorithm, algorithm_arguments
from kvpolicy.errors import UserError
from kvpolicy.telemetry.record import commit, package_version

__all__ = ["Trained", "last_model", "train"]

PACKAGES = ("kvpolicy", "stable-baselines3", "gymnasium", "torch", "numpy")


@dataclass(frozen=True)
class Trained:
    """model: the trained one. best: file of the best evaluation; reward: its mean. curve: (decisions, mean
    reward) of every evaluation. seconds: of wall time."""

    model: Any
    best: Path
    reward: float
    curve: tuple[tuple[int, float], ...]
    seconds: float


def train(
    settings: Settings,
    folder: Path,
    seed: int = 0,
    resume: Saved | None = None,
    say: Callable[[str], None] = lambda line: None,
    tensorboard: bool = True,
) -> Trained:
    """Train until ``settings.n_timesteps`` decisions. folder: for the models and TensorBoard's events.
    resume: go on from there (weights, optimisers, normalisation; episodes begin anew, replay buffers are
    filled again). On one CPU thread, so equal seeds give equal weights. UserError for what cannot be.
    """
    start = time.perf_counter()
    torch.set_num_threads(1)
    set_random_seed(seed)
    env = make_vector(settings, "train", settings.n_envs)
    held = make_vector(settings, "validation", min(settings.n_envs, settings.eval_episodes))
    if settings.average_reward:
        env = AverageReward(env)
    if settings.normalize:
        env = VecNormalize(env)
        held = VecNormalize(held, training=False, norm_reward=False)
    try:
        model = _model(settings, env, seed)
        if resume is not None:
            restore(model, env, resume)
            if model.num_timesteps >= settings.n_timesteps:
                raise UserError(
                    f"n_timesteps = {settings.n_timesteps:,}: the model has {model.num_timesteps:,} already"
                )
        about = _about(settings, env, seed)
        formats = ["tensorboard"] if tensorboard else []
        model.set_logger(configure(str(folder / "tensorboard"), formats))

        def keep(reward: float) -> None:
            seconds = round(time.perf_counter() - start, 1)
            save_model(model, folder / "best.zip", {**about, "reward": reward, "seconds": seconds})

        def checkpoint(steps: int) -> None:
            save_model(model, folder / f"step-{steps}.zip", about)

        best = -float("inf") if resume is None else float(resume.about.get("reward", -float("inf")))
        evaluation = Evaluation(held, settings.eval_every, settings.eval_episodes, keep, say, best)
        bar = ProgressBar(settings.n_timesteps)
        diagnostics = Diagnostics(spaces_of(env)[1].knobs)
        every = Checkpoints(settings.checkpoint_every, checkpoint)
        try:
            model.learn(
                settings.n_timesteps - model.num_timesteps,
                CallbackList([evaluation, every, diagnostics, bar]),
                log_interval=1 if settings.algo in ("ppo", "a2c") else 4,
                reset_num_timesteps=False,
            )
        except KeyboardInterrupt:
            checkpoint(model.num_timesteps)  # for --resume
            raise
        finally:
            bar.stop()
        if not evaluation.curve or evaluation.curve[-1][0] != model.num_timesteps:
            evaluation.evaluate()
        save_model(model, folder / "last.zip", {**about, "reward": evaluation.curve[-1][1]})
        if not (folder / "best.zip").exists():  # resumed elsewhere, and never better than before
            save_model(model, folder / "best.zip", {**about, "reward": evaluation.curve[-1][1]})
        seconds = time.perf_counter() - start
        return Trained(
            model, folder / "best.zip", evaluation.best, tuple(evaluation.curve), seconds
        )
    finally:
        env.close()
        held.close()


def last_model(folder: Path) -> Saved:
    """Where a run folder's training stands: its model with the most decisions. UserError without any."""
    found = [read_model(path) for path in sorted(folder.glob("*.zip")) if path.stem != "best"]
    if not found:
        raise UserError(f"--resume {str(folder)!r}: holds no checkpoint")
    return max(found, key=lambda saved: int(saved.about["steps"]))


def _model(settings: Settings, env: VecEnv, seed: int) -> Any:
    kind = algorithm(settings.algo)
    try:
        return kind(
            settings.policy,
            env,
            seed=seed,
            device="cpu",
            verbose=0,
            **algorithm_arguments(settings),
        )
    except (AssertionError, ValueError, TypeError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"{settings.algo} with {settings.env}: {text}") from None


def _about(settings: Settings, env: VecEnv, seed: int) -> dict[str, Any]:
    """What has to stand beside a model, ready for JSON."""
    encoder, actions = spaces_of(env)
    return {
        "settings": settings.to_dict(),
        "seed": seed,
        "observation": encoder.spec(),
        "action": actions.spec(),
        "commit": commit(),
        "versions": {name: package_version(name) for name in PACKAGES},
    }
