"""`map` runs its body on every element, so it is its body on whole tensors.

before: `%2 = stablehlo.map %0, %1 ({ (a, b): a * b + 1 }) : tensor<4x6xf32>`
after:  `%2 = %0 * %1; %3 = splat 1; %4 = %2 + %3`
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.frontend.canonicalize.site import Site, canonical
from spmd.ir.dialect.bodies import inline_elementwise, is_elementwise
from spmd.ir.program import Body, Value


@canonical("stablehlo.map")
def _map(site: Site) -> Sequence[Value]:
    body: Body = site.attrs["body"]
    if not is_elementwise(body):
        site.fail("its body is not elementwise", "use elementwise ops in the body")
    return inline_elementwise(site.b, body, site.operands, site.result.shape)
