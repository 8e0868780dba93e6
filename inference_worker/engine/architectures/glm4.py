"""GLM-4 of 2025."""

from __future__ import annotations

from inference_worker.engine.architectures.decoder import Decoder, NormNames


class Glm4Model(Decoder):
    """GLM-4: norms around each block, fused feed-forward weights, and partial rotation of neighboring dimensions."""

    norms = NormNames("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    mlp_names = ("gate_up_proj", "down_proj")
    rotates_neighbors = True
