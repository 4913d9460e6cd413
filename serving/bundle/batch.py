"""The batch of a function: the symbol that is the first dim of all that it takes and gives."""

from spmd.frontend.sizes import symbols_in
from spmd.serving.bundle.function import BundleError
from spmd.serving.bundle.manifest import Entrypoint, LeafEntry, Manifest


def batch_symbol(manifest: Manifest) -> str:
    """The symbol that sizes of batches are for: the first dim of an input of the primary function.

    Raises:
      BundleError: it has none.
    """
    entry = manifest.functions[manifest.primary]
    firsts = [leaf.shape[0] for leaf in entry.inputs if leaf.shape]
    symbol = next((dim for dim in firsts if dim in manifest.symbols), None)
    if symbol is None:
        shapes = ", ".join(f"{leaf.path} {_shown(leaf)}" for leaf in entry.inputs[:4]) or "nothing"
        raise BundleError(
            f"{entry.name} has no batch: it takes {shapes}, and the first dim of none is a symbol; "
            "export it with one (jax.export.symbolic_shape), or leave out the sizes of batches"
        )
    return str(symbol)


def batch_sizes(manifest: Manifest, most: int) -> tuple[int, ...]:
    """Powers of two up to a number, and it itself, as far as the batch may have them.

    Raises:
      BundleError: there is no batch, or it may have none of them.
    """
    symbol = manifest.symbols[batch_symbol(manifest)]
    numbers = {*(1 << power for power in range(most.bit_length())), most}
    sizes = tuple(sorted(size for size in numbers if symbol.allows(size)))
    if not sizes:
        raise BundleError(f"batches cannot be up to {most}: the size of one is {symbol}")
    return sizes


def why_not_joined(entry: Entrypoint, symbol: str) -> str:
    """Why rows of several calls cannot be one call's rows; empty if shapes say nothing against it.

    Args:
      symbol: the batch.
    """
    if entry.leaves("state"):
        return f"{entry.name} has a state, which each call changes"
    for what, leaves in (("input", entry.inputs), ("output", entry.outputs)):
        for leaf in leaves:
            if not leaf.shape or leaf.shape[0] != symbol:
                return f"the first dim of {what} {leaf.path} {_shown(leaf)} is not {symbol}"
            if symbol in symbols_in(leaf.shape[1:]):
                return f"{what} {leaf.path} {_shown(leaf)} has {symbol} in another dim as well"
    return ""


def _shown(leaf: LeafEntry) -> str:
    return f"[{', '.join(map(str, leaf.shape))}]"
