"""The names that KServe's protocol has for dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from serving.engine.infer import Infer
from serving.errors import ServingError

DATATYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
NAMES = {dtype.name: name for name, dtype in DATATYPES.items()}


def check_datatypes(infer: Infer) -> None:
    """Checks that KServe's protocol can name all dtypes of a model.

    Raises:
      ServingError: it has no name for one of them.
    """
    for spec in (*infer.inputs, *infer.outputs):
        if spec.dtype not in NAMES:
            raise ServingError(
                f"tensor {spec.name}: {spec.dtype} cannot be served; these can: {', '.join(NAMES)}"
            )
