"""Processor time of the quick commands, of two checkouts in turn.

    python benchmarks/command_times.py [--old CHECKOUT] [--rounds 9] [--runs 20] [--steps 1000] [--json FILE]

Goals: ``--help`` under 0.3 s, ``runs`` and ``inspect`` under 0.5 s of processor time. Both checkouts use this Python.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCKS, RANK, WIDTH = 10, 16, 1280
VAE = "lora_rocm/builtin/tiny_sdxl/vae/diffusion_pytorch_model.safetensors"
ALPHA = b"\x00\x48"  # 8 in float16
ATTENTIONS = (
    *(f"down_blocks_2_attentions_{number}" for number in range(2)),
    "mid_block_attentions_0",
    *(f"up_blocks_0_attentions_{number}" for number in range(3)),
)


def write_runs(folder: Path, count: int, steps: int) -> None:
    """Write finished runs as a worker leaves them, each with many steps."""
    from lora_rocm.rundir.events import EventWriter
    from lora_rocm.rundir.layout import RunDir
    from tests.supervisor.fake_run import data_fields, event, save_recipe, start_fields, step_fields

    for number in range(count):
        run_dir = RunDir(folder / f"run-{number:03d}").create()
        save_recipe(run_dir)
        writer = EventWriter(run_dir.events(), session=1)
        writer.write(event("start", **start_fields()))
        writer.write(event("data", **data_fields(max_train_steps=steps)))
        for step in range(1, steps + 1):
            writer.write(event("step", **step_fields(updates=step, max_train_steps=steps, iteration=step)))
        writer.close()


def write_lora(path: Path) -> None:
    """Write a LoRA file of SDXL's size: only its header and its alphas have content."""
    header: dict[str, object] = {"__metadata__": {"ss_network_dim": str(RANK)}}
    modules = [
        f"lora_unet_{place}_transformer_blocks_{block}_attn{attention}_to_{layer}"
        for place in ATTENTIONS
        for block in range(BLOCKS)
        for attention in (1, 2)
        for layer in ("q", "k", "v", "out_0")
    ]
    position = 2 * len(modules)
    for number, name in enumerate(modules):
        width = 2048 if "attn2_to_k" in name or "attn2_to_v" in name else WIDTH  # of the texts
        for part, shape in (("lora_down", [RANK, width]), ("lora_up", [WIDTH, RANK])):
            end = position + 2 * shape[0] * shape[1]
            header[f"{name}.{part}.weight"] = {"dtype": "F16", "shape": shape, "data_offsets": [position, end]}
            position = end
        header[f"{name}.alpha"] = {"dtype": "F16", "shape": [], "data_offsets": [2 * number, 2 * number + 2]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(ALPHA * len(modules))
        file.truncate(8 + len(text) + position)


def processor_s(checkout: Path, words: list[str], folder: Path) -> float:
    """Return the processor time of one command, in a new process."""
    path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    main = "import sys; sys.argv[0] = 'lora-rocm'; from lora_rocm.cli import main; main()"
    before = os.times()
    command = [sys.executable, "-c", main, *words]
    done = subprocess.run(command, capture_output=True, cwd=folder, env=environment)
    after = os.times()
    if done.returncode:
        sys.exit(f"lora-rocm {' '.join(words)} failed:\n{done.stderr.decode()}")
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Measure in turn, and print the median and the smallest time of each command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, help="a checkout to compare with")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    checkouts = {"new": ROOT} | ({"old": options.old.resolve()} if options.old else {})
    measured: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="lora-rocm-bench-") as name:
        folder = Path(name)
        write_runs(folder / "runs", options.runs, options.steps)
        write_lora(folder / "lora.safetensors")
        commands = {
            "--help": ["--help"],
            "runs": ["runs"],
            "runs --last 5": ["runs", "--last", "5"],
            "inspect (headers only)": ["inspect", str(ROOT / VAE)],
            "inspect (a LoRA)": ["inspect", "lora.safetensors"],  # all its numbers are read
            "check --schema-only": ["check", "demo.yaml", "--schema-only"],
        }
        for _ in range(options.rounds):
            for what, words in commands.items():
                for which, checkout in checkouts.items():
                    if which == "old" and "--last" in words:
                        continue
                    taken_s = processor_s(checkout, words, folder)
                    measured.setdefault(what, {}).setdefault(which, []).append(taken_s)
    for what, times in measured.items():
        texts = (f"{which} {statistics.median(each):.2f} (least {min(each):.2f})" for which, each in times.items())
        print(f"{what:22} {', '.join(texts)}")
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
