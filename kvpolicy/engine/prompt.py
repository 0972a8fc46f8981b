"""Prompts as token ids: bytes are their own ids, text is UTF-8, a list of numbers is ids already."""

from __future__ import annotations

from collections.abc import Sequence

from kvpolicy.errors import UserError
from kvpolicy.models.loader import DecodeModel

Prompt = bytes | str | Sequence[int]


def token_ids(prompt: Prompt, model: DecodeModel, bos: bool) -> tuple[int, ...]:
    """Token ids of a prompt, behind the beginning-of-sequence token where ``bos`` asks for it.

    UserError for what is no prompt, has an id that the model does not know, or is empty.
    """
    try:
        ids = tuple(prompt.encode() if isinstance(prompt, str) else prompt)
    except (TypeError, RuntimeError, UnicodeEncodeError):
        raise UserError(f"prompt = {prompt!r}: must be bytes, text or token ids") from None
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < model.vocab:
            raise UserError(f"prompt token {token!r}: must be an id from 0 to {model.vocab - 1}")
    if bos:
        if model.bos is None:
            raise UserError("bos = True: the model has no beginning-of-sequence token")
        ids = (model.bos, *ids)
    if not ids:
        raise UserError("prompt is empty: needs at least one token (or bos)")
    return ids
