"""Seconds in which the processes of a fresh start list and compile its kernels. It needs no GPU and no weights.

    python -m benchmarks.start_kernels ROOT FAMILY [--target cuda:90:32] [--processes 4]

FAMILY: sdxl, flux-int8, flux-bf16, z-image or llama-nf4, at full size, with a LoRA of rank 16 in bf16. A start has the
same processes (``memory.footprint_process``, ``checks.kernel_processes``). Their caches under ROOT are empty.
``--target``: a GPU as Triton names it, such as hip:gfx1100:32. ``--processes``: number of compiling processes; by
default the number for this machine.

One JSON object: number of launches and of compared cases, seconds until the launches are listed, until all programs are
compiled, and until the step's memory is counted; and the processor time of all these processes, in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

POLL_S, LIMIT_S = 0.05, 600.0
MODELS: dict[str, tuple[str, str, str]] = {
    "sdxl": ("sdxl", "random:stabilityai/stable-diffusion-xl-base-1.0", ""),
    "flux-bf16": ("flux", "random:black-forest-labs/FLUX.1-dev", ""),
    "flux-int8": ("flux", "random:black-forest-labs/FLUX.1-dev", "int8"),
    "z-image": ("z-image", "random:Tongyi-MAI/Z-Image-Turbo", ""),
    "llama-nf4": ("causal-lm", "", "nf4"),
}
"""Family, name and format of each model."""


def recipe_of(root: Path, name: str) -> Path:
    """Write the recipe of a start, and the structure of the language model."""
    family, base, quantization = MODELS[name]
    if is_text := not base:
        from benchmarks.llama_8b import LLAMA_8B
        from benchmarks.peer_steps import TOKENIZER

        folder = root / "llama"
        shutil.copytree(TOKENIZER, folder, dirs_exist_ok=True)
        (folder / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
        base = f"random:{folder}"
    images = root / "images"
    images.mkdir(exist_ok=True)
    sections: dict[str, Any] = {
        "model": {"family": family, "name_or_path": base, **({"quantization": quantization} if quantization else {})},
        "data": {"path": str(images), "resolution": 1024, "caption_fallback": "filename"},
        "lora": {"rank": 16, "alpha": 16, "targets": "all-linear" if is_text else "attention"},
        "train": {"max_train_steps": 1, "batch_size": 2 if is_text else 1, "mixed_precision": "bf16"},
        "cache": {"dir": str(root / "samples")},
    }
    if is_text:
        sections["data"] = {"sources": [{"dataset": "builtin:demo-chats"}], "max_length": 2048}
    path = root / f"{name}.yaml"
    path.write_text(json.dumps(sections), encoding="utf-8")  # JSON is YAML
    return path


def measure(root: Path, name: str, target: Sequence[str], processes: int | None) -> dict[str, Any]:
    """Start the processes, wait for all of them, and return the figures."""
    for cache in ("samples", "triton", "home"):
        shutil.rmtree(root / cache, ignore_errors=True)
    os.environ |= {"TRITON_CACHE_DIR": str(root / "triton"), "LORA_ROCM_HOME": str(root / "home")}
    import torch

    from lora_rocm.checks import kernel_processes
    from lora_rocm.checks.kernel_processes import KernelCompilers, count_here, unproven_cases
    from lora_rocm.hardware.settings import Settings
    from lora_rocm.memory import footprint_process
    from lora_rocm.memory.footprint_process import FootprintProcess
    from lora_rocm.processes.start_jobs import CompileTarget, CountRequest

    kernel_processes.STEP_LIMIT_S = footprint_process.LIMIT_S = LIMIT_S
    backend, arch, warp_size = target
    count, recipe = processes or count_here(), recipe_of(root, name)
    before, began = os.times(), time.perf_counter()
    row: dict[str, Any] = {"family": name, "target": ":".join(target), "processes": count}
    # As a start does: both kinds of processes at the same time
    listing = FootprintProcess(recipe)
    listing.ask(CountRequest("bfloat16", Settings().to_text()))
    compilers = KernelCompilers(
        torch.bfloat16, count, lambda: CompileTarget(backend, arch, int(warp_size)), step=listing.launches
    )
    found = listing.launches()
    if found is None:
        raise SystemExit("The process that lists the launches failed; see its messages.")
    row |= {"launches": len(found.launches), "listed_s": round(time.perf_counter() - began, 2)}
    compilers.wait_for_step(lambda: None)
    cases = unproven_cases(found.kernels, torch.bfloat16)
    while compilers.finished < len(cases) and time.perf_counter() - began < LIMIT_S:
        time.sleep(POLL_S)
    row |= {"cases": compilers.finished, "compiled_s": round(time.perf_counter() - began, 2)}
    listing.wait(lambda: None)
    row["counted_s"] = round(time.perf_counter() - began, 2)
    compilers.close()
    listing.close()
    after = os.times()  # of children it has no times on Windows
    row["processor_s"] = round(sum(after[2:4]) - sum(before[2:4]), 2)
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder for recipes and caches")
    parser.add_argument("family", choices=tuple(MODELS))
    parser.add_argument("--target", default="cuda:90:32", metavar="BACKEND:ARCH:WARP")
    parser.add_argument("--processes", type=int)
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    print(json.dumps(measure(root, options.family, options.target.split(":"), options.processes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
