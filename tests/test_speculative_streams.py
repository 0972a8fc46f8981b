"""Streams of speculation: the numbers of the plain streams, disjoint, uniform, fresh in every cycle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.kernels import noise
from kvpolicy.kernels import philox as host
from kvpolicy.sampling import Role
from kvpolicy.sampling import gumbel as gumbel_on_host
from kvpolicy.speculative import streams

SEEDS = st.integers(0, 2**63 - 1)


def one(value: int) -> torch.Tensor:
    return torch.tensor([value])


@given(seed=SEEDS, position=st.integers(0, 2**40), word=st.integers(0, 2**32 - 1))
def test_tensors_give_the_hosts_numbers(seed: int, position: int, word: int) -> None:
    found = noise.uniforms(one(seed), one(position), one(word), 11)[0].numpy()
    assert np.array_equal(found, host.uniforms(seed, position, word, 11))
    some = torch.tensor([[10, 0, 7, 7]])
    at = noise.uniforms_at(one(seed), one(position), one(word), some)[0].numpy()
    assert np.array_equal(at, found[[10, 0, 7, 7]])


def test_target_numbers_are_those_of_plain_sampling() -> None:
    """Whatever the distance: coupled drafts share them."""
    for distance in (1, 7):
        found = streams.gumbel(one(5), one(100 - distance), one(distance), Role.TARGET, 9)
        np.testing.assert_allclose(
            found[0].numpy(), gumbel_on_host(5, 100, Role.TARGET, 9), rtol=1e-15
        )


@pytest.mark.parametrize("role", list(Role))
def test_noise_of_some_tokens_is_that_of_all(role: Role) -> None:
    seeds, anchors, far = torch.arange(4), torch.arange(4) * 1000, torch.tensor([1, 2, 3, 9])
    ids = torch.tensor([[4, 0], [1, 1], [8, 3], [2, 6]])
    every = streams.gumbel(seeds, anchors, far, role, 9)
    assert torch.equal(streams.gumbel_at(seeds, anchors, far, role, ids), every.gather(1, ids))


@given(st.data())
def test_no_two_streams_have_one_counter(data: st.DataObject) -> None:
    """(position, role word) of two different (anchor, distance, role), TARGET of one position aside."""
    case = st.tuples(st.integers(0, 50), st.integers(1, 9), st.sampled_from(list(Role)))
    first, second = data.draw(case), data.draw(case)

    def counter(anchor: int, distance: int, role: Role) -> tuple[int, int]:
        return anchor + distance, int(streams.role_words(role, one(distance)))

    def stream(anchor: int, distance: int, role: Role) -> tuple[int, ...]:
        return (anchor + distance,) if role is Role.TARGET else (anchor, distance, int(role))

    assert (counter(*first) == counter(*second)) == (stream(*first) == stream(*second))


def test_role_words() -> None:
    for role in list(Role)[1:]:
        for distance in (1, 7, 300):
            assert streams.role_words(role, one(distance)).item() == streams.role_word(
                role, distance
            )
    assert streams.role_word(Role.TARGET, 0) == 0
    for role, distance in ((Role.TARGET, 1), (Role.DRAFT, 0), (Role.DRAFT, 1 << 24)):
        with pytest.raises(ValueError, match="distance"):
            streams.role_word(role, distance)


def test_roles_and_cycles_are_uncorrelated() -> None:
    """The numbers of one position under every role, and proposed from three anchors: |r| below 5 sigma
    over 20,000 requests, and no number in common."""
    count = 20_000
    seeds = torch.arange(count) + 12345
    named = {}
    for role in Role:
        for distance in (1, 2, 3) if role is not Role.TARGET else (1,):
            anchors = torch.full((count,), 500 - distance)
            far = torch.full((count,), distance)
            words = streams.role_words(role, far)
            drawn = noise.uniforms(seeds, anchors + far, words, 1)[:, 0]
            named[role.name, distance] = drawn.numpy()
    found = list(named.values())
    together = np.corrcoef(np.stack(found))
    assert np.abs(together - np.eye(len(found))).max() < 5 / math.sqrt(count)
    for values in found:
        counts = np.histogram(values, bins=20, range=(0, 1))[0]
        assert ((counts - count / 20) ** 2 / (count / 20)).sum() < 58  # 1e-5 of chi-square, 19


def test_acceptance_numbers_are_those_of_their_position() -> None:
    drawn = streams.uniforms(torch.tensor([3, 4]), torch.tensor([10, 2**33]), 4, Role.ACCEPT)
    for i, (seed, anchor) in enumerate([(3, 10), (4, 2**33)]):
        for k in range(4):
            word = streams.role_word(Role.ACCEPT, k + 1)
            assert drawn[i, k] == host.uniforms(seed, anchor + 1 + k, word, 1)[0]
