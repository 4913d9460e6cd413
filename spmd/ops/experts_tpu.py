"""Products of rows by their experts on TPUs: `ragged_dot`, but for the gradient of the weights.

Of that XLA makes, on TPUs, a product over all rows for each expert, with the rows of the others
hidden: of four experts, four times the arithmetic. jax's kernel (megablox) takes each row once.
"""

from __future__ import annotations

from typing import Any

import jax

from spmd.ops import experts_local

ROWS = (512, 256, 128)  # rows of a tile; the first that divides the rows is taken

WIDTHS = (1024, 512, 256, 128)
"""Likewise of the widths of rows and experts. Larger tiles do not fit a TPU's fast memory."""

INTERPRET = False  # whether to run the kernel step by step on any platform, for tests


@jax.custom_vjp
def product(x_RI: Any, weights_EOI: Any, sizes_E: Any) -> Any:
    """As `experts_local.ragged`."""
    return experts_local.ragged(x_RI, weights_EOI, sizes_E)


def _forward(x_RI: Any, weights_EOI: Any, sizes_E: Any) -> Any:
    return product(x_RI, weights_EOI, sizes_E), (x_RI, weights_EOI, sizes_E)


def _backward(kept: Any, dout_RO: Any) -> Any:
    x_RI, weights_EOI, sizes_E = kept
    tiles = _tiles(x_RI.shape, weights_EOI.shape)
    if tiles is None:
        _, pull = jax.vjp(lambda x, w: experts_local.ragged(x, w, sizes_E), x_RI, weights_EOI)
        return *pull(dout_RO), None
    _, pull = jax.vjp(lambda x_RI: experts_local.ragged(x_RI, weights_EOI, sizes_E), x_RI)
    return *pull(dout_RO), _outer(dout_RO, x_RI, sizes_E, weights_EOI.dtype, tiles), None


product.defvjp(_forward, _backward)


def _tiles(rows: tuple[int, ...], weights: tuple[int, ...]) -> tuple[int, int, int] | None:
    """The kernel's tiles of rows and of both widths; None where it is of no use, or none fit."""
    count, outer, inner = weights
    wanted = ((rows[0], ROWS), (outer, WIDTHS), (inner, WIDTHS))
    found = [next((tile for tile in tiles if not size % tile), None) for size, tiles in wanted]
    if count == 1 or None in found:
        return None
    length, height, width = (tile for tile in found if tile is not None)
    return length, height, width


def _outer(dout_RO: Any, x_RI: Any, sizes_E: Any, dtype: Any, tiles: tuple[int, int, int]) -> Any:
    """(E, O, I): for each expert the sum of its rows' outer products."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm  # takes long to import

    return tgmm(
        dout_RO.swapaxes(0, 1),
        x_RI,
        sizes_E,
        preferred_element_type=dtype,
        tiling=tiles,
        interpret=INTERPRET,
    )
