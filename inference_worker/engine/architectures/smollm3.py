"""SmolLM3."""

from __future__ import annotations

from inference_worker.engine.architectures.decoder import Decoder


class SmolLM3Model(Decoder):
    """SmolLM3: as Llama, with some layers without rotary embedding."""
