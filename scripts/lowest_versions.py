"""Run the demos with the oldest versions that pyproject.toml allows, and print all versions: are its bounds true?

    python scripts/lowest_versions.py [--keep FOLDER] [--family NAME ...]

Makes an environment in a temporary folder: the torch for the CPU of ``lora_rocm/hardware/wheels.toml``, then the
package with the lowest version of each direct dependency, as uv finds them. It takes minutes, and 2 GB of disk.

Exit codes: 0 every demo ran, and each package was as old as its bound; 1 not so; others as of ``scripts/install.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lora_rocm.errors import LoraRocmError, MachineError  # noqa: E402
from lora_rocm.hardware.probe.detection import probe  # noqa: E402
from lora_rocm.hardware.wheels import INDEX_VARIABLE, choose  # noqa: E402
from scripts.install import INSTALL, QUICK  # noqa: E402
from scripts.uv_tool import install_uv, program  # noqa: E402

FAMILIES = ("sdxl", "causal-lm")
BOUND = re.compile(r"([\w.-]+)>=([\d.]+)")
LOOK = """
import importlib.metadata, json
print(json.dumps({each.name: each.version for each in importlib.metadata.distributions()}))
"""


def call(command: list[str], folder: Path, quiet: bool = False) -> int:
    """Run a command in a folder, its output where ours goes; its exit code."""
    print("+", " ".join(command), flush=True)
    hidden = subprocess.DEVNULL if quiet else None
    return subprocess.run(command, cwd=folder, stderr=hidden, env={**os.environ, "PIP_USER": "0"}).returncode


def bounds() -> dict[str, str]:
    """Normalised name -> lower bound, of each dependency of the project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [BOUND.fullmatch(text) for text in project["dependencies"]]
    return {normal(match[1]): match[2] for match in found if match is not None}


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def numbers(version: str) -> tuple[int, ...]:
    """A release as numbers, without zeros at its end and without the part after a plus sign."""
    found = [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]
    while found and not found[-1]:
        found.pop()
    return tuple(found)


def newer_than_bound(found: dict[str, str], wanted: dict[str, str]) -> list[str]:
    """The dependencies that are newer than their lower bounds, except torch, which comes from wheels.toml."""
    return [
        f"{name} {found.get(name, 'is missing')}, and its bound is {bound}"
        for name, bound in wanted.items()
        if name != "torch" and (name not in found or numbers(found[name]) != numbers(bound))
    ]


def install(folder: Path) -> Path:
    """Make the environment.

    Raises:
        MachineError: something could not be installed.
    """
    uv, venv, torch = install_uv(folder / "tools"), folder / "venv", choose(probe(), {INDEX_VARIABLE: "cpu"})
    step = [sys.executable, "-m", "venv", str(venv)]
    _done(call(step, folder), step)
    # torch alone: otherwise its newest dependencies would come along
    python = program(venv, "python")
    step = [python, *INSTALL, "-q", "--no-deps", torch.requirement]
    if call([*step, "--index-url", torch.url or "", *QUICK], folder, quiet=True):
        _done(call(step, folder), step)
    constraint = folder / "torch.txt"
    constraint.write_text(f"torch=={versions(venv)['torch']}\n", encoding="utf-8")
    lowest = ["--resolution", "lowest-direct", "-c", str(constraint), "--python", python]
    step = [uv, "pip", "install", "-q", *lowest, str(ROOT)]
    _done(call(step, folder), step)
    return venv


def _done(code: int, step: list[str]) -> None:
    if code:
        what, fix = "A step of the installation failed (see above).", "Common: no network, or bounds that exclude all."
        raise MachineError("lowest-failed", what, where=" ".join(step), fix=fix)


def versions(venv: Path) -> dict[str, str]:
    """Normalised name -> version of every package."""
    done = subprocess.run([program(venv, "python"), "-I", "-c", LOOK], capture_output=True, check=True)
    return {normal(name): version for name, version in sorted(json.loads(done.stdout).items())}


def main(arguments: list[str] | None = None) -> int:
    """Install, run, print."""
    parser = argparse.ArgumentParser(description="Run the demos with the oldest versions that pyproject.toml allows.")
    parser.add_argument("--family", action="append", help="of which demos (default: sdxl and causal-lm)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="an empty folder for the environment, which stays")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="lora-rocm-lowest-", ignore_cleanup_errors=True) as name:
        folder = options.keep.resolve() if options.keep else Path(name)
        (work := folder / "work").mkdir(parents=True)
        try:
            venv = install(folder)
        except LoraRocmError as error:
            print(f"lowest: {error}", file=sys.stderr)
            return error.exit_code
        found, wanted = versions(venv), bounds()
        for package, version in found.items():
            print(f"{package}=={version}" + (f"  (bound {wanted[package]})" if package in wanted else ""))
        wrong = newer_than_bound(found, wanted)
        for family in options.family or FAMILIES:
            began_s = time.monotonic()
            code = call([program(venv, "lora-rocm"), "demo", "--family", family], work)
            print(f"demo of {family}: exit code {code}, {time.monotonic() - began_s:.0f} s", flush=True)
            wrong += [f"the demo of {family} ended with exit code {code}"] if code else []
    print("\n".join([f"lowest: {text}" for text in wrong] or ["lowest: all bounds were run"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
