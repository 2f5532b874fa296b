"""Tiny language models with random weights and a tokenizer of bytes, as folders of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

SPECIAL = ("<|end|>", "<|start|>")
THINK = "<think>"
CHAT = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
STRIPPING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""As Qwen3's: earlier answers lose their thoughts."""
SIZE: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
TYPES = ["sliding_attention", "full_attention"]
GEMMA = {**SIZE, "sliding_window": 16, "layer_types": TYPES, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA4: dict[str, Any] = {
    **GEMMA,
    "vocab_size_per_layer_input": 272,
    "hidden_size_per_layer_input": 0,
    "global_head_dim": 16,
    "final_logit_softcapping": 30.0,
}
GEMMA4_VISION = {**VISION, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {**SIZE, "rope_parameters": LLAMA3}),
    "smollm": (LlamaForCausalLM, LlamaConfig, {**SIZE, "tie_word_embeddings": True}),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, {**SIZE, "no_rope_layer_interval": 2}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {**SIZE, "attention_dropout": 0.5}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**SIZE, "tie_word_embeddings": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {**SIZE, "sliding_window": 16}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {**SIZE, "resid_pdrop": 0.5}),
    "gemma3_text": (Gemma3ForCausalLM, Gemma3TextConfig, {**GEMMA, "final_logit_softcapping": 2.0}),
    "gemma3": (
        Gemma3ForConditionalGeneration,
        Gemma3Config,
        {"text_config": GEMMA, "vision_config": VISION, "mm_tokens_per_image": 4},
    ),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, SIZE),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {**SIZE, **MOE}),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {**SIZE, **MOE, "num_experts": 4, "moe_intermediate_size": 24}),
    "gemma4": (
        Gemma4ForConditionalGeneration,
        Gemma4Config,
        {"text_config": {**GEMMA4, "use_bidirectional_attention": "vision"}, "vision_config": GEMMA4_VISION},
    ),
    "gemma4_per_layer": (
        Gemma4ForConditionalGeneration,
        Gemma4Config,
        {
            "text_config": {
                **GEMMA4,
                "num_hidden_layers": 4,
                "layer_types": [*TYPES, *TYPES],
                "hidden_size_per_layer_input": 8,
                "num_kv_shared_layers": 2,
            },
            "vision_config": GEMMA4_VISION,
        },
    ),
    "gemma4_experts": (
        Gemma4ForConditionalGeneration,
        Gemma4Config,
        {
            "text_config": {
                **GEMMA4,
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 24,
            },
            "vision_config": GEMMA4_VISION,
        },
    ),
    "mistral3": (
        Mistral3ForConditionalGeneration,
        Mistral3Config,
        {
            "text_config": {**SIZE, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8},
        },
    ),
}
"""Name -> class, class of its config, and its values."""


GPT_OSS: dict[str, Any] = {
    **SIZE,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "layer_types": TYPES,
    "head_dim": 16,
    "swiglu_limit": 1.0,
}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def write_tiny_gpt_oss(folder: Path, template: str | None = CHAT, **changed: Any) -> Path:
    """Write a gpt-oss as it is published: its experts are in MXFP4, everything else in bfloat16."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = GptOssForCausalLM(GptOssConfig(**{**GPT_OSS, **changed}))
        for name, parameter in model.named_parameters():
            parameter.data.normal_(std=1.0 if "sinks" in name else 0.3 if parameter.ndim > 1 else 0.1)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = mxfp4(tensor.transpose(1, 2).contiguous())
        else:
            tensors[name] = (tensor.abs() + 0.5 if "norm" in name else tensor).bfloat16().contiguous()
    model.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    model.config.dtype = "bfloat16"
    model.config.architectures = ["GptOssForCausalLM"]
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tiny_tokenizer(template).save_pretrained(folder)
    return folder


def mxfp4(weight_EOI: Tensor) -> tuple[Tensor, Tensor]:
    """(blocks [E, O, G, 16], scales [E, O, G]) of the layout that gpt-oss is published in: uint8 both."""
    groups = weight_EOI.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2  # the largest number is 1.5 * 2**2
    scaled = groups / torch.exp2(exponents)[..., None]
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def write_tiny_llm(folder: Path, name: str = "llama", template: str | None = CHAT, **changed: Any) -> Path:
    """Write a model with its tokenizer."""
    cls, config, values = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = cls(config(**{**values, **changed}))
        for parameter in model.parameters():  # a fresh model's logits are nearly alike
            parameter.data.mul_(3.0)
    model.save_pretrained(folder, max_shard_size="50kB" if name == "smollm3" else "5GB")
    tiny_tokenizer(template).save_pretrained(folder)
    return folder


def tiny_tokenizer(template: str | None = CHAT) -> PreTrainedTokenizerFast:
    """A tokenizer with bytes and the special ones as tokens; "<think>" is a token, and none of the special."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(("<pad>", SPECIAL[0], SPECIAL[1], THINK, *letters))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=SPECIAL[0], additional_special_tokens=[SPECIAL[1]]
    )
    made.add_tokens([THINK])
    made.chat_template = template
    return made


def write_chats(path: Path, *chats: list[tuple[str, str]]) -> Path:
    """Write conversations of (role, content) as JSON Lines."""
    rows = [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in chats]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
