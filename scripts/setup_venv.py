"""Make ``.venv`` ready: torch first, then this package. Standard library only, Linux and Windows.

A torch that is already in ``.venv`` is never replaced. Run again, it does nothing until ``pyproject.toml`` or
``constraints.txt`` change.

Environment:
    LORA_ROCM_TORCH: pip requirement of torch, such as ``torch==2.13.0``.
    LORA_ROCM_TORCH_INDEX: address of the package index to take torch from.

Exit code 3 and one sentence: something on this machine is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".installed"
OLDEST_PYTHON = (3, 11)
TORCH = "torch==2.13.0"
ANY_TORCH = "torch>=2.11"  # as pyproject.toml
VENDOR_INDEX = "https://download.pytorch.org/whl/"
NO_GPU = "no GPU seen, so for the CPU"
PROBE = """
import importlib.metadata, json, sys
found = {"python": sys.version_info[:2]}
try:
    found["release"] = importlib.metadata.version("torch")  # as pip knows it; __version__ may have "+cu130" more
    import torch
    found.update(torch=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip)
except importlib.metadata.PackageNotFoundError:
    pass
except (ImportError, OSError, AttributeError) as error:
    found["broken"] = str(error)
print(json.dumps(found))
"""


class SetupError(Exception):
    """One sentence for the user."""


class TorchChoice(NamedTuple):
    """What to install, from where (None: pip's own index) and why."""

    requirement: str
    index_url: str | None
    why: str


def say(text: str) -> None:
    """One line of progress, seen at once."""
    print(f"setup: {text}", flush=True)


def venv_python() -> Path:
    """The Python inside ``.venv``."""
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def seen_gpu() -> str:
    """``amd``, ``nvidia`` or an empty string, without any vendor tool; AMD first where both are there."""
    if os.name != "nt":
        return "amd" if Path("/dev/kfd").exists() else "nvidia" if any(Path("/dev").glob("nvidia[0-9]*")) else ""
    command = ["powershell", "-NoProfile", "-Command", "(Get-CimInstance Win32_VideoController).PNPDeviceID"]
    try:
        adapters = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace").stdout.upper()
    except OSError:
        return ""
    return "amd" if "VEN_1002" in adapters else "nvidia" if "VEN_10DE" in adapters else ""


def choose_torch(gpu: str, windows: bool, environ: dict[str, str]) -> TorchChoice:
    """Which torch for this machine; an error for an AMD card under Windows, whose wheels differ from card to card."""
    requirement, index = environ.get("LORA_ROCM_TORCH"), environ.get("LORA_ROCM_TORCH_INDEX")
    if requirement or index:
        return TorchChoice(requirement or ANY_TORCH, index, "as the environment says")
    if gpu == "amd" and windows:
        raise SetupError(
            "There is an AMD card. Set LORA_ROCM_TORCH_INDEX to the index with the ROCm torch for it (docs/windows.md) "
            f"and run this again. For a torch without GPU support, set LORA_ROCM_TORCH={TORCH}."
        )
    if gpu == "amd":
        return TorchChoice(TORCH, VENDOR_INDEX + "rocm7.2", "AMD GPU seen (/dev/kfd)")
    if gpu == "nvidia":
        return TorchChoice(TORCH, VENDOR_INDEX + "cu130" if windows else None, "NVIDIA GPU seen")
    return TorchChoice(TORCH, VENDOR_INDEX + "cpu", NO_GPU)


def python(*arguments: str, hush_errors: bool = False) -> bool:
    """Run the venv's Python; True when it ended well."""
    # PIP_USER=0: a "user = true" in somebody's pip configuration would refuse every install into a venv.
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_USER": "0"}
    command = [str(venv_python()), *arguments]
    stderr = subprocess.DEVNULL if hush_errors else None
    return subprocess.run(command, env=environ, cwd=ROOT, stderr=stderr).returncode == 0


def probe() -> dict[str, Any]:
    """What the venv holds: its Python and, if it can be imported, torch."""
    command = [str(venv_python()), "-W", "ignore", "-c", PROBE]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise SetupError(f"{VENV} does not work any more; delete it and run this again. {done.stderr}") from None
    return found


def make_venv() -> None:
    """Create ``.venv`` where there is none, and see that it has pip."""
    if not venv_python().exists():
        if importlib.util.find_spec("ensurepip") is None:
            raise SetupError("This Python has no venv module. On Debian and Ubuntu: sudo apt install python3-venv")
        say(f"making {VENV}")
        if subprocess.run([sys.executable, "-m", "venv", str(VENV)]).returncode:
            raise SetupError(f"Could not make {VENV} (see above): is the disk full, or may you not write there?")
    if tuple(probe()["python"]) < OLDEST_PYTHON:
        raise SetupError(f"{VENV} was made by an old Python; delete it and run this again.")
    if not python("-c", "import pip", hush_errors=True) and not python("-m", "ensurepip"):
        raise SetupError(f"{VENV} has no pip and none could be added; delete it and run this again.")


def install_torch(choice: TorchChoice) -> None:
    """Install the chosen torch, from the first index that answers."""
    say(f"installing {choice.requirement} ({choice.why}) from {choice.index_url or 'the default package index'}")
    install = ["-m", "pip", "install", choice.requirement]
    index = ["--index-url", choice.index_url] if choice.index_url else []
    if choice.why == NO_GPU:
        if python(*install, *index, "--retries", "0", "--timeout", "10", hush_errors=True):
            return
        say("no answer from there; taking the default index, whose torch for Linux is larger and runs on the CPU too")
        index = []
    if not python(*install, *index):
        raise SetupError("torch could not be installed (pip says why above). Is there a network, or a proxy to set?")


def see_torch(gpu: str) -> str:
    """Check the torch that is in the venv, say what it is, and return its version as pip knows it."""
    found = probe()
    if "broken" in found:
        raise SetupError(f"The torch in {VENV} cannot be imported: {found['broken']} (delete {VENV} to start afresh)")
    kind = f"ROCm {found['hip']}" if found["hip"] else f"CUDA {found['cuda']}" if found["cuda"] else "CPU only"
    say(f"torch {found['torch']} ({kind})")
    if (gpu == "amd" and not found["hip"]) or (gpu == "nvidia" and not found["cuda"]):
        say(f"note: there is an {gpu.upper()} GPU that this torch cannot use")
    return str(found["release"])


def install_package(torch_version: str, dev: bool) -> None:
    """Install this package, editable, with everything it needs, and torch kept as it is."""
    say("installing lora-rocm and its packages")
    keep_torch = VENV / "torch-constraint.txt"
    keep_torch.write_text(f"torch=={torch_version}\n", encoding="utf-8")
    constraints = ("-c", str(ROOT / "constraints.txt"), "-c", str(keep_torch))
    if not python("-m", "pip", "install", "-q", *constraints, "-e", f"{ROOT}[dev]" if dev else str(ROOT)):
        raise SetupError(
            f"The packages could not be installed beside torch {torch_version} (pip says why above). Common: no "
            f"network, a full disk, or a torch that is too old (needed: {ANY_TORCH}; delete {VENV} to start afresh)."
        )


def main() -> int:
    """Do what is not yet done."""
    if sys.version_info < OLDEST_PYTHON:
        raise SetupError(f"Python 3.11 or newer is needed; this is {sys.version.split()[0]} ({sys.executable})")
    parser = argparse.ArgumentParser(description="Make .venv ready for lora-rocm.")
    parser.add_argument("--dev", action="store_true", help="also the tools for tests and checks")
    dev = parser.parse_args().dev
    inputs = [ROOT / "pyproject.toml", ROOT / "constraints.txt", Path(__file__)]
    key = hashlib.sha256(b"".join(path.read_bytes() for path in inputs) + os.fsencode(ROOT)).hexdigest()
    ready = [f"{key} dev"] if dev else [f"{key} dev", key]
    if venv_python().exists() and STAMP.exists() and STAMP.read_text(encoding="utf-8") in ready:
        STAMP.touch()  # newer than its inputs again, for make
        return 0
    make_venv()
    gpu = seen_gpu()
    if "release" not in probe():
        install_torch(choose_torch(gpu, os.name == "nt", dict(os.environ)))
    install_package(see_torch(gpu), dev)
    STAMP.write_text(ready[-1], encoding="utf-8")
    say("ready")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        sys.exit(3)
