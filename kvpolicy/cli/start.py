"""The console script: takes over Ctrl-C before anything slow is imported."""

from __future__ import annotations

from kvpolicy.cli import interrupts


def main() -> None:
    """Run the command line."""
    interrupts.take_over()
    from kvpolicy.cli.main import main as run

    run()
