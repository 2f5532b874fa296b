"""Thousands of faulty copies to the device: none may reach an optimizer step, and no good one may be refused.

usage: python benchmarks/reliability.py transfers [--faulty 10000] [--clean 100000] [--device cuda] [--captured]
       [--limit-s 300]    stop then, and report how much was done
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.captured_step import captured_faults
from benchmarks.faults import KINDS, TARGETS
from benchmarks.faulty_training import COUNTS, SHARES, SIZES, Found, faulty_steps
from lora_rocm.device.transfer import DeviceTransfer, fingerprint

SERIES = 500  # faults of one series; each starts a new run
CLEAN_SERIES = 5000
CLEAN_IN_A_ROW = 100  # sends between two reads of the verdict, which stays set
EXPONENTS = {  # bits of the exponent of float formats, viewed as integers
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
}
WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8)
CONTENTS = ("random bits", "all zero", "-0", "NaN with payloads", "denormal", "all bits set")


def odd_tensor(content: str, dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return a CPU tensor with content that is hard for checks.

    An integer tensor gets random bits for float contents.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    if content in ("all zero", "all bits set"):
        raw.fill_(0 if content == "all zero" else 0xFF)
    elif dtype in EXPONENTS:
        word, exponent = EXPONENTS[dtype]
        bits = raw.view(word)
        if content == "-0":
            bits.fill_(torch.iinfo(word).min)
        elif content == "NaN with payloads":
            bits |= exponent
        elif content == "denormal":
            bits &= ~exponent
    return raw.view(dtype).view(shape)


def odd_batch(number: int, seed: int) -> dict[str, Tensor]:
    """Return tensors of random contents, dtypes and sizes (some odd), with the same number of samples."""
    rng = random.Random(f"{seed} clean {number}")
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    samples = rng.randint(1, 4)
    tensors = {}
    for name in ("first", "second", "third"):
        height, width = rng.choices(SIZES, SHARES)[0]
        shape = rng.choice(((samples,), (samples, rng.randint(1, 99)), (samples, 4, height, width)))
        tensors[name] = odd_tensor(rng.choice(CONTENTS), rng.choice((*EXPONENTS, *WHOLE)), shape, generator)
    return tensors


def clean_sends(wanted: int, device: torch.device, seed: int) -> tuple[int, float]:
    """Send ``wanted`` batches without a fault; return (false alarms, seconds)."""
    transfer, alarms = DeviceTransfer(device, pin=device.type == "cuda"), 0
    started = time.perf_counter()
    for number in range(1, wanted + 1):
        tensors = odd_batch(number, seed)
        transfer.send(tensors, {name: fingerprint(tensor) for name, tensor in tensors.items()})
        if number % CLEAN_IN_A_ROW == 0 or number == wanted:
            alarms += bool(transfer.bad)
            transfer.clear()
    return alarms, time.perf_counter() - started


def in_series(wanted: int, size: int, limit_s: float) -> Iterator[tuple[int, int]]:
    """Yield (number, size) of consecutive series, until ``wanted`` is reached or the time is over."""
    started = time.perf_counter()
    for number, first in enumerate(range(0, wanted, size)):
        if time.perf_counter() - started > limit_s:
            return
        yield number, min(size, wanted - first)


def table(found: Found, title: str) -> str:
    """Return the counts as text."""
    lines = [title, f"  {'kind':16}" + "".join(f"{target:>24}" for target in TARGETS)]
    for kind in KINDS:
        cells = [f"{found.caught[kind, target]:6} caught {found.reached[kind, target]:2} not" for target in TARGETS]
        lines.append(f"  {kind:16}" + "".join(f"{cell:>24}" for cell in cells))
    lines.append(
        f"  {found.faults} faults, {found.caught.total()} caught, {found.reached.total()} reached the optimizer; "
        f"{found.unchanged.total()} more changed nothing; {found.false_alarms} false alarms; states compared: "
        f"{found.compared}, differing: {len(found.differing)}; {found.seconds:.0f} s"
    )
    return "\n".join(lines)


def as_json(found: Found) -> dict[str, Any]:
    """Return the counts for a file."""
    rows = [
        {"kind": kind, "target": target, **{name: getattr(found, name)[kind, target] for name in COUNTS}}
        for kind in KINDS
        for target in TARGETS
    ]
    sums = {name: getattr(found, name).total() for name in COUNTS}
    return {
        **sums,
        "false_alarms": found.false_alarms,
        "states_compared": found.compared,
        "states_differing": len(found.differing),
        "seconds": round(found.seconds, 1),
        "rows": rows,
    }


def main(argv: list[str]) -> int:
    """Run both parts; return 0 if no fault came through and no good send was refused."""
    parser = argparse.ArgumentParser(prog="reliability.py transfers", description=__doc__.splitlines()[0])
    parser.add_argument("--faulty", type=int, default=10_000)
    parser.add_argument("--clean", type=int, default=100_000)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--captured", action="store_true", help="the step as a CUDA graph (on a CPU: the same, eager)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="of each of the two parts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    # deterministic device
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    else:
        torch.set_num_threads(1)
    # faulty sends
    steps = captured_faults if options.captured else faulty_steps
    found, alarms, clean, clean_s = Found(), 0, 0, 0.0
    for number, size in in_series(options.faulty, SERIES, options.limit_s):
        found.add(steps(size, device, 1000 * options.seed + number))
    how = ("captured in a CUDA graph" if device.type == "cuda" else "static buffers") if options.captured else "eager"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(table(found, f"{name}, torch {torch.__version__}, {how}, seed {options.seed}"), flush=True)
    # sends without a fault
    for number, size in in_series(options.clean, CLEAN_SERIES, options.limit_s):
        new_alarms, seconds = clean_sends(size, device, 1000 * options.seed + number)
        alarms, clean, clean_s = alarms + new_alarms, clean + size, clean_s + seconds
    print(f"  {clean} of {options.clean} sends without a fault: {alarms} false alarms; {clean_s:.0f} s")
    if options.json:
        facts = {"device": name, "torch": torch.__version__, "how": how, "seed": options.seed}
        sends = {"clean": clean, "clean_false_alarms": alarms, "clean_seconds": round(clean_s, 1)}
        options.json.write_text(json.dumps({**facts, **as_json(found), **sends}, indent=1), encoding="utf-8")
    sound = found.faults >= options.faulty and not (
        found.reached.total() or found.differing or found.false_alarms or alarms
    )
    return 0 if sound else 1
