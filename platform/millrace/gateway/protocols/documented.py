"""Types of request parameters with their ranges, from which `make docs-openapi` writes docs/openapi.yaml.

The ranges only document: the readers check them, and answer with an error that names the parameter.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from inference_worker.contract.validation import MAX_TEMPERATURE

MAX_LABEL_CHARACTERS = 512
MAX_METADATA = 16
MAX_METADATA_KEY_CHARACTERS = 64


def document(**keywords: Any) -> msgspec.Meta:
    """Return an annotation that adds JSON Schema keywords to the document."""
    return msgspec.Meta(extra_json_schema=keywords)


Positive = Annotated[int, document(minimum=1)]
NotNegative = Annotated[int, document(minimum=0)]
NotEmpty = Annotated[str, document(minLength=1)]
Temperature = Annotated[float, document(minimum=0, maximum=MAX_TEMPERATURE)]
TopP = Annotated[float, document(exclusiveMinimum=0, maximum=1)]
Penalty = Annotated[float, document(minimum=-2, maximum=2)]
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
