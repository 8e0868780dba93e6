"""The order of GET /v1/models."""

from __future__ import annotations

from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.http.endpoints.models import order_models


def test_models_that_generate_text_come_first_in_the_order_of_the_settings() -> None:
    sizes = {"a-encoder": (384,), "b": (), "c": (), "added": (), "policy": ()}
    models = {
        name: ServedModel(name, None, 100, 10, 0, vector_sizes=vector_sizes)  # type: ignore[arg-type]  # no tokenizer
        for name, vector_sizes in sizes.items()
    }
    ordered = order_models(models, ["c", "a-encoder", "b"])
    assert list(ordered) == ["c", "b", "added", "policy", "a-encoder"]
    assert ordered == models
