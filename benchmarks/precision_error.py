"""Measures the error of 16-bit training: a LoRA's gradients, in narrow models with random weights, on the CPU.

usage: python benchmarks/precision_error.py [--tokens 128]

Prints, for each family and format, the relative difference of the output and of all gradients from those in float32.
The loss is scaled as in training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from diffusers import CosmosTransformer3DModel, FluxTransformer2DModel, UNet2DConditionModel  # noqa: E402
from peft import LoraConfig, inject_adapter_in_model  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from lora_rocm.families.common.dit.blocks import (
    cosmos,
    flux,  # noqa: E402
)
from lora_rocm.families.common.unet import fused_unet  # noqa: E402
from lora_rocm.kernels.lora_layer import with_lean_layers  # noqa: E402

HEADS = 3
FORMATS = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Pass = Callable[[nn.Module, torch.dtype], Tensor]


def flux_model(tokens: int) -> tuple[nn.Module, Pass, Callable[[nn.Module], None]]:
    """Two blocks of each kind of FLUX.1."""
    model = FluxTransformer2DModel(num_layers=2, num_single_layers=2, num_attention_heads=HEADS)
    rng = torch.Generator().manual_seed(1)
    image, text = torch.randn(1, tokens, 64, generator=rng), torch.randn(1, 32, 4096, generator=rng)
    pooled, places = torch.randn(1, 768, generator=rng), torch.arange(3 * tokens).view(tokens, 3).float()

    def run(model: Any, dtype: torch.dtype) -> Tensor:
        given = (image.to(dtype), text.to(dtype), pooled.to(dtype), torch.tensor([0.4], dtype=dtype))
        output: Tensor = model(*given, places, torch.zeros(32, 3), return_dict=False)[0]
        return output

    return model, run, lambda model: flux.fuse(model, "eager")


def anima_model(tokens: int) -> tuple[nn.Module, Pass, Callable[[nn.Module], None]]:
    """Four blocks of Anima."""
    sizes = {"in_channels": 16, "out_channels": 16, "num_attention_heads": HEADS, "attention_head_dim": 128}
    sizes |= {"num_layers": 4, "text_embed_dim": 1024, "adaln_lora_dim": 256}
    model = CosmosTransformer3DModel(
        max_size=(4, 64, 64), concat_padding_mask=False, extra_pos_embed_type=None, **sizes
    )
    rng, side = torch.Generator().manual_seed(1), 2 * int(tokens**0.5)
    image, text = torch.randn(1, 16, 1, side, side, generator=rng), torch.randn(1, 32, 1024, generator=rng)

    def run(model: Any, dtype: torch.dtype) -> Tensor:
        output: Tensor = model(image.to(dtype), torch.tensor([0.4], dtype=dtype), text.to(dtype), return_dict=False)[0]
        return output

    return model, run, lambda model: cosmos.fuse(model, "eager")


def sdxl_model(tokens: int) -> tuple[nn.Module, Pass, Callable[[nn.Module], None]]:
    """A UNet with SDXL's structure, with a transformer block in each place."""
    kinds = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
    model = UNet2DConditionModel(
        block_out_channels=(64, 128, 256),
        down_block_types=kinds,
        up_block_types=tuple(kind.replace("Down", "Up") for kind in reversed(kinds)),
        attention_head_dim=(1, 2, 4),
        cross_attention_dim=2048,
        use_linear_projection=True,
        layers_per_block=1,
    )
    rng, side = torch.Generator().manual_seed(1), int(tokens**0.5) // 4 * 4
    image, text = torch.randn(1, 4, side, side, generator=rng), torch.randn(1, 77, 2048, generator=rng)

    def run(model: Any, dtype: torch.dtype) -> Tensor:
        output: Tensor = model(image.to(dtype), torch.tensor([400]), text.to(dtype)).sample
        return output

    return model, run, lambda model: fused_unet.fuse(model, "eager")


MODELS = {"flux": flux_model, "anima": anima_model, "sdxl": sdxl_model}


def prepared(model: nn.Module) -> nn.Module:
    """The model with random weights and a LoRA."""
    torch.manual_seed(0)
    model.requires_grad_(False)
    targets = r".*\.(to_q|to_k|to_v|to_out\.0|add_[qkv]_proj|to_add_out)"
    inject_adapter_in_model(with_lean_layers(LoraConfig(r=16, lora_alpha=16, target_modules=targets)), model)
    for parameter in model.parameters():
        parameter.data.normal_(std=parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.1)
    return model


def outcome(model: nn.Module, run: Pass, dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor]:
    """(output, gradients as one vector) in float32."""
    output = run(model, dtype)
    model.zero_grad()
    (output.float().square().mean() * scale).backward()
    gradients = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
    return output.detach().float(), torch.cat(gradients) / scale


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    for name, made in MODELS.items():
        found = {}
        for kind, dtype in FORMATS.items():
            model, run, fuse = made(options.tokens)
            fuse(prepared(model))
            found[kind] = outcome(nn.Module.to(model, dtype), run, dtype, 1024.0 if kind == "fp16" else 1.0)
        for kind in ("fp16", "bf16"):
            pairs = zip(found[kind], found["no"], strict=True)
            output, gradients = (float((one - other).norm() / other.norm()) for one, other in pairs)
            print(f"{name:6}{kind}: output {output:.2%}, gradients {gradients:.2%}", flush=True)


if __name__ == "__main__":
    main()
