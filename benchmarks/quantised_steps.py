"""Time of a captured training step on a base in each format, with Triton kernels and with the eager implementation.

usage: python benchmarks/quantised_steps.py ROOT FAMILY [--formats none,int8,nf4] [--sides 1024,512] [--json FILE]
                                           [--toy]

The product's own model, adapter, passes and optimizer, batch 1, rank 16 on attention, everything kept, random weights.
The eager implementation is used where there is no Triton. ``--toy`` rehearses on the CPU with a tiny model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks share helpers with each other

import torch  # noqa: E402

from benchmarks.memory_plan import Setup  # noqa: E402
from lora_rocm.kernels.weight_format import use_implementation  # noqa: E402
from lora_rocm.planning.step_plan import Plan  # noqa: E402

WARM_UP, TIMED = 4, 8


def step_s(setup: Setup, side_px: int, triton: bool) -> float:
    """Return the median time of a step with one implementation."""
    setup.family.fuse(setup.model, triton)
    for component in setup.model.components.values():
        use_implementation(component, "triton" if triton else "eager")
    plan = Plan("keep", 1, 1, (), (), 0, 0, 0.0, graphs=setup.device.type == "cuda")
    engine = setup.engine(plan.graphs)
    seconds = setup.steps(plan, side_px, engine, WARM_UP + TIMED)[WARM_UP:]
    engine.release()
    return statistics.median(seconds)


def main() -> None:
    """Measure and print, row by row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("family")
    parser.add_argument("--formats", default="none,int8,nf4")
    parser.add_argument("--sides", default="1024,512")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    device, rows = torch.device("cpu" if options.toy else "cuda"), list[dict[str, Any]]()
    base = "builtin:tiny-sdxl" if options.toy else options.family
    for name in options.formats.split(","):
        model = {"family": options.family, "name_or_path": f"random:{base}", "quantization": name}
        setup = Setup(model, options.toy, options.root, 16, device)
        for side_px in (64,) if options.toy else map(int, options.sides.split(",")):
            for triton in (False,) if options.toy else (True, False):
                row = {"family": options.family, "format": name, "side_px": side_px, "triton": triton}
                rows.append({**row, "step_ms": 1e3 * step_s(setup, side_px, triton)})
                print(json.dumps(rows[-1]), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        del setup


if __name__ == "__main__":
    main()
