"""Types of request parameters with their limits, from which `make docs-openapi` writes docs/openapi.yaml.

The limits only document: the readers check them, and answer with an error that names the parameter. The types of
sampling parameters are in `inference_worker.contract.request`.
"""

from __future__ import annotations

from typing import Annotated, Any

from inference_worker.contract.request import document

MAX_LABEL_CHARACTERS = 512
MAX_METADATA = 16
MAX_METADATA_KEY_CHARACTERS = 64

Positive = Annotated[int, document(minimum=1)]
NotNegative = Annotated[int, document(minimum=0)]
NotEmpty = Annotated[str, document(minLength=1)]
Label = Annotated[str, document(maxLength=MAX_LABEL_CHARACTERS)]
LabelMap = Annotated[
    dict[str, Label],
    document(maxProperties=MAX_METADATA, propertyNames={"maxLength": MAX_METADATA_KEY_CHARACTERS}),
]
ObjectSchema = Annotated[
    dict[str, Any],
    document(required=["type"], properties={"type": {"const": "object"}}),
]
FunctionName = Annotated[str, document(pattern="^[A-Za-z0-9_-]{1,64}$")]
