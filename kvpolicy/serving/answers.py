"""What a call is answered with: one JSON document, or events of a stream, in OpenAI's two formats."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from kvpolicy.serving.calls import Call
from kvpolicy.serving.errors import ApiError
from kvpolicy.serving.link import Choice
from kvpolicy.serving.text import TextStream, token_bytes, token_text

__all__ = ["DONE", "Answer", "error_event"]

DONE = b"data: [DONE]\n\n"
_OBJECTS = {
    ("completion", False): "text_completion",
    ("completion", True): "text_completion",
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
}


# json.dumps makes an encoder for each call that asks for separators.
_dump = json.JSONEncoder(separators=(",", ":")).encode


def error_event(error: ApiError) -> bytes:
    """An error inside a stream that has begun."""
    return b"data: " + _dump(error.body()).encode() + b"\n\n"


class _Part:
    """One choice of an answer: how far it is."""

    def __init__(self, index: int, call: Call) -> None:
        self.index = index
        self.text = TextStream(call.stops)
        self.characters = 0  # in the text so far, of which the next token's offset is made
        self.count = 0  # tokens
        self.begun = self.ended = False
        self._decoded = TextStream()

    def offsets(self, tokens: list[int]) -> list[int]:
        """Where in the text each token begins (a character's bytes all begin where it does)."""
        found = []
        for token in tokens:
            found.append(self.characters)
            self.characters += len(self._decoded.feed([token]))
        return found


class Answer:
    """Builds the answer of one call from its choices as they go on."""

    def __init__(self, call: Call, model: str) -> None:
        self._call = call
        self._parts = [_Part(index, call) for index in range(len(call.jobs))]
        prefix = "chatcmpl-" if call.kind == "chat" else "cmpl-"
        self._head = {
            "id": prefix + secrets.token_hex(12),
            "object": _OBJECTS[call.kind, call.stream],
            "created": int(time.time()),
            "model": model,
        }
        # The start and end of an event with nothing in it but text: json.dumps of whole events was half
        # of the server's time per token.
        self._plain = call.logprobs is None
        inner = '"delta":{"content":' if call.kind == "chat" else '"text":'
        self._starts = [
            f'data: {_dump(self._head)[:-1]},"choices":[{{"index":{part.index},{inner}'
            for part in self._parts
        ]
        close = "}" if call.kind == "chat" else ""
        usage = ',"usage":null' if call.include_usage else ""
        self._close = f'{close},"logprobs":null,"finish_reason":null'
        self._end = f"}}]{usage}}}\n\n"

    # --- a stream --------------------------------------------------------------------------------

    def events(self, choices: list[Choice]) -> bytes:
        """Events for everything new. ApiError where a choice ended in an error."""
        out = []
        for part, choice in zip(self._parts, choices, strict=True):
            if part.ended:
                continue
            if not part.begun:
                part.begun = True
                out.append(self._opening(part))
            if choice.tokens or choice.reason:
                out.append(self._event(part, choice))
        return "".join(out).encode()

    def _opening(self, part: _Part) -> str:
        if self._call.kind == "chat":
            return self._chunk(part, {"role": "assistant", "content": ""}, {}, None)
        if self._call.echo:
            prompt = self._call.prompts[part.index].decode("utf-8", "replace")
            return self._chunk(part, prompt, {}, None)
        return ""

    def _event(self, part: _Part, choice: Choice) -> str:
        tokens, rows = choice.tokens, choice.logprobs
        choice.tokens, choice.logprobs = [], []
        part.count += len(tokens)
        text = part.text.feed(tokens)
        if not choice.reason:
            if self._plain:
                if not (text or self._call.token_ids):
                    return ""
                ids = f',"token_ids":{_dump(tokens)}' if self._call.token_ids else ""
                return f"{self._starts[part.index]}{_dump(text)}{self._close}{ids}{self._end}"
            return self._chunk(part, self._content(text), self._details(part, tokens, rows), None)
        part.ended = True
        reason = finish_reason(choice)
        text += part.text.finish(choice.reason)
        details = self._details(part, tokens, rows) | self._fingerprint(choice)
        if self._call.kind == "completion":
            return self._chunk(part, text, details, reason)
        # Clients read text and the end from chunks of their own.
        first = self._chunk(part, {"content": text}, details, None) if text or tokens else ""
        return first + self._chunk(part, {}, self._fingerprint(choice), reason)

    def _content(self, text: str) -> Any:
        return {"content": text} if self._call.kind == "chat" else text

    def _chunk(self, part: _Part, content: Any, details: dict[str, Any], reason: str | None) -> str:
        name = "delta" if self._call.kind == "chat" else "text"
        choice = {"index": part.index, name: content, "logprobs": None, "finish_reason": reason}
        event = {**self._head, "choices": [choice | details]}
        if self._call.include_usage:
            event["usage"] = None
        return f"data: {_dump(event)}\n\n"

    def last(self) -> bytes:
        """What ends a stream."""
        if not self._call.include_usage:
            return DONE
        event = {**self._head, "choices": [], "usage": self.usage()}
        return f"data: {_dump(event)}\n\n".encode() + DONE

    # --- a document ------------------------------------------------------------------------------

    def document(self, choices: list[Choice]) -> dict[str, Any]:
        """The whole answer, of choices that have all ended. ApiError where one ended in an error."""
        parts = zip(self._parts, choices, strict=True)
        found = [self._whole(part, choice) for part, choice in parts]
        return {**self._head, "choices": found, "usage": self.usage()}

    def _whole(self, part: _Part, choice: Choice) -> dict[str, Any]:
        reason = finish_reason(choice)
        part.count = len(choice.tokens)
        text = part.text.feed(choice.tokens) + part.text.finish(choice.reason)
        if self._call.echo:
            text = self._call.prompts[part.index].decode("utf-8", "replace") + text
        content: dict[str, Any] = {"text": text}
        if self._call.kind == "chat":
            message = {"role": "assistant", "content": text, "refusal": None}
            content = {"message": message}
        return {
            "index": part.index,
            **content,
            "logprobs": None,
            "finish_reason": reason,
            **self._details(part, choice.tokens, choice.logprobs),
            **self._fingerprint(choice),
        }

    def usage(self) -> dict[str, Any]:
        """Tokens of the call so far."""
        made = sum(part.count for part in self._parts)
        prompt = self._call.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
        }

    # --- what a call may ask for besides ---------------------------------------------------------

    def _details(self, part: _Part, tokens: list[int], rows: list[list[Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {"token_ids": tokens} if self._call.token_ids else {}
        if self._call.logprobs is not None and tokens:
            of = _chat_logprobs if self._call.kind == "chat" else _logprobs
            found["logprobs"] = of(tokens, rows, part)
        return found

    def _fingerprint(self, choice: Choice) -> dict[str, Any]:
        if not self._call.fingerprint:
            return {}
        return {"logits_sha256": choice.record["logits_sha256"]}


def finish_reason(choice: Choice) -> str:
    """Of the API; ApiError for an end that it has no word for."""
    if choice.reason in ("stop", "length"):
        return choice.reason
    if choice.reason == "deadline":
        raise ApiError(504, "the request was not done by its deadline", "deadline_exceeded")
    if choice.reason == "error":
        raise ApiError(500, "the model's logits are not finite", "model_error")
    raise ApiError(500, f"the request ended: {choice.reason}", choice.reason)


def _logprobs(tokens: list[int], rows: list[list[Any]], part: _Part) -> dict[str, Any]:
    return {
        "tokens": [token_text(token) for token in tokens],
        "token_logprobs": [row[0] for row in rows],
        "top_logprobs": [{token_text(t): value for t, value in row[1]} for row in rows],
        "text_offset": part.offsets(tokens),
    }


def _chat_logprobs(tokens: list[int], rows: list[list[Any]], part: _Part) -> dict[str, Any]:
    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": token_text(token), "logprob": value, "bytes": token_bytes(token)}

    content = [
        {**entry(token, row[0]), "top_logprobs": [entry(t, value) for t, value in row[1]]}
        for token, row in zip(tokens, rows, strict=True)
    ]
    return {"content": content, "refusal": None}
