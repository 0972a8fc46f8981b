"""From the body of a call to jobs for the engine, and what the answer must hold."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvpolicy.config import SamplingParams
from kvpolicy.serving.errors import ApiError, bad_request
from kvpolicy.serving.fields import Body, ChatBody, CompletionBody, Message
from kvpolicy.serving.link import Job

__all__ = ["Call", "Defaults", "chat_call", "completion_call", "template"]

# OpenAI's own defaults, where the server's config names none.
TEMPERATURE, COMPLETION_TOKENS = 1.0, 16
# Tokens of a call whose logprobs are kept until the client takes them: 3 KB each with 20 beside it.
MOST_LOGPROBS = 1 << 16
# A chat has no length of its own there; here it does.
CHAT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a server knows that a call depends on. sampling: its config's; vocab, max_context, bos: of the
    model; request_seconds: None for no limit."""

    model: str
    sampling: SamplingParams
    vocab: int
    max_context: int
    bos: bool
    max_choices: int
    request_seconds: float | None

    def given(self, name: str, other: Any) -> Any:
        """A sampling setting, if the config names it."""
        named = name in self.sampling.model_fields_set
        return getattr(self.sampling, name) if named else other


@dataclass(frozen=True, slots=True)
class Call:
    """One call. prompts: bytes of each prompt and its length in tokens, by choice. logprobs: how many
    beside each token, None for none."""

    kind: Literal["chat", "completion"]
    jobs: list[Job]
    prompts: list[bytes]
    prompt_tokens: int
    stream: bool
    include_usage: bool
    stops: tuple[bytes, ...]
    logprobs: int | None
    echo: bool
    token_ids: bool
    fingerprint: bool


def template(messages: list[Message]) -> bytes:
    """The chat template: ``role: text`` and an empty line for each message, then ``assistant:``. No
    special tokens: the embedded models were not trained on chats."""
    lines = "".join(f"{message.role}: {message.text}\n\n" for message in messages)
    return f"{lines}assistant:".encode()


def chat_call(body: ChatBody, defaults: Defaults) -> Call:
    """The jobs of a chat. ApiError for what cannot be."""
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise bad_request("max_completion_tokens", "give max_tokens or max_completion_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs", "top_logprobs needs logprobs: true")
    wanted = body.max_completion_tokens or body.max_tokens
    tokens = wanted or defaults.given("max_new_tokens", CHAT_TOKENS)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _call("chat", body, defaults, [template(body.messages)], tokens, logprobs, echo=False)


def completion_call(body: CompletionBody, defaults: Defaults) -> Call:
    """The jobs of a completion. ApiError for what cannot be."""
    if body.echo and body.logprobs is not None:
        raise bad_request("echo", "echo with logprobs is not supported", "unsupported_parameter")
    tokens = body.max_tokens or defaults.given("max_new_tokens", COMPLETION_TOKENS)
    prompts = _prompts(body.prompt)
    return _call("completion", body, defaults, prompts, tokens, body.logprobs, echo=bool(body.echo))


def _prompts(value: Any) -> list[bytes | list[int]]:
    """Every prompt of a completion."""
    several = not isinstance(value, str) and (not value or isinstance(value[0], str | list))
    prompts = value if several else [value]
    if not prompts:
        raise bad_request("prompt", "prompt: should not be empty")
    return [one.encode() if isinstance(one, str) else one for one in prompts]


def _call(
    kind: Literal["chat", "completion"],
    body: Body,
    defaults: Defaults,
    prompts: list[bytes] | list[bytes | list[int]],
    max_tokens: int,
    logprobs: int | None,
    echo: bool,
) -> Call:
    if body.model not in (None, defaults.model):
        message = f"the model {body.model!r} does not exist; there is {defaults.model!r}"
        raise ApiError(404, message[:300], "model_not_found", "model")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options", "stream_options needs stream: true")
    n = body.n or 1
    if n * len(prompts) > defaults.max_choices:
        what = f"n x prompts = {n * len(prompts)}: should be at most {defaults.max_choices}"
        raise bad_request("n", what)
    if logprobs is not None and n * len(prompts) * max_tokens > MOST_LOGPROBS:
        what = (
            f"logprobs of {n * len(prompts) * max_tokens} tokens: should be at most {MOST_LOGPROBS}"
        )
        raise bad_request("logprobs", what)
    for prompt in prompts:
        _check_prompt(prompt, max_tokens, defaults)
    params = _params(body, defaults, max_tokens)
    fingerprint = bool(body.fingerprint)
    jobs = [
        Job(_wire(prompt), {**params, "seed": (params["seed"] + i) % 2**63}, logprobs, fingerprint)
        for prompt in prompts
        for i in range(n)
    ]
    return Call(
        kind=kind,
        jobs=jobs,
        prompts=[_text(prompt) for prompt in prompts for _ in range(n)],
        prompt_tokens=sum(len(prompt) + defaults.bos for prompt in prompts),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        stops=tuple(stop.encode() for stop in params["stop"] if stop),
        logprobs=logprobs,
        echo=echo,
        token_ids=bool(body.return_token_ids),
        fingerprint=fingerprint,
    )


def _params(body: Body, defaults: Defaults, max_tokens: int) -> dict[str, Any]:
    """SamplingParams of a call, ready for JSON."""
    given = defaults.given

    def chosen(name: str, value: Any, other: Any) -> Any:
        return given(name, other) if value is None else value

    seed = chosen("seed", body.seed, None)
    seconds = defaults.request_seconds
    deadline = min(
        body.deadline_ms or float("inf"),
        float("inf") if seconds is None else seconds * 1e3,
        defaults.sampling.deadline_ms or float("inf"),
    )
    stops: Mapping[bool, Any] = {True: defaults.sampling.stop, False: body.stops}
    return {
        "max_new_tokens": max_tokens,
        "temperature": chosen("temperature", body.temperature, TEMPERATURE),
        "top_p": chosen("top_p", body.top_p, 1.0),
        "top_k": chosen("top_k", body.top_k, 0),
        "seed": secrets.randbelow(2**63) if seed is None else seed % 2**63,
        "stop": list(stops[body.stop is None]),
        "deadline_ms": None if deadline == float("inf") else deadline,
    }


def _check_prompt(prompt: bytes | list[int], max_tokens: int, defaults: Defaults) -> None:
    length = len(prompt) + defaults.bos
    if not length:
        raise bad_request("prompt", "prompt: should not be empty")
    if not isinstance(prompt, bytes):
        for token in prompt:
            if not 0 <= token < defaults.vocab:
                text = f"prompt: token {token} is not an id from 0 to {defaults.vocab - 1}"
                raise bad_request("prompt", text[:200])
    if length + max_tokens > defaults.max_context:
        raise bad_request(
            "max_tokens",
            f"prompt of {length} tokens + max_tokens = {max_tokens}: the model's context is "
            f"{defaults.max_context} tokens",
            "context_length_exceeded",
        )


def _wire(prompt: bytes | list[int]) -> str | list[int]:
    return prompt.decode("latin-1") if isinstance(prompt, bytes) else prompt


def _text(prompt: bytes | list[int]) -> bytes:
    return prompt if isinstance(prompt, bytes) else bytes(t for t in prompt if t < 256)
