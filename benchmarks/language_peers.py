"""Compares the step of an 8B language model in other trainers with this program's, each in a separate process.

    python -m benchmarks.language_peers ROOT [--only own,trl,llamafactory,unsloth] [--path TRAINER=FOLDER]
    python -m benchmarks.language_peers ROOT --toy      # on the CPU: two small blocks; Liger's kernels do not run there

The model has Llama 3.1 8B's shape and random weights: 2 texts of 2,048 tokens that all count in the loss, rank 16 on
all seven projections, bf16, fused AdamW, attention of PyTorch. Another trainer's row times its own loop through its own
interface (``benchmarks/peer_steps.py``), from the end of a step to the end of the next, with data loader and callbacks.
Our row and the bare one time the pass and the optimizer alone (``benchmarks/language_model.py``). *busy* is the time in
which the GPU computes, of 2 traced steps, for all. Peaks are peaks of tensors, from the first step.

ROOT takes the base (16 GB, written once, read by LLaMA-Factory and Unsloth) and all that the trainers write; nothing is
looked up in a network. ``--path`` makes one trainer search a folder of packages first. A trainer that fails has
a row with the last line of its output; the whole output is ``ROOT/TRAINER.log``. LLaMA-Factory's check of versions is
off, so that all trainers use one transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB, POLL_S = 2**30, 0.5
PLAIN, RECOMPUTED = "everything kept", "recomputed"
LIGER = [PLAIN, f"{PLAIN}, Liger", f"{RECOMPUTED}, Liger"]  # Liger's kernels stay for the whole process, so last
MODES = {"trl": LIGER, "llamafactory": LIGER, "unsloth": [PLAIN, f"{RECOMPUTED}, offloaded"]}
OWN_ROWS = rf"^(bare|bf16), ({PLAIN}|{RECOMPUTED})$"
READS_BASE = {"llamafactory", "unsloth"}
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DISABLE_VERSION_CHECK": "1",  # of LLaMA-Factory
    "UNSLOTH_DISABLE_STATISTICS": "1",
}

Row = dict[str, Any]


@dataclass
class Asked:
    """The requested measurement, and its folder. ``limit_s``: of each trainer."""

    root: Path
    paths: Mapping[str, str]
    limit_s: float
    steps: int
    toy: bool

    def child(self, name: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a module of this folder; its output is appended to ``ROOT/NAME.log``."""
        environment = {**os.environ, **QUIET, "HF_HOME": str(self.root / "home")}
        environment["UNSLOTH_COMPILE_LOCATION"] = str(self.root / "unsloth_compiled_cache")
        folders = [self.paths.get(name, ""), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, *(["--toy"] if self.toy else [])]
        with self.log(name).open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=Path(__file__).parents[1],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log(self, name: str) -> Path:
        return self.root / f"{name}.log"

    def error(self, name: str, process: subprocess.Popen[bytes], ends_at: float) -> str:
        """Why a child failed: how it ended, and the last line of its output."""
        text = self.log(name).read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        late = time.perf_counter() > ends_at
        how = f"stopped after {self.limit_s:.0f} s" if late else f"exit status {process.returncode}"
        return f"{how}: {lines[-1] if lines else 'no output'}"

    def followed(self, process: subprocess.Popen[bytes], rows_path: Path, ends_at: float) -> Iterator[Row]:
        """Yield each line that a child appends to ``rows_path``, until it ends or, at ``ends_at``, is stopped."""
        seen, runs = 0, True
        while runs:
            time.sleep(POLL_S)
            if time.perf_counter() > ends_at:
                process.kill()
                process.wait()
            runs = process.poll() is None
            lines = rows_path.read_text(encoding="utf-8").splitlines(keepends=True) if rows_path.exists() else []
            finished = [line for line in lines if line.endswith("\n")]
            yield from map(json.loads, finished[seen:])
            seen = len(finished)


def peer_rows(asked: Asked, trainer: str) -> Iterator[Row]:
    """All modes of one trainer. A mode that fails has a row with the error; the modes after it have a new process."""
    left, rows_path = list(MODES[trainer]), asked.root / f"{trainer}.jsonl"
    asked.log(trainer).unlink(missing_ok=True)
    ends_at = time.perf_counter() + asked.limit_s
    while left and time.perf_counter() < ends_at:
        rows_path.unlink(missing_ok=True)
        words = [str(asked.root), trainer, str(rows_path), "--steps", str(asked.steps), "--modes", *left]
        process = asked.child(trainer, "peer_steps", *words)
        for row in asked.followed(process, rows_path, ends_at):
            left.remove(row["mode"])
            yield row
        if left:
            yield {"trainer": trainer, "mode": left.pop(0), "error": asked.error(trainer, process, ends_at)}
    for mode in left:
        yield {"trainer": trainer, "mode": mode, "error": f"not begun within {asked.limit_s:.0f} s"}


def own_rows(asked: Asked) -> Iterator[Row]:
    """This program's step and the bare one."""
    found = asked.root / "own.json"
    for path in (found, asked.log("own")):
        path.unlink(missing_ok=True)
    words = ["--only", OWN_ROWS, "--steps", str(asked.steps), "--limit-s", str(asked.limit_s), "--json", str(found)]
    ends_at = time.perf_counter() + asked.limit_s
    process = asked.child("own", "language_model", *words)
    list(asked.followed(process, asked.root / "none", ends_at))
    if process.returncode != 0:
        yield {"trainer": "own", "mode": "all", "error": asked.error("own", process, ends_at)}
        return
    for row in json.loads(found.read_text(encoding="utf-8"))["rows"]:
        kind, mode = row.pop("name").split(", ", 1)
        yield {"trainer": "bare" if kind == "bare" else "own", "mode": mode, **row}


def write_base(asked: Asked) -> None:
    """Write the base where it is missing; its trainers fail without it, and report that."""
    if not (asked.root / "base").is_dir():
        began = time.perf_counter()
        ends_at = began + asked.limit_s
        asked.log("base").unlink(missing_ok=True)
        process = asked.child("base", "peer_steps", str(asked.root), "base", str(asked.root / "none"))
        list(asked.followed(process, asked.root / "none", ends_at))
        said = asked.error("base", process, ends_at) if process.returncode else "written"
        print(json.dumps({"base": said, "seconds": time.perf_counter() - began}), flush=True)


def line_of(row: Row) -> str:
    """A row as a line of the table."""
    if "error" in row:
        return f"| {row['trainer']} | {row['mode']} | {row['error'].replace('|', '/')} | | | | | | |"
    busy = f"{1e3 * row['busy_s']:.1f}" if row["busy_s"] else "-"
    peak, rest = "-", "-"
    if row.get("peak_bytes") is not None:
        peak, rest = (f"{row['peak_bytes'] / GIB:.2f}", f"{(row['peak_bytes'] - row['weights_bytes']) / GIB:.2f}")
    trained = ", ".join(name.removeprefix("torch.") for name in row.get("trained_dtypes", {"-": 0}))
    loss = f"{row['loss']:.2f}" if "loss" in row else "-"
    return (
        f"| {row['trainer']} | {row['mode']} | {1e3 * row['median_s']:.1f} | {busy} | {row['kernels']:.0f} | {peak} | "
        f"{rest} | {trained} | {loss} |"
    )


def table(rows: Sequence[Row]) -> str:
    """All rows as a table in Markdown."""
    head = "| trainer | mode | wall ms | busy ms | kernels | peak GiB | less weights | adapter | mean loss |"
    return "\n".join([head, "|---|---|---|---|---|---|---|---|---|", *map(line_of, rows)])


def main() -> int:
    """Measure all trainers, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--only", default=",".join(["own", *MODES]), metavar="TRAINER,TRAINER")
    parser.add_argument("--path", action="append", default=[], metavar="TRAINER=FOLDER")
    parser.add_argument("--limit-s", type=float, default=150, help="of each trainer, all its modes")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - {"own", *MODES}:
        parser.error(f"--only: there is no trainer {', '.join(sorted(unknown))}")
    root = options.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    paths = dict(path.split("=", 1) for path in options.path)
    asked = Asked(root, paths, options.limit_s, options.steps, options.toy)
    if READS_BASE & set(wanted):
        write_base(asked)
    rows = []
    for trainer in wanted:
        for row in own_rows(asked) if trainer == "own" else peer_rows(asked, trainer):
            print(json.dumps({key: value for key, value in row.items() if key != "top"}), flush=True)
            rows.append(row)
            if options.json is not None:
                options.json.write_text(json.dumps({"rows": rows}, indent=1), encoding="utf-8")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
