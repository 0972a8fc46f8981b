"""Searching over a controller's constants, or over training settings, with Optuna."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvpolicy.agents.judging import play
from kvpolicy.agents.settings import Settings, override
from kvpolicy.config import load_yaml
from kvpolicy.episodes.scenarios import find
from kvpolicy.errors import UserError

__all__ = ["Choice", "Tuned", "read_space", "tune_controller", "tune_training"]

# Constants of built-in controllers that are worth a search.
SPACES: Mapping[str, Mapping[str, Any]] = {
    "adaptive": {
        "split": ["marginal", "equal"],
        "min_rows": {"low": 0, "high": 4096},
        "reserve": {"low": 0.0, "high": 0.2},
    },
    "hisparse": {"device_buffer_rows": {"low": 256, "high": 16384, "log": True}},
    "static": {"device_buffer_rows": {"low": 256, "high": 16384, "log": True}},
}


@dataclass(frozen=True)
class Choice:
    """What one constant may be. values: of a list; else from low to high, whole numbers where both are."""

    name: str
    values: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False

    def suggest(self, trial: Any) -> Any:
        """The trial's value."""
        if self.values:
            return trial.suggest_categorical(self.name, list(self.values))
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(self.name, self.low, self.high, log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, log=self.log)


@dataclass(frozen=True)
class Tuned:
    """The best of all trials so far: its values and mean score; trials: how many there are."""

    values: Mapping[str, Any]
    score: float
    trials: int


def read_space(path: Path) -> tuple[Choice, ...]:
    """A search space from YAML: ``NAME: [a, b]`` or ``NAME: {low: 1, high: 9, log: true}``."""
    return space_of(load_yaml(path), f"space {str(path)!r}")


def default_space(controller: str) -> tuple[Choice, ...]:
    """The space of a built-in controller. UserError where there is none."""
    if controller not in SPACES:
        raise UserError(
            f"no search space for {controller!r}: give --space, or one of {', '.join(SPACES)}"
        )
    return space_of(SPACES[controller], controller)


def space_of(values: Mapping[str, Any], what: str) -> tuple[Choice, ...]:
    """A search space from plain values. UserError, naming the constant."""
    found = []
    for name, value in values.items():
        if isinstance(value, list) and value:
            found.append(Choice(name, values=tuple(value)))
            continue
        fits = isinstance(value, dict) and {"low", "high"} <= set(value) <= {"low", "high", "log"}
        numbers = fits and all(
            isinstance(value[k], (int, float)) and not isinstance(value[k], bool)
            for k in ("low", "high")
        )
        if (
            not numbers
            or not value["low"] < value["high"]
            or (value.get("log") and value["low"] <= 0)
        ):
            raise UserError(
                f"{what}: {name}: must be a list, or low and high (and log: true, above 0), not {value!r}"
            )
        found.append(Choice(name, (), value["low"], value["high"], bool(value.get("log", False))))
    if not found:
        raise UserError(f"{what}: holds nothing to search over")
    return tuple(found)


def tune_controller(
    controller: str,
    space: Sequence[Choice],
    scenarios: Sequence[str],
    seeds: Sequence[int],
    trials: int,
    storage: Path | None,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Tuned:
    """Mean score over scenarios and training loads. storage: an SQLite file, which later calls and other
    processes go on with. UserError for a constant that the controller has not."""
    chosen = [find(name) for name in scenarios]

    def score(values: Mapping[str, Any], number: int) -> float:
        text = ",".join(f"{key}={value}" for key, value in values.items())
        spec = f"{controller}{',' if ':' in controller else ':'}{text}"
        return float(
            np.mean([play(s, spec, "train", each).score for s in chosen for each in seeds])
        )

    about = {"controller": controller, "scenarios": list(scenarios), "seeds": list(seeds)}
    return _search(score, space, trials, storage, seed, about, say)


def tune_training(
    settings: Settings,
    space: Sequence[Choice],
    folder: Path,
    trials: int,
    storage: Path | None,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Tuned:
    """Best validation reward of a whole training with each trial's settings; models go to ``folder``."""
    from kvpolicy.agents.training import train

    override(
        settings, {choice.name: _example(choice) for choice in space}
    )  # wrong names end it now

    def score(values: Mapping[str, Any], number: int) -> float:
        where = folder / f"trial-{number}"
        try:
            where.mkdir(parents=True)
        except OSError as error:
            raise UserError(
                f"--output {str(where)!r}: {error.strerror or error}: take another folder"
            ) from None
        return train(override(settings, values), where, seed, tensorboard=False).reward

    return _search(score, space, trials, storage, seed, {"settings": settings.to_dict()}, say)


def _example(choice: Choice) -> Any:
    return choice.values[0] if choice.values else choice.low


def _search(
    score: Callable[[Mapping[str, Any], int], float],
    space: Sequence[Choice],
    trials: int,
    storage: Path | None,
    seed: int,
    about: Mapping[str, Any],
    say: Callable[[str], None],
) -> Tuned:
    try:
        import optuna
    except ImportError:
        raise UserError("tuning needs Optuna: pip install 'kvpolicy[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    where = None if storage is None else f"sqlite:///{storage}"
    try:
        study = optuna.create_study(
            storage=where,
            study_name="kvpolicy",
            direction="maximize",
            load_if_exists=True,
        )
    except Exception as error:  # SQLAlchemy's own, which is no dependency of ours
        raise UserError(
            f"--storage {str(storage)!r}: {' '.join(str(error).split())[:200]}"
        ) from None
    plain = dict(about)
    known = study.user_attrs.get("about")
    if known is not None and known != plain:
        raise UserError(f"--storage {str(storage)!r}: holds another search ({known})")
    study.set_user_attr("about", plain)

    def objective(trial: Any) -> float:
        # No two trials of a study have one number, whichever process runs them: none draws another's values.
        own = int(np.random.SeedSequence((seed, trial.number)).generate_state(1)[0])
        study.sampler = optuna.samplers.TPESampler(seed=own)
        values = {choice.name: choice.suggest(trial) for choice in space}
        found = score(values, trial.number)
        say(f"trial {trial.number}: {found:.4f} {values}")
        return found

    study.optimize(objective, n_trials=trials)
    return Tuned(dict(study.best_params), float(study.best_value), len(study.trials))
