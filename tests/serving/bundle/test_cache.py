"""What a folder keeps of a bundle's programs reads back as it was."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import spmd
from serving.bundle.cache import Cache
from spmd.lowering.emitted import Emitted
from spmd.lowering.execute import compile_emitted


def test_constants_in_pieces_are_kept(mesh: spmd.Mesh, tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((512, 256), np.float32)
    x = np.ones((512, 256), np.float32)
    module = jax.jit(lambda x: x * table).lower(x).as_text()
    made = spmd.lower_stablehlo(module, mesh, [("data", "model")]).stages.emitted

    def kept(make_again: bool) -> Emitted:
        def make() -> Emitted:
            return made if make_again else pytest.fail("it was kept")

        return Cache(tmp_path).emitted(module.encode(), mesh, spmd.Options(), (), make)

    assert kept(True).constants == kept(False).constants == made.constants
    assert len(made.constants) == 1 and made.constants[0].sharding.dims != ((), ())
    np.testing.assert_array_equal(compile_emitted(kept(False), {})(x)[0], table)
