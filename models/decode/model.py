"""What a language model has to say of itself, to be served.

Shapes are in the names:

    A groups    B slots of a group    R rows of a group    X rows of all groups    N pages of a
    group's pool    M pages of a slot's table    H hidden width    V vocabulary
"""

from collections.abc import Mapping
from typing import Any, Protocol

from spmd.models.decode.shape import ServingShape

Rows = Mapping[str, Any]
"""The tokens that a step runs; they are sorted by slots, and by positions within one.

- `tokens` (A, R): ids.
- `positions` (A, R): where they are in their sequences, from 0 on; -1 for padding.
- `slots` (A, R): which slots of their group they are in.
- `first` (A, B + 1): the rows of slot b of a group are `first[b]` to `first[b + 1] - 1`.
- `table` (A, B, M): the pages of each slot: position t is in the page `table[a, b, t // page]`.
- `adapters` (A, B), where there is room for some: the place of each slot's adapter; -1 for none.
"""


class RowsModel(Protocol):
    """A causal language model over rows of tokens; its functions are pure and know no mesh.

    One that can be served with adapters has `adapter_leaves(places, rank)`, too: a tree of
    `StateLeaf`s whose first dim is the places. `run` finds them among its weights.

    Attributes:
      vocab_size: V.
      specs: the beginning of a path, with `*` for numbers, -> spec of the weights (`weights/...`)
        and of the cache (`state/cache/...`). The axis `data` splits groups, `model` whatever else;
        what has no spec is left to the compiler.
      unread: beginnings of the paths of weights of which a step reads few rows, as of a table of
        embeddings: `("weights/embed/",)`.
    """

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def specs(self) -> Mapping[str, tuple[Any, ...]]:
        """How weights and cache are split."""

    @property
    def unread(self) -> tuple[str, ...]:
        """Weights of which a step reads next to nothing."""

    def cache_leaves(self, shape: ServingShape, pages: Any) -> Any:
        """What the model keeps of the tokens that it has seen, in pages.

        Args:
          pages: N, a number or a symbol.

        Returns:
          A tree of `StateLeaf`s (A, N, ...).
        """

    def run(self, weights: Any, cache: Any, rows: Rows) -> tuple[Any, Any]:
        """Runs rows through the model.

        A row sees the rows of its slot up to its own, of this call and of those before it. A slot
        whose first row has the position 0 begins anew, whatever its pages hold.

        Args:
          cache: as `cache_leaves` says.
          rows: see `Rows`.

        Returns:
          (hidden states (A, R, H) behind the last layer, the cache with these rows in it).
        """

    def logits(self, weights: Any, x_XH: Any) -> Any:
        """Logits (X, V) in float32, of hidden states that `run` returned."""
