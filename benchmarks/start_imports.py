"""The imports of a start of the worker, and their processor time.

usage: python benchmarks/start_imports.py ROOT [--checkout FOLDER] [--rounds 3]
                                          [--family sdxl|flux|z-image|causal-lm]...

Trains one step of a tiny model of each family on the CPU: SDXL, Z-Image and a Llama are the models of the demos, FLUX.1
is a random one, which is written under ROOT. The worker is the real one, and starts as ``lora-rocm train`` starts it.
The first run fills the caches of samples; the following ones are measured.

Columns: seconds of processor time (user and system) and number of modules when the worker has imported what it needs
to start (its event ``imports``), the same after the first step, and the largest packages by number of modules. Each
time is the smallest of all rounds, because other programs disturb it.

``--checkout`` measures the code in another folder, to compare two versions. Files that the operating system has to read
from a disk first are not measured; there are at least as many as modules.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODULE = "benchmarks.start_imports"
FAMILIES = ("sdxl", "flux", "z-image", "causal-lm")
IMPORTS_MORE = True
LARGEST = 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or be the measured child if ``child_main`` calls this with a run directory."""
    if sys.argv[0] == MODULE:
        return _child(Path(sys.argv[1]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder for data, caches and runs")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="the code to measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="all, if not given")
    options = parser.parse_args(arguments)
    for family in options.family or FAMILIES:
        rounds = [
            _one_start(options.root.absolute(), options.checkout.resolve(), family) for _ in range(options.rounds + 1)
        ]
        told: dict[str, Any] = {"family": family}
        for mark in ("imports", "first step"):
            told[f"{mark}, s"] = min(found[mark]["seconds"] for found in rounds[1:])
            told[f"{mark}, modules"] = rounds[-1][mark]["modules"]
        sys.stdout.write(json.dumps(told | {"packages": rounds[-1]["packages"]}) + "\n")
        sys.stdout.flush()
    return 0


def _one_start(root: Path, checkout: Path, family: str) -> dict[str, Any]:
    """Start a run of one step in a child; return what it reports.

    Raises:
        SystemExit: the run failed.
    """
    run_dir = root / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    (run_dir / "recipe.yaml").write_text(json.dumps(_recipe(root, family)), encoding="utf-8")  # JSON is YAML
    path = os.pathsep.join(filter(None, (str(checkout), str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", "lora_rocm.processes.child_main", MODULE, str(run_dir)]
    # bytecode is written: otherwise each start would compile the program
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "", "LORA_ROCM_HOME": str(root / "home")}
    with (root / "log").open("w", encoding="utf-8") as log:
        child = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=root)
        code = child.wait()  # its standard input stays open: when that closes, a worker stops
    if code != 0:
        raise SystemExit(f"The run failed; see {root / 'log'}.")
    found: dict[str, Any] = json.loads((run_dir / "imports.json").read_text(encoding="utf-8"))
    return found


def _recipe(root: Path, family: str) -> dict[str, Any]:
    """Return a recipe of one step, and write its base and data."""
    recipe: dict[str, Any] = {
        "lora": {"rank": 4},
        "train": {"max_train_steps": 1, "batch_size": 1},
        "cache": {"dir": str(root / "cache")},
    }
    if family == "causal-lm":
        data: dict[str, Any] = {"sources": [{"dataset": "builtin:demo-chats"}]}
        return recipe | {"model": {"family": family, "name_or_path": "builtin:tiny-llama"}, "data": data}
    recipe["data"] = {"path": "builtin:demo", "resolution": 128, "bucket_step": 32}
    if family in ("sdxl", "z-image"):
        return recipe | {"model": {"family": family, "name_or_path": f"builtin:tiny-{family}"}}
    base = root / "flux"
    if not (base / "model_index.json").is_file():
        subprocess.run([sys.executable, "-c", _WRITE_FLUX, str(base)], cwd=ROOT, check=True)
    return recipe | {"model": {"family": family, "name_or_path": str(base)}}


_WRITE_FLUX = (
    "import sys, pathlib; from tests.tiny_flux import write_tiny_flux; write_tiny_flux(pathlib.Path(sys.argv[1]))"
)


def _child(run_dir: Path) -> int:
    """Run the worker, and write processor time and modules at its marks."""
    from lora_rocm.train import session, worker

    marks: dict[str, Any] = {}
    emit = session.Session.emit

    def noted(its: session.Session, event: Any) -> None:
        emit(its, event)
        mark = {"phase": "imports" if getattr(event, "phase", "") == "imports" else "", "step": "first step"}
        if (name := mark.get(event.type)) and name not in marks:
            marks[name] = {"seconds": round(time.process_time(), 2), "modules": len(sys.modules)}

    session.Session.emit = noted  # type: ignore[method-assign, assignment]
    code = worker.main([str(run_dir)])
    packages = collections.Counter(name.partition(".")[0] for name in sys.modules)
    told = {**marks, "packages": dict(packages.most_common(LARGEST))}
    (run_dir / "imports.json").write_text(json.dumps(told), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
