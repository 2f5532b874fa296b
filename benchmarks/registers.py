"""Registers, LDS and occupancy of every Triton kernel on AMD GPUs, as the compiler counts them. Needs no GPU.

usage: python benchmarks/registers.py [--write] [--cards gfx1100,gfx942] [--warps 4]

The launches come from training steps of SDXL and SD 1.5, from blocks of Z-Image, FLUX.1, Anima and language
models, forward and backward, without weights or memory, and from products in eight bits. The models are on the meta
device, and every launch is compiled with the launching code's arguments. ``--write`` records the counts of the
installed Triton in ``benchmarks/registers``; a test compares with that file. ``--warps`` only prints the counts with
another number of warps for the kernels of large images.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import triton  # noqa: E402
from diffusers import UNet2DConditionModel  # noqa: E402
from diffusers.models.transformers.transformer_cosmos import CosmosTransformerBlock  # noqa: E402
from diffusers.models.transformers.transformer_flux import (  # noqa: E402
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import Gemma3TextConfig, LlamaConfig  # noqa: E402
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from lora_rocm.families.causal_lm import fused_blocks  # noqa: E402
from lora_rocm.families.common.dit.blocks import (
    cosmos,
    flux,
    z_image,  # noqa: E402
)
from lora_rocm.families.common.unet import fused_unet  # noqa: E402
from lora_rocm.families.sd.family import LAYOUT_SD15  # noqa: E402
from lora_rocm.families.sdxl.family import LAYOUT as LAYOUT_SDXL  # noqa: E402
from lora_rocm.hardware.archs import BY_GFX, triton_takes  # noqa: E402
from lora_rocm.kernels import backend, group_norm_triton  # noqa: E402
from lora_rocm.kernels.backend import LAUNCH  # noqa: E402
from lora_rocm.kernels.eight_bit import CODES, INT8, TINY  # noqa: E402
from lora_rocm.kernels.eight_bit_triton import launch_rows, launch_sums, launch_turn  # noqa: E402
from lora_rocm.kernels.fingerprint_triton import launch_compare, launch_fingerprints, launch_renew  # noqa: E402
from lora_rocm.kernels.quantised import quantised  # noqa: E402
from lora_rocm.kernels.rotation import GROUPS  # noqa: E402
from lora_rocm.kernels.token_loss import to_loss_gradient  # noqa: E402

RECORDED = Path(__file__).parent / "registers"
COMMAND = "python benchmarks/registers.py --write"
META = torch.device("meta")
LAYOUTS = {"sdxl": LAYOUT_SDXL, "sd15": LAYOUT_SD15}
SDXL_STEP = ("sdxl", 1, 1024, 1024)
FLUX_BLOCKS = (FluxTransformerBlock, FluxSingleTransformerBlock)
LANGUAGE_MODEL = ("language model", 1, 2048, 0)
STEPS = (
    SDXL_STEP,
    ("sdxl", 4, 1024, 1024),
    ("sdxl", 1, 1152, 896),
    ("sd15", 1, 512, 512),
    ("sd15", 4, 512, 768),
    LANGUAGE_MODEL,
)
"""(family, batch size, height and width in pixels; of a language model tokens in place of the height)"""


WORD_COUNTS = ((16,) * 6, (2**30, 16), (16, 2**30, 16), (2**31, 16), (16, 2**31))
"""Sizes of the buffers of one fingerprint. Triton compiles buffers of more than 2 GiB, and more than 2**31 words, apart
from others.
"""


EIGHT_BIT_WIDTHS = (1024, 12288)
"""Numbers of a row that is rounded to eight bits: one block, and several."""


PACKED_SHAPES = ((640, 2048), (1280, 1280), (5, 8 * 72))
"""[outputs, inputs] of packed layers; the last has numbers that do not divide by 16."""


@dataclass(frozen=True)
class RegisterFile:
    """Vector registers of one SIMD, and how the waves on it share them.

    Source: LLVM, lib/Target/AMDGPU/Utils/AMDGPUBaseInfo.cpp: getTotalNumVGPRs, getVGPRAllocGranule, getMaxWavesPerEU;
    which architecture has 1536 registers: AMDGPU.td, Feature1_5xVGPRs.

    registers: for each lane. granule: a wave gets a multiple of this. most_waves: the most that one SIMD can hold.
    """

    lanes: int
    registers: int
    granule: int
    most_waves: int

    def waves(self, vgprs: int) -> int:
        """Occupancy: waves of a kernel on one SIMD at once, as far as its registers allow."""
        taken = -(-max(vgprs, 1) // self.granule) * self.granule
        return min(self.registers // taken, self.most_waves)


RDNA_3_LARGE = RegisterFile(lanes=32, registers=1536, granule=24, most_waves=16)
CARDS = {
    "gfx1030": RegisterFile(lanes=32, registers=1024, granule=16, most_waves=16),
    "gfx1100": RDNA_3_LARGE,
    "gfx1151": RDNA_3_LARGE,
    "gfx1201": RDNA_3_LARGE,
    "gfx942": RegisterFile(lanes=64, registers=512, granule=8, most_waves=8),
}
METADATA = re.compile(r"\b(vgpr_count|\wgpr_spill_count|private_segment_fixed_size|Occupancy):\s+(\d+)")


@dataclass(frozen=True)
class Used:
    """GPU resources of one compiled kernel."""

    vgprs: int
    lds_bytes: int
    waves: int
    """The occupancy that the compiler reports; ``RegisterFile.waves`` where only registers limit it."""
    spilled: int
    """Vector and scalar registers that the compiler keeps in memory, and bytes of scratch memory."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: the arguments from the launching code."""

    kernel: Any
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Everything in the launch that changes the machine code, except the dtype of a step.

        A step in float16 has residual streams in float32. Triton compiles whole numbers that are multiples of 16 apart
        from others.
        """
        words = [f"{key}={value}" for key, value in self.options.items() if key not in LAUNCH]
        for key, value in zip(self.kernel.arg_names, self.args, strict=False):
            if isinstance(value, int) and value % 16:
                words.append(f"{key}%16")
            elif isinstance(value, int) and value >= 2**31:
                words.append(f"{key}:int64")
            elif isinstance(value, Tensor) and value.untyped_storage().nbytes() >= 2**31:
                words.append(f"{key}:large")
            elif key in ("x", "dx", "weight", "gate") and isinstance(value, Tensor) and value.dtype == torch.float32:
                words.append(f"{key}:float32")
        return " ".join([self.kernel.fn.__name__, *words])


class NoDriver:
    """Replaces the driver of a missing GPU: kernels are compiled for it, and cannot be launched."""

    def __init__(self, gfx: str) -> None:
        self._gfx = gfx

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self._gfx, CARDS[self._gfx].lanes)

    def get_current_device(self) -> str:
        return self._gfx

    def get_current_stream(self, device: str) -> None:
        return None


def dtype_on(gfx: str) -> torch.dtype:
    """The dtype in which a card trains."""
    return torch.bfloat16 if BY_GFX[gfx].bf16 else torch.float16


def launches(dtype: torch.dtype, *steps: tuple[str, int, int, int]) -> dict[str, Launch]:
    """Name -> launch, of training steps and of the fingerprints of frozen weights."""
    found: dict[str, Launch] = {}

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launch = Launch(kernel, args, options)
        found.setdefault(launch.name, launch)

    with mock.patch.object(triton.JITFunction, "run", run):
        for family, batch, height_px, width_px in steps:
            if family == LANGUAGE_MODEL[0]:
                train_language_model(dtype, batch, height_px)
            else:
                train(family, dtype, batch, height_px // 8, width_px // 8)
        for is_modulation_trained in (False, True):
            train_blocks(dtype, is_modulation_trained)
        for counts in WORD_COUNTS:
            fingerprint(*counts)
        for name in ("int8", "fp8", "nf4"):
            for shape in PACKED_SHAPES:
                unpack(name, dtype, *shape)
        for width in EIGHT_BIT_WIDTHS:
            eight_bit(dtype, width)
    return found


def train(family: str, dtype: torch.dtype, batch: int, height: int, width: int) -> None:
    """A step on the meta device, forward and backward. Height and width are measured in latents."""
    config = json.loads((LAYOUTS[family].configs / "unet" / "config.json").read_text(encoding="utf-8"))
    depths = [1] * len(config["block_out_channels"])  # repeated transformer blocks launch the same
    with META:
        unet: Any = UNet2DConditionModel.from_config({**config, "transformer_layers_per_block": depths})
        nn.Module.to(unet, dtype).train().requires_grad_(False)
        x_BCHW = torch.empty(batch, config["in_channels"], height, width, dtype=dtype, requires_grad=True)
        text_BSD = torch.empty(batch, 77, config["cross_attention_dim"], dtype=dtype)
        extra = {"text_embeds": torch.empty(batch, 1280, dtype=dtype), "time_ids": torch.empty(batch, 6)}
        fused_unet.fuse(unet, "triton", channels_last=True)
        with mock.patch.object(backend, "launches", lambda form, x, kernel: form == "triton"):
            unet(x_BCHW, torch.empty(batch), text_BSD, added_cond_kwargs=extra)[0].sum().backward()


def train_blocks(dtype: torch.dtype, is_modulation_trained: bool) -> None:
    """Blocks of Z-Image, FLUX.1 and Anima on the meta device, at 1024 px with 512 tokens of text."""
    with META, mock.patch.object(backend, "launches", lambda form, x, kernel: form == "triton"):
        with_modulation, without = (ZImageTransformerBlock(0, 3840, 30, 30, 1e-5, True, m) for m in (True, False))
        anima = CosmosTransformerBlock(16, 128, 1024)
        blocks = nn.ModuleList((with_modulation, without, anima, *(kind(3072, 24, 128) for kind in FLUX_BLOCKS)))
        blocks.requires_grad_(False).to(dtype)
        z_image.fuse(blocks, "triton")
        cosmos.fuse(blocks, "triton")
        flux.fuse(blocks, "triton")
        x, y, image, text = (
            torch.empty(1, *size, dtype=dtype, requires_grad=True)
            for size in ((4608, 3840), (4096, 2048), (4096, 3072), (512, 3072))
        )
        z_time, y_time, time = (
            torch.empty(1, size, dtype=dtype).requires_grad_(is_modulation_trained) for size in (256, 2048, 3072)
        )
        turns = torch.empty(1, 4608, 64, dtype=torch.complex64)
        blocks[1](blocks[0](x, None, turns, z_time), None, turns).sum().backward()
        turned = (torch.empty(4096, 128),) * 2
        blocks[2](y, torch.empty(1, 512, 1024, dtype=dtype), y_time, None, turned).sum().backward()
        for block in blocks[3:]:
            sum(part.sum() for part in block(image, text, time, (torch.empty(4608, 128),) * 2)).backward()


def train_language_model(dtype: torch.dtype, batch: int, tokens: int) -> None:
    """Blocks of Llama and Gemma 3 on the meta device, and the loss of their tokens."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8, "head_dim": 128}
    config = Gemma3TextConfig(
        hidden_size=2560, intermediate_size=10240, num_hidden_layers=1, layer_types=["full_attention"]
    )
    with META, mock.patch.object(backend, "launches", lambda form, x, kernel: form == "triton"):
        blocks = nn.ModuleList([LlamaDecoderLayer(LlamaConfig(**sizes), 0), Gemma3DecoderLayer(config, 0)])
        blocks.requires_grad_(False).to(dtype)
        fused_blocks.fuse(blocks, "triton")
        for block, width, head in ((blocks[0], 4096, 128), (blocks[1], 2560, 256)):
            x = torch.empty(batch, tokens, width, dtype=dtype, requires_grad=True)
            turns = (torch.empty(1, tokens, head, dtype=dtype),) * 2
            block(x, position_embeddings=turns).sum().backward()
        for vocabulary, cap in ((128256, None), (262208, 30.0)):
            logits = torch.empty(1024, vocabulary, dtype=dtype)
            to_loss_gradient(logits, torch.empty(1024, dtype=torch.int64), -100, "triton", 1.0, cap)


def fingerprint(*counts: int) -> None:
    """The kernels over weights, for buffers of ``counts`` words."""
    words = [torch.empty(count, dtype=torch.int32, device=META) for count in counts]
    sums, marks = (torch.empty(len(counts), dtype=dtype, device=META) for dtype in (torch.int64, torch.float32))
    launch_fingerprints(words, sums)
    launch_compare(sums, sums, marks, marks)
    launch_renew(sums, sums, marks, marks)


def unpack(name: str, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """The kernel that makes the dense weight of a packed layer."""
    layer = nn.Linear(inputs, outputs, bias=False, device=META, dtype=dtype)
    packed = quantised(name, "").packed(layer.requires_grad_(False))
    with mock.patch.object(Tensor, "is_meta", False):
        packed.dense(dtype, "triton")


def eight_bit(dtype: torch.dtype, width: int) -> None:
    """The kernels around products in eight bits: rows with and without a rotation, gradients with factors, and sums."""
    x_MN, codes_MN = (torch.empty(64, width, dtype=each, device=META) for each in (dtype, torch.int8))
    scale_M1, factor_N1 = (torch.empty(count, 1, device=META) for count in (64, width))
    sums_MN = torch.empty(64, width, dtype=torch.int32, device=META)
    for code in CODES.values():
        for group in (0, *(GROUPS if code is INT8 else ())):
            launch_rows(x_MN, None, codes_MN, scale_M1, code.largest, TINY, group)
        launch_rows(x_MN, factor_N1, codes_MN, scale_M1, code.largest, TINY, 0)
    launch_sums(sums_MN, scale_M1, factor_N1, x_MN[0], x_MN, 0)
    for group in GROUPS:
        launch_sums(sums_MN, scale_M1, None, None, x_MN, group)
    launch_turn(codes_MN, codes_MN.new_empty(width, 64))


def used(launch: Launch, gfx: str) -> Used:
    """Compile a launch for a card, and read what it takes."""
    with mock.patch.object(type(driver), "active", NoDriver(gfx)):
        made = launch.kernel.run(*launch.args, grid=None, warmup=True, **launch.options)
    told = {key: int(value) for key, value in METADATA.findall(made.asm["amdgcn"])}
    spilled = told["vgpr_spill_count"] + told["sgpr_spill_count"] + told["private_segment_fixed_size"]
    return Used(told["vgpr_count"], made.metadata.shared, told["Occupancy"], spilled)


def recorded_in(version: str) -> dict[str, Any]:
    """The record of a version of Triton: card -> launch -> [VGPRs, bytes of LDS, waves]; empty if nothing is."""
    path = RECORDED / f"{version}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def faults(recorded: Mapping[str, Any], gfx: str, found: Mapping[str, Used]) -> Iterator[str]:
    """Lines on launches that take more than is recorded, or that are not recorded."""
    for name, now in found.items():
        if name not in recorded.get(gfx, {}):
            yield f"{gfx}, {name}: not recorded"
            continue
        vgprs, lds_bytes, waves = recorded[gfx][name]
        if now.vgprs > vgprs:
            yield f"{gfx}, {name}: {now.vgprs} VGPRs, {vgprs} recorded"
        if now.lds_bytes > lds_bytes:
            yield f"{gfx}, {name}: {now.lds_bytes} bytes of LDS, {lds_bytes} recorded"
        if now.waves < waves:
            yield f"{gfx}, {name}: {now.waves} waves, {waves} recorded"


def written(counts: Mapping[str, Mapping[str, Used]]) -> str:
    """The text of a file of counts, one launch per line."""
    cards = []
    for gfx, rows in counts.items():
        lines = [f"  {json.dumps(name)}: {[now.vgprs, now.lds_bytes, now.waves]}" for name, now in sorted(rows.items())]
        cards.append(f"{json.dumps(gfx)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n " + ",\n ".join(cards) + "\n}\n"


def counted(gfx: str) -> dict[str, Used]:
    """Resources of every launch on a card."""
    return {name: used(launch, gfx) for name, launch in launches(dtype_on(gfx), *STEPS).items()}


def main() -> None:
    """Print the counts, most registers first, and record them if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--cards", default=",".join(CARDS))
    parser.add_argument("--warps", type=int, default=group_norm_triton.WARPS)
    options = parser.parse_args()
    group_norm_triton.WARPS = options.warps
    cards = [gfx for gfx in options.cards.split(",") if triton_takes(triton.__version__, gfx) is not False]
    counts = {gfx: counted(gfx) for gfx in cards}
    for gfx, rows in counts.items():
        for name, now in sorted(rows.items(), key=lambda row: -row[1].vgprs):
            print(
                f"{gfx:8} {now.vgprs:4} VGPRs {now.waves:3} waves {now.lds_bytes:5} B {now.spilled:3} spilled  {name}"
            )
    if options.write:
        RECORDED.mkdir(exist_ok=True)
        (RECORDED / f"{triton.__version__}.json").write_bytes(written(counts).encode())


if __name__ == "__main__":
    main()
