"""The bodies of the two calls, field by field (docs/serving.md says what differs from OpenAI's)."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from kvpolicy.serving.errors import ApiError, bad_request

__all__ = ["ChatBody", "CompletionBody", "Message", "parse_body", "read_object"]

_Body = TypeVar("_Body", bound="Body")

# As many as OpenAI takes.
MOST_STOPS = 4
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields that would change the output and are not built: the values that change nothing are taken."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat; content may be a list of text parts."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]
    name: str | None = Field(default=None, max_length=64)
    refusal: None = None

    @property
    def text(self) -> str:
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False


Stop = str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None


class Body(BaseModel):
    """What both calls take. deadline_ms, top_k, return_token_ids and fingerprint are kvpolicy's own."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=4096)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    stop: Stop = None

    top_k: int | None = Field(default=None, ge=0, le=1_000_000)
    deadline_ms: float | None = Field(default=None, gt=0, le=1e9, allow_inf_nan=False)
    return_token_ids: bool | None = None
    fingerprint: bool | None = None

    # Taken and without effect.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Only at values that change nothing.
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None

    @field_validator(*NEUTRAL, mode="after", check_fields=False)
    @classmethod
    def _neutral(cls, value: Any, info: ValidationInfo) -> Any:
        allowed = NEUTRAL[str(info.field_name)]
        if value is None or any(value == one and type(value) is not bool for one in allowed):
            return value
        if type(value) is bool and any(value is one for one in allowed):
            return value
        raise ValueError(f"is not supported; allowed: {', '.join(map(json.dumps, allowed))}")

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionBody(Body):
    """POST /v1/completions. prompt: text, token ids, or a list of either."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    suffix: Any = None
    best_of: Any = None


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    parallel_tool_calls: Any = None
    response_format: Any = None
    modalities: Any = None


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body. ApiError for anything else, and for numbers and text that JSON or
    UTF-8 does not have."""
    try:
        value = json.loads(raw.decode(), parse_constant=_no_number)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        text = " ".join(str(error).split())[:200]
        raise ApiError(400, f"the body is not valid JSON: {text}", "invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", "invalid_json")
    return value


def parse_body(kind: type[_Body], raw: bytes) -> _Body:
    """The body of a call, checked. ApiError naming the field at fault."""
    values = read_object(raw)
    try:
        return kind(**values)
    except ValidationError as error:
        raise _as_api_error(kind, error) from None


def _as_api_error(kind: type[Body], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    path = [str(part) for part in first["loc"]]
    top = path[0] if path else None
    if first["type"] == "extra_forbidden":
        name = ".".join(path)
        return bad_request(
            name, f"unrecognized request argument: {name}"[:200], "unknown_parameter"
        )
    if first["type"] == "missing":
        name = ".".join(path)
        return bad_request(name, f"missing required parameter: {name}", "missing_parameter")
    # A union has a complaint for each of its members; that it is none of them says it all.
    text = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if top == "prompt":
        text = "should be text, a list of token ids, or a list of either"
    code = "unsupported_parameter" if top in NEUTRAL else "invalid_value"
    return bad_request(top, f"{'.'.join(path) if top != 'prompt' else top}: {text}"[:300], code)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
