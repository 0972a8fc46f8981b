"""What happens during a training: evaluation, checkpoints, diagnostics, a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from kvpolicy.control.actions import Knob

__all__ = ["Checkpoints", "Diagnostics", "Evaluation", "ProgressBar"]

# Seeds of evaluation episodes: the same in every evaluation, so that a curve shows the policy.
EVAL_SEED = 1_000_003


class Evaluation(BaseCallback):
    """Plays the same validation episodes every ``every`` decisions with the deterministic policy, records
    ``eval/mean_reward``, and calls ``on_best`` when the mean is the best so far."""

    def __init__(
        self,
        env: VecEnv,
        every: int,
        episodes: int,
        on_best: Callable[[float], None],
        say: Callable[[str], None],
        best: float = -np.inf,
    ) -> None:
        super().__init__()
        self.env, self.every, self.episodes = env, every, episodes
        self.on_best, self.say, self.best = on_best, say, best
        self.curve: list[tuple[int, float]] = []
        self._next = 0

    def _on_training_start(self) -> None:
        self._next = self.num_timesteps + self.every

    def _on_step(self) -> bool:
        if self.num_timesteps >= self._next:
            self._next = self.num_timesteps + self.every
            self.evaluate()
        return True

    def evaluate(self) -> None:
        """Now."""
        trained = self.model.get_vec_normalize_env()
        if isinstance(self.env, VecNormalize) and trained is not None:
            self.env.obs_rms = trained.obs_rms.copy()
        self.env.seed(EVAL_SEED)
        rewards, _ = evaluate_policy(
            self.model, self.env, self.episodes, deterministic=True, return_episode_rewards=True
        )
        mean = float(np.mean(rewards))
        self.curve.append((self.num_timesteps, mean))
        self.logger.record("eval/mean_reward", mean)
        self.logger.record("eval/std_reward", float(np.std(rewards)))
        self.logger.record("time/total_timesteps", self.num_timesteps, exclude="tensorboard")
        self.logger.dump(self.num_timesteps)
        better = mean > self.best
        self.say(f"{self.num_timesteps:>9,} decisions: {mean:.4f}{' (best)' if better else ''}")
        if better:
            self.best = mean
            self.on_best(mean)


class Checkpoints(BaseCallback):
    """Calls ``save`` every ``every`` decisions."""

    def __init__(self, every: int, save: Callable[[int], None]) -> None:
        super().__init__()
        self.every, self.save, self._next = every, save, 0

    def _on_training_start(self) -> None:
        self._next = self.num_timesteps + self.every

    def _on_step(self) -> bool:
        if self.num_timesteps >= self._next:
            self._next = self.num_timesteps + self.every
            self.save(self.num_timesteps)
        return True


class Diagnostics(BaseCallback):
    """Records where the policy's actions are: ``policy/KNOB_mean`` and ``policy/KNOB_std``, for levels
    ``policy/KNOB_mean`` only, and how many components lie at a bound (``policy/at_bound``)."""

    def __init__(self, knobs: tuple[Knob, ...]) -> None:
        super().__init__()
        self.knobs = knobs

    def _on_step(self) -> bool:
        actions = self.locals.get("clipped_actions", self.locals.get("actions"))
        values = np.asarray(actions, dtype=np.float64).reshape(-1, len(self.knobs))
        for number, knob in enumerate(self.knobs):
            self.logger.record_mean(f"policy/{knob.name}_mean", float(values[:, number].mean()))
            if not knob.levels:
                self.logger.record_mean(f"policy/{knob.name}_std", float(values[:, number].std()))
        if not self.knobs[0].levels:
            self.logger.record_mean("policy/at_bound", float((np.abs(values) >= 1).mean()))
        return True


class ProgressBar(BaseCallback):
    """A bar on stderr, where that is a terminal."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total = total
        self._bars: Any = None

    def _on_training_start(self) -> None:
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        self._bars = Progress(
            "training", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self._task = self._bars.add_task("", total=self.total, completed=self.num_timesteps)
        self._bars.start()

    def _on_step(self) -> bool:
        if self._bars is not None:
            self._bars.update(self._task, completed=self.num_timesteps)
        return True

    def _on_training_end(self) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the terminal as it was."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
