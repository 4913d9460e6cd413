"""Dims as jax prints them have the sizes that jax says."""

import re

import jax
import pytest
from jax import export

from spmd.errors import FrontendError
from spmd.frontend.sizes import size_of, sizes_of, symbols_in


def test_dims_have_the_sizes_that_jax_gives_them() -> None:
    n, m = export.symbolic_shape("n, m")
    dims = [n, 2 * n + m, n * n * 3, n // 4, (n + m) % 3, -n + 3 * m, m - n + 4, n * m // 2 - 1]
    dims += [jax.numpy.zeros((3,)).shape[0], max(n, 1)]
    values = {"n": 6, "m": 10}
    wanted = [6, 22, 108, 1, 1, 24, 8, 29, 3, 6]
    assert list(sizes_of([d if isinstance(d, int) else str(d) for d in dims], values)) == wanted
    assert symbols_in(["2*n", 4, "floordiv(m, 8) + n^2"]) == ("m", "n")


NO_SIZES = ("n +", "__import__('os').getpid()", "n.real", "1.5", "True", "n" * 2000, "",
            "(" * 500 + "n" + ")" * 500)  # fmt: skip


@pytest.mark.parametrize(
    ("dim", "message"),
    [
        ("k", "the symbol k of the dim k has no value"),
        ("n - 9", "the dim n - 9 would be -3"),
        ("mod(n, 0)", "has no size"),
        ("n^99999999", "has no size"),
        ("(n^40)^40", "has no size"),
        *((dim, "is no size of a dim") for dim in NO_SIZES),
    ],
)
def test_other_text_is_refused(dim: str, message: str) -> None:
    with pytest.raises(FrontendError, match=re.escape(message)):
        size_of(dim, {"n": 6})
