"""How many tokens are drafted at all: what steps gave and cost decides."""

from __future__ import annotations

from kvpolicy.engine.widths import EXPLORE, Widths


def run(
    widths: Widths, seconds: dict[int, float], tokens: dict[int, float], steps: int
) -> list[int]:
    """What a batch of 8 requests is given, step by step, where these are the times and tokens of a width."""
    found = []
    for _ in range(steps):
        width = widths.choose(8, 7)
        assert widths.choose(8, 7) == width  # until a step is noted
        found.append(width)
        widths.note(8, width, round(8 * tokens[width]), seconds[width])
    return found


def test_the_width_with_the_most_tokens_per_second_wins() -> None:
    tokens = {7: 3.0, 3: 2.5, 0: 1.0}
    for best, seconds in (
        (7, {7: 1.1, 3: 1.05, 0: 1.0}),
        (3, {7: 2.0, 3: 1.2, 0: 1.0}),
        (0, {7: 4.0, 3: 3.0, 0: 1.0}),
    ):
        found = run(Widths(7), seconds, tokens, 400)
        assert set(found[:12]) == {0, 3, 7}
        share = found[12:].count(best) / len(found[12:])
        assert (share > 1 - 2 / EXPLORE and share < 1) or best == 7


def test_it_follows_a_change_and_keeps_batch_sizes_apart() -> None:
    widths, tokens = Widths(7), {7: 3.0, 3: 2.5, 0: 1.0}
    run(widths, {7: 1.1, 3: 1.2, 0: 1.0}, tokens, 50)
    assert widths.choose(8, 7) == 7 and widths.choose(64, 7) == 7
    slow = run(widths, {7: 9.0, 3: 8.0, 0: 1.0}, tokens, 300)
    assert slow[-1] == 0 and slow.count(0) > 250
    assert widths.choose(64, 7) == 7  # not tried yet
    widths.note(8, 5, 100, 1e-6)  # a width of somebody else's cap
    assert widths.choose(8, 7) == 0


def test_one_token_has_two_widths() -> None:
    assert Widths(1).widths == (1, 0)
    assert Widths(7).widths == (7, 3, 0)


def test_only_widths_that_can_run_are_weighed() -> None:
    """Under a cap of 5 nothing waits for steps of 7, and what a step of 5 gave is known as that."""
    widths, found = Widths(7), []
    seconds, tokens = {5: 3.0, 3: 2.0, 0: 1.0}, {5: 2.0, 3: 1.5, 0: 1.0}
    for _ in range(40):
        found.append(widths.choose(8, 5))
        widths.note(8, found[-1], round(8 * tokens[found[-1]]), seconds[found[-1]])
    assert set(found) == {5, 3, 0} and set(found[12:]) == {0}
    assert widths.choose(8, 7) == 7  # not tried yet
    assert widths.choose(8, 0) == 0
