"""What a client is told: errors in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ApiError", "bad_request", "overloaded", "unavailable"]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer with an HTTP status of 400 and more. param: the field at fault; code: for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Ready for JSON."""
        kind = _TYPES.get(self.status, "server_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """400 for a field."""
    return ApiError(400, message, code, param)


def overloaded(tier: str, waiting: int, seconds: float) -> ApiError:
    """429: as many wait as may. tier: what keeps them from running: seats, device or host."""
    what = {
        "device": "device memory for KV",
        "host": "host memory for KV",
    }.get(tier, "seats (max_concurrency)")
    retry = str(max(1, min(60, round(seconds))))
    return ApiError(
        429,
        f"{waiting} requests wait already; what binds: {what}. Try again in {retry} s",
        f"{tier or 'seats'}_exhausted",
        headers={"retry-after": retry, "x-kvpolicy-binding-tier": tier or "seats"},
    )


def unavailable(message: str, code: str = "engine_unavailable") -> ApiError:
    """503: not now, for no fault of the request's."""
    return ApiError(503, message, code, headers={"retry-after": "2"})
