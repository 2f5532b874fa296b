"""The shape of Llama 3.1 8B with random weights, and the batch and LoRA for the measured step."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROWS, TOKENS, RANK = 2, 2048, 16
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYERS = rf".*\.({'|'.join(PROJECTIONS)})"
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
"""The config of meta-llama/Llama-3.1-8B."""
TOY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
TOY |= {"num_key_value_heads": 2, "head_dim": 16}


def random_model(config: dict[str, Any], device: torch.device) -> LlamaForCausalLM:
    """Return transformers' model of ``config`` on ``device`` in bf16, frozen, with random weights made there."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="sdpa", use_cache=False))
    rotary = model.model.rotary_emb
    model = model.to(torch.bfloat16).to_empty(device=device).requires_grad_(False)
    with torch.device(device):
        model.model.rotary_emb = type(rotary)(model.config)
    for parameter in model.parameters():
        parameter.normal_(0, 0.02) if parameter.ndim > 1 else parameter.fill_(1)
    return model
