"""Who may do what, and how much a client may send."""

from __future__ import annotations

import asyncio
import hmac

from starlette.requests import ClientDisconnect, Request

from kvpolicy.serving.errors import ApiError
from kvpolicy.serving.settings import ServerSettings, is_loopback

__all__ = ["check_key", "check_policy", "read_body"]


def check_key(request: Request, settings: ServerSettings) -> None:
    """ApiError unless the call brings the server's API key, where it has one."""
    if settings.api_key is not None and not _bears(request, settings.api_key):
        raise ApiError(
            401, "the API key is missing or wrong (Authorization: Bearer KEY)", "invalid_api_key"
        )


def check_policy(request: Request, settings: ServerSettings) -> None:
    """ApiError unless the call may see and swap the policy: with its token, or where there is none, from
    this machine to a server that only this machine can reach.

    Then the Host must be a loopback one too: a page in a browser can give its own name the address
    127.0.0.1, but not send another name with it.
    """
    if settings.policy_token is not None:
        if not _bears(request, settings.policy_token):
            raise ApiError(
                401,
                "the policy token is missing or wrong (Authorization: Bearer TOKEN)",
                "no_token",
            )
        return
    if not is_loopback(settings.host):
        raise ApiError(
            403,
            f"the server listens on {settings.host} and has no policy token: set policy_token",
            "policy_token_needed",
        )
    if not is_loopback(request.url.hostname or ""):
        raise ApiError(403, "without a policy token the Host must be a loopback one", "wrong_host")
    check_key(request, settings)


def _bears(request: Request, secret: str) -> bool:
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(given.strip().encode(), secret.encode())
    return kind.lower() == "bearer" and right


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """The body of a call. ApiError for one that is no JSON by its type, too long, or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the content type must be application/json", "wrong_content_type")
    most = settings.max_body_kib << 10
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise _too_long(most)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise _too_long(most)
    except TimeoutError:
        text = f"the body did not come within {settings.body_seconds:g} s"
        raise ApiError(408, text, "body_timeout", headers={"connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before its body came", "disconnected") from None
    return bytes(body)


def _too_long(most: int) -> ApiError:
    text = f"the body is longer than {most} bytes (max_body_kib)"
    return ApiError(413, text, "body_too_large", headers={"connection": "close"})
