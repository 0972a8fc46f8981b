"""`kvpolicy train`, `export`, `evaluate`, `leaderboard`, `tune`: options; work is imported when it begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.output import (
    check_output,
    emit_json,
    shown,
    table,
    warn,
    write_atomic,
    write_text,
)
from kvpolicy.config import parse_override
from kvpolicy.episodes.environments import REPLAY
from kvpolicy.errors import UserError

if TYPE_CHECKING:
    from kvpolicy.agents.judging import Row
    from kvpolicy.agents.settings import Settings

__all__ = [
    "evaluate_command",
    "export_command",
    "leaderboard_command",
    "train_command",
    "tune_command",
]

CONTROLLERS = ("resident", "hisparse", "hybrid", "adaptive", "learned", "random")
RIVALS = ("resident", "hisparse", "hybrid")

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]


def train_command(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE.yaml",
            help="Training settings (default: the quick recipe that comes with kvpolicy).",
        ),
    ] = None,
    algo: Annotated[str, typer.Option("--algo", help="ppo, a2c, sac or dqn.")] = "ppo",
    env: Annotated[str, typer.Option("--env", metavar="ID", help="Environment.")] = REPLAY,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Over the file: n_timesteps=1e5, env_kwargs.scenario=burst. May be given several times.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, show_default="0")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FOLDER", help="Default: runs/ALGO-SCENARIO-SEED."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the last model in the folder, as it was begun; only n_timesteps may change.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a residency controller on an environment, with stable-baselines3 on one CPU core.

    Writes best.zip (of the validation episodes), last.zip, checkpoints and TensorBoard's events.
    """
    from kvpolicy.agents.settings import override, read_settings
    from kvpolicy.agents.training import last_model, train

    chosen = config or Path(__file__).parent / "configs" / "quick.yaml"
    settings = read_settings(chosen, algo, env)
    changes = dict(parse_override(text) for text in overrides or ())
    settings = override(settings, changes)
    scenario = settings.env_kwargs.get("scenario", "burst")
    folder = output or Path("runs") / f"{algo}-{scenario}-{seed or 0}"
    saved = None
    if resume:
        saved = last_model(folder)
        if saved.settings.algo != settings.algo or saved.settings.env != settings.env:
            raise UserError(
                f"--resume: the model is of {saved.settings.algo} on {saved.settings.env}"
            )
        begun = int(saved.about["seed"])
        if seed not in (None, begun):
            raise UserError(f"--resume: --seed {seed}: the training was begun with {begun}")
        seed = begun
        settings = settings if config else override(saved.settings, changes)
        _check_resumed(settings, saved.settings)
    elif folder.is_dir() and any(folder.glob("*.zip")):
        raise UserError(
            f"{str(folder)!r} holds a training: --resume goes on, --output takes another"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {str(folder)!r}: {error.strerror or error}") from None
    done = train(settings, folder, seed or 0, saved, (lambda line: None) if as_json else warn)
    document: dict[str, Any] = {
        "folder": str(folder),
        "best": str(done.best),
        "reward": done.reward,
        "curve": [list(point) for point in done.curve],
        "seconds": done.seconds,
    }
    emit_json(document, as_json, None)
    if not as_json:
        write_text(
            f"{done.seconds:.1f} s; best mean reward {done.reward:.4f} ({done.best})\n"
            f"next: kvpolicy export {done.best} --output policy.npz\n"
        )


def _check_resumed(settings: Settings, begun: Settings) -> None:
    """A training goes on as it was begun; only its length may change. UserError, naming the key."""
    now, then = settings.to_dict(), begun.to_dict()
    for key in {**then, **now}:
        if key != "n_timesteps" and now.get(key) != then.get(key):
            raise UserError(
                f"--resume: {key} = {now.get(key)!r}: the training was begun with {then.get(key)!r}; "
                "only n_timesteps may change"
            )


def export_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL.zip", help="Of 'kvpolicy train'.")],
    output: Annotated[Path, typer.Option("--output", metavar="FILE.npz")],
    name: Annotated[
        str | None, typer.Option("--name", help="Of the policy (default: the file's).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn a trained model into arrays and JSON, for --controller learned:path=FILE.npz."""
    check_output(output)
    from kvpolicy.agents.exporting import export

    content, artifact = export(model, name or output.stem)
    write_atomic(output, content)
    spec = artifact.spec
    document = {"path": str(output), "bytes": len(content), "spec": spec.model_dump()}
    emit_json(document, as_json, None)
    if not as_json:
        write_text(
            f"{output}: {len(content):,} bytes, {spec.algorithm}, {spec.action.name}, "
            f"sha256 {spec.sha256[:12]}\n"
            f"next: kvpolicy run 'def main():' --controller learned:path={output}\n"
        )


def evaluate_command(
    controller: Annotated[
        list[str] | None,
        typer.Option(
            "--controller",
            metavar="SPEC",
            help=f"May be given several times (default: {', '.join(CONTROLLERS)}).",
        ),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            "--scenario",
            metavar="NAME",
            help="A registered scenario. May be given several times (default: load-step).",
        ),
    ] = None,
    split: Annotated[str, typer.Option("--split", help="train, validation or test.")] = "test",
    episodes: Annotated[
        int, typer.Option("--episodes", min=1, help="Loads of each scenario, seeds 0 to N-1.")
    ] = 5,
    live: Annotated[
        bool, typer.Option("--live", help="On the engine of this machine instead of the twin.")
    ] = False,
    board: Annotated[
        Path | None,
        typer.Option("--leaderboard", metavar="FILE", help="Add the rows to this file."),
    ] = None,
    as_json: Json = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the JSON to a file too.")
    ] = None,
) -> None:
    """Judge controllers on held-out loads, by the metric of the reward: goodput over the baseline's.

    Without --live on the deterministic twin: times are those of its cost model.
    """
    for path, option in ((output, "--output"), (board, "--leaderboard")):
        check_output(path, option)
    from kvpolicy.agents.judging import judge
    from kvpolicy.agents.leaderboard import add_rows, read_board

    if board is not None and board.exists():
        read_board(board)  # a file of another kind is refused before any work
    rows = judge(
        list(dict.fromkeys(controller or CONTROLLERS)),
        list(dict.fromkeys(scenario or ["load-step"])),
        split,
        range(episodes),
        live,
        (lambda line: None) if as_json else warn,
    )
    if board is not None:
        add_rows(board, rows)
    emit_json({"rows": [row.to_dict() for row in rows]}, as_json, output)
    if not as_json:
        write_text(_report(rows))


def leaderboard_command(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Of 'kvpolicy evaluate'.")] = Path(
        "leaderboard.json"
    ),
    verify_rows: Annotated[
        bool, typer.Option("--verify", help="Play the episodes again and compare.")
    ] = False,
    episodes: Annotated[
        int, typer.Option("--episodes", min=1, help="At most so many of each row, with --verify.")
    ] = 1000,
    as_json: Json = False,
) -> None:
    """Show a leaderboard, or check it: exit code 1 if any score is not what it says."""
    from kvpolicy.agents.leaderboard import read_board, verify

    rows = read_board(path)
    say = (lambda line: None) if as_json else warn
    wrong = [line for row in rows for line in verify(row, episodes, say)] if verify_rows else []
    document = {"rows": [row.to_dict() for row in rows], "verified": verify_rows, "wrong": wrong}
    emit_json(document, as_json, None)
    if not as_json:
        write_text(_report(rows))
        for line in wrong:
            warn(line)
        if verify_rows and not wrong:
            write_text(f"verified: {len(rows)} rows\n")
    if wrong:
        raise typer.Exit(1)


def _report(rows: Sequence[Row]) -> str:
    """A table of each scenario, the best first. Wins are against the best of RIVALS there."""
    out = []
    for name, split in dict.fromkeys((row.scenario, row.split) for row in rows):
        here = [row for row in rows if (row.scenario, row.split) == (name, split)]
        here.sort(key=lambda row: -row.mean)
        rival = next((row for row in here if row.controller in RIVALS), None)
        lines = [_line(row, rival) for row in here]
        out.append(
            f"{name} ({split}, {'live' if here[0].live else 'replayed, cost ' + here[0].cost}, "
            f"{len(here[0].episodes)} episodes); wins against {rival.controller if rival else 'nobody'}\n"
        )
        headings = ["controller", "score", "95 % of the mean", "wins", "goodput", "misses", "GB", "TTFT p99",
                    "TPOT p99", "decide us p50 / p99", "fallbacks"]  # fmt: skip
        out.append(table(headings, lines))
    return "\n".join(out)


def _line(row: Row, rival: Row | None) -> list[str]:
    from kvpolicy.agents.judging import win_rate

    played = row.episodes

    def mean(key: str) -> float:
        return float(sum(getattr(each, key) for each in played) / len(played))

    def worst(key: str) -> float | None:
        return max([v for each in played if (v := getattr(each, key)) is not None], default=None)

    late = [max(each.decision_us[i] for each in played) for i in (0, 1)]
    return [
        row.controller,
        f"{row.mean:.4f}",
        f"{row.low:.4f} to {row.high:.4f}",
        "-" if rival is None or rival is row else f"{win_rate(row, rival):.0%}",
        shown(mean("goodput"), "{:,.0f}"),
        shown(mean("miss_rate"), "{:.1%}"),
        shown(mean("link_bytes"), "{:,.1f}", 1e9),
        shown(worst("ttft_ms"), "{:,.0f}"),
        shown(worst("tpot_ms"), "{:,.1f}"),
        f"{late[0]:,.0f} / {late[1]:,.0f}",
        f"{sum(each.fallbacks for each in played):,}",
    ]


def tune_command(
    controller: Annotated[
        str | None,
        typer.Option("--controller", metavar="SPEC", help="Search over its constants."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE.yaml", help="Search over training settings instead."
        ),
    ] = None,
    space: Annotated[
        Path | None,
        typer.Option(
            "--space",
            metavar="FILE.yaml",
            help="What to search: NAME: [a, b] or NAME: {low: 1, high: 9, log: true}.",
        ),
    ] = None,
    algo: Annotated[
        str | None, typer.Option("--algo", help="With --config.", show_default="ppo")
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            "--scenario",
            metavar="NAME",
            help="With --controller. May be given several times.",
            show_default="load-step",
        ),
    ] = None,
    episodes: Annotated[
        int | None,
        typer.Option(
            "--episodes",
            min=1,
            help="With --controller: training loads of each scenario.",
            show_default="2",
        ),
    ] = None,
    trials: Annotated[int, typer.Option("--trials", min=1)] = 20,
    storage: Annotated[
        Path | None,
        typer.Option(
            "--storage",
            metavar="FILE.db",
            help="Keep trials in this file; the same command goes on there, also in several processes.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FOLDER", help="Models of --config.", show_default="runs/tune"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Search for a controller's best constants, or the best training settings, on the training split.

    Needs the extra 'tune' (Optuna). Test and validation loads are never played in a search of constants.
    """
    from kvpolicy.agents.settings import read_settings
    from kvpolicy.agents.tuning import default_space, read_space, tune_controller, tune_training

    check_output(storage, "--storage")
    say = (lambda line: None) if as_json else warn
    if (controller is None) == (config is None):
        raise UserError(
            "give --controller to search over its constants, or --config for a training's"
        )
    idle = (
        {"--algo": algo, "--output": output}
        if controller is not None
        else {"--scenario": scenario, "--episodes": episodes}
    )
    for option, value in idle.items():
        if value is not None:
            other, given = ("--config", "--controller")[:: 1 if controller is not None else -1]
            raise UserError(f"{option} goes with {other}, not with {given}")
    if controller is not None:
        choices = read_space(space) if space else default_space(controller)
        seeds = range(episodes or 2)
        names = scenario or ["load-step"]
        done = tune_controller(controller, choices, names, seeds, trials, storage, seed, say)
    else:
        assert config is not None
        if space is None:
            raise UserError("--config goes with --space: what to search over")
        settings = read_settings(config, algo or "ppo", REPLAY)
        where = output or Path("runs/tune")
        done = tune_training(settings, read_space(space), where, trials, storage, seed, say)
    document = {"values": dict(done.values), "score": done.score, "trials": done.trials}
    emit_json(document, as_json, None)
    if not as_json:
        text = ",".join(f"{key}={value}" for key, value in done.values.items())
        write_text(f"best of {done.trials} trials: {done.score:.4f} with {text}\n")
