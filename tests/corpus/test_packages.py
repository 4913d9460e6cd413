"""Models and training steps of other people's packages: partitioned equals `jax.jit`."""

import pytest

from benchmarks.corpus.packages.catalog import MODULES, entries

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("module", MODULES)
def test_a_package_computes_what_it_does_under_jit(module: str, subtests: pytest.Subtests) -> None:
    try:
        found = entries(module)
    except ImportError as error:
        pytest.skip(f"{error}: pip install -e '.[packages]'")
    for entry in found:
        with subtests.test(entry.name):
            entry.compare_numbers()
