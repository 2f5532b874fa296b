"""The ``.venv`` below this checkout: its content as seen from outside, and a runner for its commands.

Standard library only. The torch in it may crash or hang when it is imported, so a child with a time limit looks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lora_rocm.errors import MachineError
from lora_rocm.foundation.safe_path import python_environment
from lora_rocm.hardware.facts import Torch

ROOT = Path(__file__).resolve().parent.parent
LOOK_TIMEOUT_S = 300.0  # the first import of a torch of 10 GB, with a virus scanner watching
LOOK = r"""
import importlib.metadata, json, sys
def say(**found):
    print("\nfound", json.dumps(found), flush=True)
say(python=sys.version_info[:2])
try:
    wheel = importlib.metadata.distribution("torch")
except importlib.metadata.PackageNotFoundError:
    sys.exit()
say(release=wheel.metadata["Version"] or "")  # as pip knows it; __version__ may have "+cu130" more
names = {(one.metadata["Name"] or "").lower().replace("_", "-"): one for one in importlib.metadata.distributions()}
say(device_packages={name: one.version for name, one in names.items()
    if name.startswith(("amd-torch-device-", "rocm-sdk-device-"))})
devices = None
if any(extra.startswith("device-") for extra in wheel.metadata.get_all("Provides-Extra") or []):
    devices = [name[len("amd-torch-device-"):] for name in names if name.startswith("amd-torch-device-")]
import torch
flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
say(version=torch.__version__, hip=torch.version.hip, cuda=torch.version.cuda,
    rocm=getattr(torch.version, "rocm", None),
    archs=devices if devices is not None else flags.split() if flags else None)
"""


@dataclass(frozen=True)
class Found:
    """The content of ``.venv``. ``python`` None: it does not run. ``broken``: why it or its torch cannot be used.

    device_packages: version of each package with a GPU's kernels, by its name; None where nobody looked.
    """

    python: tuple[int, ...] | None = None
    release: str | None = None
    torch: Torch | None = None
    broken: str = ""
    device_packages: Mapping[str, str] | None = None


def notify(text: str) -> None:
    """One line of progress, seen at once."""
    print(f"install: {text}", flush=True)


def again(option: str, windows: bool = os.name == "nt") -> str:
    """How to start the installer once more with an option."""
    return r"scripts\windows\install.bat " + option if windows else f"python3 scripts/install.py {option}"


def venv_command(clear: bool = False) -> list[str]:
    """Arguments for the machine's Python that create the venv."""
    return ["-m", "venv", *(["--clear"] if clear else []), ".venv"]


def call(command: list[str], hush: bool = False) -> bool:
    """Run a command in the repository's folder, its output where ours goes; True when it ended well."""
    # PIP_USER=0: a "user = true" in somebody's pip configuration would refuse every install into a venv.
    # PYTHONDONTWRITEBYTECODE: the step that compiles would leave nothing, and every process would compile again.
    environ = {
        **python_environment(os.environ),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_USER": "0",
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONUTF8": "1",
    }
    quiet = subprocess.DEVNULL if hush else None
    return subprocess.run(command, env=environ, cwd=ROOT, stderr=quiet).returncode == 0


def ask(command: list[str], timeout_s: float) -> tuple[int | None, str, str]:
    """Run a command; exit code (None: it took too long), output and errors."""
    try:
        environ = python_environment(os.environ)
        done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        return None, (error.stdout or b"").decode("utf-8", "replace"), ""
    except OSError as error:
        return 1, "", str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


class Venv:
    """``.venv`` below a folder, and the commands that fill it."""

    def __init__(self, root: Path) -> None:
        self.folder = root / ".venv"
        self.python = self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        self.stamp = self.folder / ".installed"

    def run(self, *arguments: str, hush: bool = False) -> bool:
        return call([str(self.python), *arguments], hush)

    def has_pip(self) -> bool:
        return ask([str(self.python), "-m", "pip", "--version"], LOOK_TIMEOUT_S)[0] == 0

    def look(self) -> Found:
        """Ask its Python, in a separate process, because torch may crash or hang when imported."""
        code, output, errors = ask([str(self.python), "-W", "ignore", "-c", LOOK], LOOK_TIMEOUT_S)
        seen: dict[str, object] = {}
        for line in output.splitlines():
            if line.startswith("found {") and line.endswith("}"):  # others are of torch, or torn when it was killed
                seen.update(json.loads(line.removeprefix("found ")))
        last = (errors.strip().splitlines() or [f"it ended with exit code {code}"])[-1]
        broken = "" if code == 0 else last if code is not None else f"no answer within {LOOK_TIMEOUT_S:.0f} s"
        found = Found(broken=broken)
        if "python" in seen:
            found = replace(found, python=tuple(seen["python"]))  # type: ignore[arg-type]
        if "release" in seen:
            release = str(seen["release"])
            half = "" if release and "version" in seen else "it is half installed"
            found = replace(found, release=release, broken=broken or half)
        packages = seen.get("device_packages")
        if isinstance(packages, dict):
            found = replace(found, device_packages=packages)
        if "version" in seen:
            found = replace(found, torch=_torch(seen))
        return found

    def make(self, clear: bool = False) -> None:
        if importlib.util.find_spec("ensurepip") is None:
            fix = "On Debian and Ubuntu: sudo apt install python3-venv"
            raise MachineError("no-venv-module", "This Python has no venv module.", where=sys.executable, fix=fix)
        if Path(sys.prefix).resolve() == self.folder.resolve():
            fix = "Start this with the Python that is installed on the machine."
            raise MachineError("inside-venv", "This is the Python of the .venv to be made.", where=sys.prefix, fix=fix)
        notify(f"making {self.folder}")
        if not call([sys.executable, *venv_command(clear)]):
            what = "The virtual environment could not be made (see above)."
            fix = "Common: a full or read-only disk. Then run this again."
            raise MachineError("venv-failed", what, where=str(self.folder), fix=fix)


def _torch(seen: dict[str, object]) -> Torch:
    archs = seen["archs"]
    return Torch(
        str(seen["version"]),
        hip=None if seen["hip"] is None else str(seen["hip"]),
        cuda=None if seen["cuda"] is None else str(seen["cuda"]),
        arch_list=tuple(str(arch).split(":")[0] for arch in archs) if isinstance(archs, list) else None,
        arch_source="asked",
        rocm=None if seen.get("rocm") is None else str(seen["rocm"]),
    )
