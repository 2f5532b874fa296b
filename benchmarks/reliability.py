"""Reliability measurements: each part prints its figures and exits with 0 if they are as promised.

usage: python benchmarks/reliability.py PART [arguments of the part]    (PART --help lists them)
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

PARTS = {
    "transfers": "faulty copies to the device: none may reach an optimizer step, and no good one may be refused",
    "state": "trained state that changes in memory: none may be trained on, and none without a fault refused",
    "price": "the overhead of the guard and the canary, on and off side by side",
    "crashes": "a run that is killed, at every write and at random moments: the bytes of the undisturbed one",
    "disk": "a disk that is full at every write of a run",
    "memory": "memory that runs out, by a hard limit and by injection",
    "fuzz": "recipes, images, weights and event logs that are damaged",
}


def main() -> int:
    """Run the part with the arguments; return its exit code."""
    if len(sys.argv) < 2 or sys.argv[1] not in PARTS:
        told = "\n".join(f"  {name:10} {text}" for name, text in PARTS.items())
        print(f"{__doc__}\n{told}")
        return 0 if sys.argv[1:] in ([], ["--help"], ["-h"]) else 2
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # parts share helpers with each other and with tests
    part = importlib.import_module(f"benchmarks.reliable_{sys.argv[1]}")
    return int(part.main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
