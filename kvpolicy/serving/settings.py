"""What a server may be told beside the engine's settings: the block ``server`` of its config."""

from __future__ import annotations

import ipaddress

from pydantic import Field

from kvpolicy.config import Settings

__all__ = ["ServerSettings", "is_loopback"]


class ServerSettings(Settings):
    """One server.

    port 0: any free one, which is printed. api_key: asked for by every path under /v1. policy_token:
    asked for by /v1/policy instead; without one the policy can be seen and swapped only where the server
    listens on a loopback address. allow_controller_files: a swap over HTTP may name a file, which runs
    code of whoever sends it.

    max_waiting: requests that may wait beside those that run; more are refused with 429.
    max_choices: of one call (prompts x n). max_body_kib: of a call. body_seconds: to send it.
    request_seconds: a request that is not done after this is given up (None: no limit; a call may ask
    for less). stall_seconds: a client that takes no data for this long is cut off. drain_seconds: what
    runs may go on for this long after SIGTERM. engine_seconds: an engine that has work and says nothing
    for this long is ended and started again. sample_seconds: between two samples of the engine.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    api_key: str | None = Field(default=None, min_length=1)
    policy_token: str | None = Field(default=None, min_length=1)
    allow_controller_files: bool = False
    max_waiting: int = Field(default=256, ge=0, le=1_000_000)
    max_choices: int = Field(default=128, ge=1, le=4096)
    max_body_kib: int = Field(default=4096, ge=1, le=1 << 20)
    body_seconds: float = Field(default=30.0, gt=0, le=86400)
    request_seconds: float | None = Field(default=None, gt=0, le=86400)
    stall_seconds: float = Field(default=60.0, gt=0, le=86400)
    drain_seconds: float = Field(default=30.0, ge=0, le=86400)
    engine_seconds: float = Field(default=120.0, gt=0, le=86400)
    sample_seconds: float = Field(default=1.0, gt=0, le=3600)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
