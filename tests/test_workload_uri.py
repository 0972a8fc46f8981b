"""Workload URIs: what is read, what is refused and how."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy import workloads
from kvpolicy.errors import UserError
from kvpolicy.workloads.registry import SYNTHETIC
from kvpolicy.workloads.uri import Span, parse_uri

NAMES = [name for name, _ in workloads.describe() if "PATH" not in name]


@given(
    st.dictionaries(st.sampled_from(["rate", "low", "text", "x_y"]), st.text(max_size=8)),
    st.text(alphabet=st.characters(exclude_characters="?%"), min_size=1, max_size=12),
)
def test_parsing_gives_back_what_was_written(query: dict[str, str], name: str) -> None:
    from urllib.parse import quote

    text = "&".join(f"{key}={quote(value)}" for key, value in query.items())
    uri = parse_uri(f"trace:{name}?{text}")
    assert (uri.scheme, uri.name, uri.query) == ("trace", name, query)


@given(st.text(max_size=30))
def test_any_text_is_a_workload_or_one_clear_line(text: str) -> None:
    try:
        workloads.make(text)
    except UserError as error:
        assert str(error)


@given(st.integers(1, 5000), st.integers(0, 5000), st.floats(0, 1, exclude_max=True))
def test_spans(low: int, more: int, at: float) -> None:
    made = workloads.make(f"synthetic:poisson?prompt_bytes={low}-{low + more}&rate=1&duration=9")
    assert f"prompt_bytes={Span(low, low + more)}" in made.uri
    span = Span(low, low + more)
    assert low <= span.at(at) <= low + more
    assert (span.at(0.0), span.at(1 - 1e-12)) == (low, low + more)


@given(
    st.sampled_from(sorted(SYNTHETIC)),
    st.sampled_from(["wall", "steps"]),
    st.integers(0, 2**63 - 1),
    st.floats(1, 500),
)
def test_the_written_out_uri_makes_the_same_workload(
    name: str, clock: str, seed: int, duration: float
) -> None:
    first = workloads.make(f"synthetic:{name}?seed={seed}&duration={duration:g}", clock)
    second = workloads.make(first.uri, clock)
    assert (first.uri, first.phases) == (second.uri, second.phases)
    pairs = zip(first.requests(), second.requests(), range(5), strict=False)
    assert all(a == b for a, b, _ in pairs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clock", ["wall", "steps"])
def test_every_name_works_without_parameters(name: str, clock: str) -> None:
    workload = workloads.make(name, clock)
    assert workload.uri.startswith(f"{name}?")
    first = next(workload.requests())
    assert len(first.prompt) >= 1 and first.max_new_tokens >= 1
    assert workload.phases[0].start == 0 < workload.end
    pairs = zip(workload.phases, workload.phases[1:], strict=False)
    assert all(a.end == b.start for a, b in pairs)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("synthetic:stpe", "unknown synthetic workload 'stpe' (did you mean 'step'?)"),
        ("syntetic:step", "unknown workload 'syntetic:step' (did you mean 'synthetic:step'?)"),
        ("step", "must be synthetic:NAME"),
        ("synthetic:", "must be synthetic:NAME"),
        ("synthetic:step?hgih=3", "unknown option 'hgih' (did you mean 'high'?)"),
        ("synthetic:step?rate=3", "unknown option 'rate'"),
        ("synthetic:step?low", "'low' must be key=value"),
        ("synthetic:step?low=1&low=2", "low is given twice"),
        ("synthetic:step?low=5&high=3", "low = 5: must not exceed high = 3"),
        ("synthetic:step?low=-1", "low = '-1'"),
        ("synthetic:poisson?rate=0", "rate = '0'"),
        ("synthetic:poisson?rate=inf", "rate = 'inf'"),
        ("synthetic:poisson?duration=nan", "duration = 'nan'"),
        ("synthetic:poisson?duration=soon", "duration = 'soon'"),
        ("synthetic:poisson?rate=1000&duration=100000", "more than 1000000 requests"),
        ("synthetic:poisson?prompt_bytes=5-2", "prompt_bytes = '5-2'"),
        ("synthetic:poisson?prompt_bytes=0", "prompt_bytes = '0'"),
        ("synthetic:poisson?output_tokens=many", "output_tokens = 'many'"),
        ("synthetic:poisson?seed=-1", "seed = '-1'"),
        ("synthetic:poisson?scale=0", "scale = '0'"),
        ("synthetic:poisson?text=/no/such/text", "text = '/no/such/text': No such file"),
        ("trace:azure-con", "unknown trace 'azure-con' (did you mean 'azure-conv'?)"),
        ("trace:no/such/trace.csv", "trace 'no/such/trace.csv': No such file"),
        ("trace:azure-conv?rate=slow", "rate = 'slow'"),
        ("trace:azure-conv?low=3", "unknown option 'low'"),
        ("trace:azure-conv?rate=0.001&duration=9", "must make 1 to 1000000 requests"),
    ],
)
def test_mistakes_are_named(text: str, part: str) -> None:
    with pytest.raises(UserError) as error:
        workloads.make(text)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_a_clock_is_wall_or_steps() -> None:
    with pytest.raises(UserError, match="clock 'sun'"):
        workloads.make("synthetic:step", "sun")


def test_names_are_decoded(tmp_path: Path) -> None:
    path = tmp_path / "my trace.csv"
    path.write_text("time_s,in_tokens,out_tokens\n0,3,4\n")
    quoted = str(path).replace(" ", "%20")
    workload = workloads.make(f"trace:{quoted}?rate=trace")
    assert [(len(a.prompt), a.max_new_tokens) for a in workload.requests()] == [(3, 4)]
