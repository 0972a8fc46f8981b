"""`kvpolicy regret`: what there is to win on a load, before anyone trains on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.cli import interrupts
from kvpolicy.cli.options import Options, takes
from kvpolicy.cli.output import check_output, emit_json, table, write_text
from kvpolicy.cli.progress import step_progress
from kvpolicy.cli.run import task_of
from kvpolicy.cli.settings import resolve
from kvpolicy.cli.shadows import check_shadows
from kvpolicy.errors import UserError

if TYPE_CHECKING:
    from kvpolicy.shadows.regret import Regret

__all__ = ["regret_command"]

DEFAULT_CONTROLLERS = ("adaptive", "hisparse", "hybrid", "random")
LEGEND = """\
Rows are per layer. regret: rows moved (fetched + promoted) beyond the bound, in % of those selected.
clairvoyant: the best split among requests and stores by hindsight, every control interval, by who
knows the load to come. bound: no controller moves less on these batches. The first controller makes
them; "no": a controller's own memory would have made others.
"""


@takes(Options)
def regret_command(options: Options) -> None:
    """Run a --workload (or prompts) once and say how far controllers are from the best in hindsight.

    The first --controller runs it, the others stand in its shadow on the same batches.
    """
    check_output(options.output)
    settings = resolve(options)
    for flag, given in (
        ("--logdir", options.logdir),
        ("--shadow", options.shadow),
        ("--tpot-bound-ms", options.tpot_bound_ms),
    ):
        if given is not None and given != []:
            raise UserError(f"{flag} does not go with 'kvpolicy regret'")
    task = task_of(options, settings)
    controllers = settings.controllers or DEFAULT_CONTROLLERS
    check_shadows(controllers)
    with interrupts.loading():
        from kvpolicy.shadows.regret import regrets
    with step_progress("regret:") as on_step:
        found = regrets(settings.engine, task.workload, controllers, task.sampling, on_step=on_step)
    document = {
        "workload": task.workload.uri,
        "regrets": [line.to_dict() for line in found],
        "config": settings.engine.model_dump(by_alias=True),
    }
    emit_json(document, to_stdout=options.as_json, path=options.output)
    if not options.as_json:
        write_text(f"{task.workload.uri}\n\n{_table(found)}\n{LEGEND}")


def _table(found: list[Regret]) -> str:
    rows = [
        [
            line.policy,
            f"{line.fetched_rows:,}",
            f"{line.promoted_rows:,}",
            f"{line.share:.2%}",
            "yes" if line.exact else "no",
        ]
        for line in found
    ]
    return table(["policy", "fetched", "promoted", "regret", "same batches"], rows)
