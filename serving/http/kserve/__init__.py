"""KServe's open inference protocol, version 2, with Triton's extensions.

POST /v2/models/NAME/infer
{"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}]}
"""

from spmd.serving.http.kserve.routes import ROUTES

__all__ = ["ROUTES"]
