"""Starting TensorBoard on a folder of events, and drawing its charts without a browser."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpolicy.errors import UserError, reason

__all__ = ["available", "event_runs", "serving"]

# Custom scalars, pictures and the rest come from the event files; nothing else of TensorBoard is needed.
NEEDS = "tensorboard"


def available() -> bool:
    """Whether TensorBoard is installed."""
    return importlib.util.find_spec(NEEDS) is not None


def event_runs(folder: Path) -> list[str]:
    """Names of the runs below a folder that have events, sorted. UserError if there is no such folder."""
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r} is not a folder")
    found = {path.parent.relative_to(folder) for path in folder.rglob("events.out.tfevents.*")}
    return sorted(str(path) for path in found)


@contextmanager
def serving(folder: Path, port: int = 0, host: str = "127.0.0.1") -> Iterator[str]:
    """TensorBoard on a folder, until the end of the block; yields its address. port 0: any that is free.

    It runs in threads of this process (and a reader of its own where one is installed). UserError if it
    is not installed, or does not start: the port may be taken.
    """
    if not available():
        raise UserError("TensorBoard is not installed: pip install 'tensorboard>=2.21'")
    from tensorboard import program

    servers: list[Any] = []

    def start(*arguments: Any) -> Any:
        servers.append(program.create_port_scanning_werkzeug_server(*arguments))
        return servers[-1]

    board = program.TensorBoard(server_class=start)
    # The reader in a process of its own would outlive an interrupt; these logs are small.
    arguments = [
        *("--logdir", str(folder.resolve()), "--host", host, "--port", str(port)),
        *("--load_fast", "false", "--reload_interval", "5"),
        # The default keeps 1,000 points of a tag, and 10 pictures. 0 is said to keep all, and shows none
        # in custom scalars.
        *("--samples_per_plugin", "scalars=100000,images=64,histograms=200"),
    ]
    try:
        board.configure(argv=[sys.argv[0], *arguments])
        address = str(board.launch())
    except (SystemExit, Exception) as error:
        raise UserError(f"TensorBoard does not start on port {port}: {reason(error)}") from None
    try:
        yield address
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
