"""`kvpolicy train`, `export`, `evaluate`, `leaderboard` and `tune`: options only, the work is imported when it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvpolicy.cli.output import check_output, emit_json, warn, write_atomic, write_text
from kvpolicy.config import parse_override
from kvpolicy.errors import UserError

__all__ = ["export_command", "train_command"]

REPLAY = "kvpolicy/ResidencyReplay-v0"

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
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FOLDER", help="Default: runs/ALGO-SCENARIO-SEED."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last model in the folder.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a residency controller on an environment, with stable-baselines3 on one CPU core.

    Writes best.zip (of the validation episodes), last.zip, checkpoints and TensorBoard's events.
    """
    from kvpolicy.agents.settings import override, read_settings, settings_of
    from kvpolicy.agents.training import last_model, train

    chosen = config or Path(__file__).parent / "configs" / "quick.yaml"
    settings = read_settings(chosen, algo, env)
    settings = override(settings, dict(parse_override(text) for text in overrides or ()))
    folder = (
        output or Path("runs") / f"{algo}-{settings.env_kwargs.get('scenario', 'burst')}-{seed}"
    )
    saved = None
    if resume:
        saved = last_model(folder)
        if saved.settings.algo != settings.algo or saved.settings.env != settings.env:
            raise UserError(
                f"--resume: the model is of {saved.settings.algo} on {saved.settings.env}"
            )
        # As it was begun; only its length may change.
        changed = {"n_timesteps": settings.n_timesteps}
        settings = override(saved.settings, changed)
        seed = int(saved.about["seed"])
    elif folder.is_dir() and any(folder.glob("*.zip")):
        raise UserError(f"{str(folder)!r} holds a training already: --resume goes on, --output takes another")  # fmt: skip
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {str(folder)!r}: {error.strerror or error}") from None
    del settings_of
    done = train(settings, folder, seed, saved, (lambda line: None) if as_json else warn)
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
            f"{output}: {len(content):,} bytes, {spec.algorithm}, {spec.action.name}, sha256 {spec.sha256[:12]}\n"
            f"next: kvpolicy run --controller learned:path={output}\n"
        )
