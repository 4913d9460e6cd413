"""FFTs of several dims as those of one dim each, so that only this one has to be whole.

before: `%1 = fft %0 [8, 16]`
after:  `%1 = fft %0 [16]; %2 = transpose %1 [1, 0]; %3 = fft %2 [8]; %4 = transpose %3 [1, 0]`

Where nothing is exchanged between them, one device's program gets the FFT of several dims back
(`spmd.lowering.rewrites.join_ffts`).
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.frontend.canonicalize.site import Site, canonical
from spmd.ir.program import Value
from spmd.ir.types import Opaque


@canonical("stablehlo.fft")
def _fft(site: Site) -> Sequence[Value]:
    b, attrs, rank = site.b, site.attrs, site.result.rank
    lengths, kind = attrs["fft_length"], attrs["fft_type"]
    if len(lengths) == 1:
        return b.repeat(site.op.kind, site.operands)
    # Real values become complex along the last dim, which is the first to be transformed, and
    # complex values real along the last one, too, at the end.
    complex_kind = Opaque(kind.text.replace("RFFT", "FFT"))
    dims = range(rank - len(lengths), rank)
    (x,) = site.operands
    for dim in dims if "IRFFT" in kind.text else reversed(dims):
        length = (lengths[dim - rank],)
        if dim == rank - 1:
            type_ = (
                b.types[x].with_dim(dim, site.result.shape[dim])._replace(dtype=site.result.dtype)
            )
            (x,) = b.op(site.op.name, (x,), (type_,), {"fft_length": length, "fft_type": kind})
            continue
        swap = [*range(rank)]
        swap[dim], swap[-1] = rank - 1, dim
        x = b.transpose(x, swap)
        made = {"fft_length": length, "fft_type": complex_kind}
        (x,) = b.op(site.op.name, (x,), (b.types[x],), made)
        x = b.transpose(x, swap)
    return (x,)
