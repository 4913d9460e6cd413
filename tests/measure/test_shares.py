"""Every moment of a device's time is somebody's, and only once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.measure.profile import Share, shares

SPANS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 6)).map(
        lambda s: (s[0], float(s[1]), float(s[1] + s[2]))
    ),
    max_size=8,
)


def test_what_comes_first_hides_what_runs_beside_it():
    dot, gather, copy = (0, 0.0, 4.0), (2, 3.0, 7.0), (1, 6.0, 8.0)
    assert shares([dot, gather, copy]) == [Share(4, 0), Share(2, 2), Share(2, 0)]


def test_equals_share():
    assert shares([(0, 0.0, 2.0), (0, 0.0, 4.0)]) == [Share(1, 0), Share(3, 0)]


@given(SPANS)
def test_moments_are_counted_once(spans):
    found = shares(spans)
    covered = [t for t in range(30) if any(a <= t < b for _, a, b in spans)]
    assert sum(share.seconds for share in found) == pytest.approx(len(covered))
    for rank in range(3):
        own = [t for t in covered if any(r == rank and a <= t < b for r, a, b in spans)]
        ours = [share for (r, _, _), share in zip(spans, found, strict=True) if r == rank]
        total = sum(share.seconds + share.hidden for share in ours)
        assert total == pytest.approx(len(own))
    first = min((r for r, a, b in spans if b > a), default=0)
    assert not any(s.hidden for (r, _, _), s in zip(spans, found, strict=True) if r == first)
