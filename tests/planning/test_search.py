"""The one search: the fastest that fits, what candidates have to win, and what is said of them."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.errors import PlanError
from spmd.planning.search import Candidate, Search


class Made(NamedTuple):
    seconds: float
    bytes: int


MADE = st.builds(Made, st.integers(1, 9).map(float), st.integers(1, 9))


@given(st.lists(MADE, min_size=1, max_size=6), st.integers(0, 10))
def test_the_best_is_the_fastest_that_fits_or_misses_the_least(
    tried: list[Made], limit: int
) -> None:
    search = Search(limit, tried)
    fitting = [made for made in tried if made.bytes <= limit]
    if fitting:
        assert search.best.seconds == search.seconds == min(made.seconds for made in fitting)
        assert search.best.bytes <= limit
    else:
        assert search.best.bytes == min(made.bytes for made in tried)
        assert search.seconds == float("inf")


def refuse() -> Made:
    raise PlanError("no plan keeps to 5 B")


def never() -> Made:
    raise AssertionError("it is made, and can win nothing")


@pytest.mark.parametrize(
    ("candidate", "is_taken", "said"),
    [
        (Candidate("a", lambda: Made(8.0, 5)), True, "a: 8e+03 ms predicted instead of 1e+04 ms"),
        (Candidate("a", lambda: Made(8.0, 5), price=3.0), False, "have to win 3e+03 ms"),
        (Candidate("a", lambda: Made(12.0, 5)), False, "another one is faster"),
        (Candidate("a", lambda: Made(8.0, 6)), False, "it does not fit in memory"),
        (Candidate("a", None), False, "it does not fit in memory"),
        (Candidate("a", refuse), False, "no plan keeps to 5 B"),
        (Candidate("a", never, price=2.0, hope=1.0), False, "would have to win 2e+03 ms"),
    ],
)
def test_candidates_win_their_price_and_fit(
    candidate: Candidate[Made], is_taken: bool, said: str
) -> None:
    plain = Made(10.0, 5)
    search = Search(5, [plain])
    made = search.weigh(candidate)
    assert (search.best is made) == is_taken and (search.best is plain) != is_taken
    (weighed,) = search.weighed
    assert said in weighed.text and bool(weighed.refusal) != is_taken


def test_the_first_candidate_may_be_refused() -> None:
    search = Search[Made](5)
    assert search.weigh(Candidate("a", refuse)) is None and not search.tried
    assert search.weighed[0].refusal == "no plan keeps to 5 B"
    assert search.weigh(Candidate("b", lambda: Made(1.0, 5))) is search.best
