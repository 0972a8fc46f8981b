"""Training settings: YAML in the layout of RL Zoo, an entry per environment id, checked key by key.

Nothing in a file is evaluated: names stand for classes, ``lin_0.001`` for a schedule.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpolicy.config import load_yaml
from kvpolicy.errors import UserError, unknown_name

__all__ = ["ALGORITHMS", "Settings", "algorithm", "override", "read_settings"]

ALGORITHMS = ("ppo", "a2c", "sac", "dqn")
POLICIES = ("MlpPolicy",)
ACTIVATIONS = ("tanh", "relu")
POLICY_KEYS = ("net_arch", "activation_fn", "ortho_init", "log_std_init")
# Ours, and those of the trainer itself; what is left are arguments of the algorithm.
OWN = (
    *(
        "n_envs",
        "n_timesteps",
        "policy",
        "normalize",
        "average_reward",
        "env_kwargs",
        "policy_kwargs",
    ),
    *("eval_every", "eval_episodes", "checkpoint_every"),
)
NOT_GIVEN = (
    *("self", "policy", "env", "policy_kwargs", "tensorboard_log", "verbose", "seed", "device"),
    *(
        "rollout_buffer_class",
        "rollout_buffer_kwargs",
        "replay_buffer_class",
        "replay_buffer_kwargs",
    ),
    *("_init_setup_model", "action_noise", "support_multi_env", "n_steps_callback"),
)
SCHEDULED = ("learning_rate", "clip_range", "clip_range_vf")


@dataclass(frozen=True)
class Settings:
    """One training. n_envs: episodes played at once. n_timesteps: decisions in all. normalize: observations
    by their running mean and variance, and rewards in training. average_reward: rewards in training less what
    the time is worth (see agents/average_reward.py). env_kwargs: of the environment.
    policy_kwargs, arguments: of the algorithm. eval_every, checkpoint_every: decisions between two.
    eval_episodes: played in each evaluation, the same ones every time, of the validation split.
    """

    algo: str
    env: str
    n_envs: int = 8
    n_timesteps: int = 100_000
    policy: str = "MlpPolicy"
    normalize: bool = False
    average_reward: bool = True
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    policy_kwargs: Mapping[str, Any] = field(default_factory=dict)
    eval_every: int = 25_000
    eval_episodes: int = 8
    checkpoint_every: int = 100_000
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As in a file, with ``algo`` and ``env`` besides."""
        own = {name: getattr(self, name) for name in OWN}
        return {"algo": self.algo, "env": self.env, **own, **self.arguments}

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise unknown_name("policy", self.policy, POLICIES)
        for name in ("normalize", "average_reward"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} = {getattr(self, name)!r}: must be true or false")
        for name in ("n_envs", "n_timesteps", "eval_every", "eval_episodes", "checkpoint_every"):
            value = getattr(self, name)
            if isinstance(value, float) and value.is_integer():  # 1e5 is a float in YAML
                object.__setattr__(self, name, int(value))
            elif isinstance(value, bool) or not isinstance(value, int):
                raise UserError(f"{name} = {value!r}: must be a whole number")
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {value!r}: must be at least 1")
        for name, allowed in (("policy_kwargs", POLICY_KEYS), ("env_kwargs", _env_keys())):
            for key in _mapping(name, getattr(self, name)):
                if key not in allowed:
                    raise unknown_name(f"key of {name}", key, allowed)
        activation = self.policy_kwargs.get("activation_fn", "tanh")
        if activation not in ACTIVATIONS:
            raise unknown_name("activation_fn", str(activation), ACTIVATIONS)
        allowed = _argument_names(self.algo)
        for key, value in self.arguments.items():
            if key not in allowed:
                raise unknown_name(f"training setting of {self.algo}", key, (*OWN, *allowed))
            if key in SCHEDULED:
                schedule(key, value)


def read_settings(path: Path, algo: str, env: str) -> Settings:
    """The settings for an environment from a file (entry of its id, else ``default``). UserError for anything
    unknown, with a suggestion."""
    document = load_yaml(path)
    entry = document.get(env, document.get("default"))
    if entry is None:
        raise UserError(f"config {str(path)!r}: {unknown_name('environment', env, document)}")
    try:
        return settings_of(_mapping(env, entry), algo, env)
    except UserError as error:
        raise UserError(f"config {str(path)!r}: {error}") from None


def settings_of(values: Mapping[str, Any], algo: str, env: str) -> Settings:
    """Settings from flat values. UserError as above."""
    own = {key: value for key, value in values.items() if key in OWN}
    rest = {key: value for key, value in values.items() if key not in OWN}
    for name in ("env_kwargs", "policy_kwargs"):
        if name in own:
            own[name] = dict(_mapping(name, own[name]))
    return Settings(algo, env, **own, arguments=rest)


def override(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """With changed keys; ``env_kwargs.scenario`` and its like name one key inside."""
    changed = settings.to_dict()
    algo, env = changed.pop("algo"), changed.pop("env")
    for key, value in values.items():
        outer, dot, inner = key.partition(".")
        if dot and outer in ("env_kwargs", "policy_kwargs"):
            changed[outer] = {**changed[outer], inner: value}
        else:
            changed[key] = value
    return settings_of(changed, algo, env)


def algorithm(name: str) -> Any:
    """The class of stable-baselines3. UserError for an unknown name."""
    if name not in ALGORITHMS:
        raise unknown_name("algorithm", name, ALGORITHMS)
    import stable_baselines3

    return getattr(stable_baselines3, name.upper())


def algorithm_arguments(settings: Settings) -> dict[str, Any]:
    """Keyword arguments of the algorithm, names and schedules resolved."""
    from torch import nn

    kinds = {"tanh": nn.Tanh, "relu": nn.ReLU}
    found = {
        key: schedule(key, value) if key in SCHEDULED else value
        for key, value in settings.arguments.items()
    }
    policy = {"activation_fn": "tanh", **settings.policy_kwargs}
    policy["activation_fn"] = kinds[policy["activation_fn"]]
    return {**found, "policy_kwargs": policy}


def schedule(key: str, value: Any) -> Any:
    """A number, or ``lin_X``: from X down to nothing over the training."""
    if isinstance(value, str) and value.startswith("lin_"):
        from stable_baselines3.common.utils import LinearSchedule

        try:
            return LinearSchedule(float(value[4:]), 0.0, 1.0)
        except ValueError:
            pass
    elif value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    raise UserError(f"{key} = {value!r}: must be a number or lin_NUMBER, as in lin_0.001")


def _argument_names(algo: str) -> tuple[str, ...]:
    known = inspect.signature(algorithm(algo).__init__).parameters
    return tuple(name for name in known if name not in NOT_GIVEN)


def _env_keys() -> tuple[str, ...]:
    from kvpolicy.env.replay import ResidencyReplay

    known = inspect.signature(ResidencyReplay.__init__).parameters
    return tuple(name for name in known if name not in ("self", "render_mode", "split"))


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{name} = {value!r}: must be a mapping of names")
    return value
