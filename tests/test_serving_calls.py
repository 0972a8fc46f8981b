"""Bodies of calls: what is taken, what is refused and by what name; who may do what; the policy block."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from kvpolicy.config import SamplingParams
from kvpolicy.errors import UserError
from kvpolicy.serving.access import check_key, check_policy, read_body
from kvpolicy.serving.calls import Defaults, chat_call, completion_call, template
from kvpolicy.serving.errors import ApiError
from kvpolicy.serving.fields import Body, ChatBody, CompletionBody, Message, parse_body
from kvpolicy.serving.policy import PolicyBlock, check_remote
from kvpolicy.serving.prometheus import COUNTERS, GAUGES, ServerMetrics
from kvpolicy.serving.settings import ServerSettings, is_loopback

ROOT = Path(__file__).resolve().parents[1]
DEFAULTS = Defaults("micro", SamplingParams(), 264, 512, False, 8, None)


def completion(**values: Any) -> Any:
    raw = json.dumps({"prompt": "abc", **values}).encode()
    return completion_call(parse_body(CompletionBody, raw), DEFAULTS)


def chat(**values: Any) -> Any:
    raw = json.dumps({"messages": [{"role": "user", "content": "hi"}], **values}).encode()
    return chat_call(parse_body(ChatBody, raw), DEFAULTS)


def refused(make: Any, **values: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        make(**values)
    return caught.value


@pytest.mark.parametrize(
    ("values", "param", "code"),
    [
        ({"temperature": 2.5}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": True}, "n", "invalid_value"),
        ({"n": 9}, "n", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 510}, "max_tokens", "context_length_exceeded"),
        ({"stop": ["a"] * 5}, "stop", "invalid_value"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [264]}, "prompt", "invalid_value"),
        ({"prompt": ["a", ""]}, "prompt", "invalid_value"),
        ({"prompt": None}, "prompt", "invalid_value"),
        ({"prompt": {"a": 1}}, "prompt", "invalid_value"),
        ({"model": "gpt"}, "model", "model_not_found"),
        ({"frobnicate": 1}, "frobnicate", "unknown_parameter"),
        ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter"),
        ({"logit_bias": {"1": 2}}, "logit_bias", "unsupported_parameter"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"echo": True, "logprobs": 1}, "echo", "unsupported_parameter"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        (
            {"stream_options": {"usage": True}, "stream": True},
            "stream_options.usage",
            "unknown_parameter",
        ),
    ],
)
def test_completions_name_the_field_at_fault(values: dict[str, Any], param: str, code: str) -> None:
    error = refused(completion, **values)
    assert (error.param, error.code) == (param, code)
    assert error.status == (404 if param == "model" else 400)
    assert param.partition(".")[0] in error.message


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens"),
    ],
)
def test_chats_name_the_field_at_fault(values: dict[str, Any], param: str) -> None:
    error = refused(chat, **values)
    assert error.status == 400 and (error.param or "").startswith(param)


def test_what_changes_nothing_is_taken() -> None:
    completion(presence_penalty=0, logit_bias={}, best_of=1, suffix=None, user="me", metadata={})
    chat(tools=[], response_format={"type": "text"}, parallel_tool_calls=False, store=False)


def test_a_call_becomes_jobs() -> None:
    call = completion(prompt=["a", "bé"], n=2, seed=2**63 - 1, stop="x", max_tokens=3, logprobs=0)
    assert [job.prompt for job in call.jobs] == ["a", "a", "b\xc3\xa9", "b\xc3\xa9"]
    assert [job.params["seed"] for job in call.jobs] == [2**63 - 1, 0] * 2
    assert {job.logprobs for job in call.jobs} == {0} and call.prompt_tokens == 4
    assert call.stops == (b"x",) and call.jobs[0].params["temperature"] == 1.0
    given = completion(prompt=[97, 256], temperature=0)
    assert given.jobs[0].prompt == [97, 256] and given.jobs[0].params["max_new_tokens"] == 16
    SamplingParams(**given.jobs[0].params)  # every field is one of the engine's


def test_a_config_sets_what_a_call_leaves_open() -> None:
    sampling = SamplingParams(temperature=0, max_new_tokens=5, seed=4, stop=("z",))
    known = Defaults("micro", sampling, 264, 512, True, 8, 2.0)
    call = completion_call(parse_body(CompletionBody, b'{"prompt": "abc"}'), known)
    params = call.jobs[0].params
    assert (params["temperature"], params["max_new_tokens"], params["seed"]) == (0, 5, 4)
    assert params["stop"] == ["z"] and params["deadline_ms"] == 2000.0 and call.prompt_tokens == 4


def test_without_a_seed_every_call_draws_its_own() -> None:
    assert completion().jobs[0].params["seed"] != completion().jobs[0].params["seed"]


def test_the_chat_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "é"}]
    messages = [Message(role="system", content="be"), Message(role="user", content=parts)]
    assert template(messages) == "system: be\n\nuser: aé\n\nassistant:".encode()


@settings(max_examples=25)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda s: st.lists(s) | st.dictionaries(st.text(), s),
    ),
    st.sampled_from(sorted(CompletionBody.model_fields)),
)
def test_any_value_of_any_field_is_taken_or_refused_in_the_apis_form(value: Any, name: str) -> None:
    try:
        raw = json.dumps({"prompt": "abc", name: value}).encode()
        call = completion_call(parse_body(CompletionBody, raw), DEFAULTS)
    except ApiError as error:
        assert error.status in (400, 404) and len(error.message) < 500
    else:
        for job in call.jobs:
            SamplingParams(**job.params)


@given(st.binary())
def test_any_bytes_are_refused_in_the_apis_form(raw: bytes) -> None:
    with pytest.raises(ApiError):
        parse_body(CompletionBody, raw)


def test_fields_that_are_not_built_are_all_declared() -> None:
    from kvpolicy.serving.fields import NEUTRAL

    assert set(NEUTRAL) <= set(CompletionBody.model_fields) | set(ChatBody.model_fields)
    assert set(Body.model_fields) <= set(ChatBody.model_fields)


# --- who may do what ------------------------------------------------------------------------------


def request(token: str | None = None, host: str = "127.0.0.1:8000", **headers: str) -> Request:
    pairs = {"host": host, **({"authorization": f"Bearer {token}"} if token else {}), **headers}
    raw = [(key.encode(), value.encode()) for key, value in pairs.items()]
    scope = {
        "type": "http",
        "method": "PUT",
        "path": "/v1/policy",
        "headers": raw,
        "query_string": b"",
    }
    return Request(scope, _nothing)


async def _nothing() -> dict[str, Any]:
    await asyncio.sleep(60)
    return {}


def status_of(check: Any, asked: Request, settings: ServerSettings) -> int:
    try:
        check(asked, settings)
    except ApiError as error:
        return error.status
    return 200


def test_the_policy_needs_its_token_or_a_loopback_address() -> None:
    open_to_all = ServerSettings(host="0.0.0.0")
    assert status_of(check_policy, request(), open_to_all) == 403
    assert status_of(check_policy, request("t"), open_to_all) == 403
    token = ServerSettings(host="0.0.0.0", policy_token="t", api_key="k")
    assert status_of(check_policy, request("t"), token) == 200
    assert status_of(check_policy, request("k"), token) == 401
    assert status_of(check_policy, request(), token) == 401
    here = ServerSettings()
    assert status_of(check_policy, request(), here) == 200
    assert status_of(check_policy, request(host="evil.example:8000"), here) == 403
    with_key = ServerSettings(api_key="k")
    assert status_of(check_policy, request(), with_key) == 401
    assert status_of(check_policy, request("k"), with_key) == 200


def test_the_api_key_is_asked_for_where_there_is_one() -> None:
    assert status_of(check_key, request(), ServerSettings()) == 200
    assert status_of(check_key, request("é"), ServerSettings(api_key="k")) == 401
    assert status_of(check_key, request("k"), ServerSettings(api_key="k")) == 200


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_a_body_that_does_not_come_is_given_up() -> None:
    asked = request(**{"content-type": "application/json"})
    with pytest.raises(ApiError, match="did not come"):
        asyncio.run(read_body(asked, ServerSettings(body_seconds=0.05)))


# --- the policy block -----------------------------------------------------------------------------


def test_a_policy_block_becomes_settings() -> None:
    block = PolicyBlock(controller="static", parameters={"device_buffer_rows": 8}, eviction=None)
    assert block.settings() == {"controller": "static:device_buffer_rows=8", "eviction": None}
    alone = PolicyBlock(parameters={"reserve": 0.5})
    assert alone.settings("adaptive:split=equal") == {"controller": "adaptive:reserve=0.5"}
    assert PolicyBlock().settings("adaptive") == {}
    assert PolicyBlock(admission="accepted").settings() == {"admission": "accepted"}


@pytest.mark.parametrize(
    "values",
    [
        {"controler": "static"},
        {"controller": 3},
        {"controller": None},
        {"controller": "static:a=1", "parameters": {"b": 2}},
        {"controller": "static", "parameters": {"a": "x,y=1"}},
        {"controller": "static", "parameters": {"a": [1]}},
        {"admission": "none"},
        {"eviction": "fifa"},
        {"control_interval": 0},
        {"device_kv_mib": 5},
    ],
)
def test_a_policy_block_refuses(values: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        block = PolicyBlock(**values)
        block.settings("adaptive")
        from kvpolicy.config import EngineConfig

        EngineConfig(**block.settings("adaptive"))


@pytest.mark.parametrize(
    "spec",
    [
        "/tmp/mine.py:Mine",
        "mine.py:Mine:a=1",
        "~/mine.py",
        "C:\\mine.py:Mine",
        "MINE.PY:Mine",
        "learned:path=/etc/passwd",
        "learned:path=policy",
        "learned:artifact=../../x",
        "learned:a=1,weights_file=x",
    ],
)
def test_no_path_is_taken_over_http(spec: str) -> None:
    with pytest.raises(UserError, match="over HTTP"):
        check_remote(spec)


def test_names_and_numbers_are_taken_over_http() -> None:
    for spec in ("adaptive", "static:device_buffer_rows=256", "adaptive:split=equal,reserve=0.1"):
        check_remote(spec)


# --- the documentation ----------------------------------------------------------------------------


def test_every_metric_and_setting_is_explained() -> None:
    """docs/serving.md names what /metrics shows and nothing else; examples/serve.yaml has every setting."""
    page = (ROOT / "docs" / "serving.md").read_text()
    section = page.partition("\n### Metrics\n")[2].partition("\n### ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`([a-z_]+)[`{]", row)}
    metrics = ServerMetrics(lambda: SAMPLE, lambda: (True, 0, {"controller": "static"}))
    metrics.rejected.labels("host").inc()
    shown = {f.name.removeprefix("kvpolicy_") for f in metrics.registry.collect()}
    assert {name.removesuffix("_total") for name in told} == shown
    settings = yaml.safe_load((ROOT / "examples" / "serve.yaml").read_text())
    secrets = {"api_key", "policy_token"}
    assert set(settings["server"]) | secrets == set(ServerSettings.model_fields)
    assert ServerSettings(**settings["server"]) == ServerSettings()
    PolicyBlock(**settings["policy"]).settings()
    for name in ServerSettings.model_fields:
        assert name in page or name in ("body_seconds", "max_choices", "host", "port"), name


SAMPLE: dict[str, Any] = {
    **dict.fromkeys((*GAUGES, *COUNTERS), 1),
    "deferred": {"host": 1},
    "accepted_length": 1.0,
}
