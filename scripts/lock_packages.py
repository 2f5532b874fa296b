"""Write ``locks/``: the hashes of every file of the packages that constraints.txt pins, for pip's hash-checking mode.

    python scripts/lock_packages.py

Run it after a change of constraints.txt or of the dependencies in pyproject.toml. uv resolves for all systems and all
Pythons that pyproject.toml allows; a package that only some of them need gets their marker. torch and packages that
only its CUDA wheels require are omitted: they come from torch's own index.

Exit codes: 0 written; 1 constraints.txt lacks a package, which is named with the version to pin.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lora_rocm.hardware.wheels import ANY_TORCH, NEWEST_TORCH  # noqa: E402
from scripts.install import LOCKS, numbers  # noqa: E402
from scripts.uv_tool import install_uv  # noqa: E402

BUILDS = ("editables", "setuptools")
"""hatchling's requirement for an editable install of this package, and the builder of packages without a wheel."""
OF_TORCH = re.compile(r"torch|triton|cuda-|nvidia-")
ELSEWHERE = "sys_platform == 'emscripten'"
"""A marker of a system without torch."""
HEADER = "# Built from constraints.txt by scripts/lock_packages.py. Do not edit.\n"


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Normalised name -> version, of a file of constraints or a lock."""
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)
    return {normal(name): version for name, version in found}


def entries(text: str) -> dict[str, str]:
    """Normalised name -> its lines in a lock: the pin with its marker, and the hashes."""
    found = re.findall(r"^([\w.-]+)==.*\n(?: .*\n)*", text, re.MULTILINE)
    blocks = re.findall(r"^[\w.-]+==.*\n(?: .*\n)*", text, re.MULTILINE)
    return dict(zip(map(normal, found), blocks, strict=True))


def resolved(uv: str, folder: Path, requirements: list[str]) -> dict[str, str]:
    """The entries of requirements and of all that they need, at the versions of constraints.txt."""
    wanted = folder / "wanted.in"
    wanted.write_text("\n".join(requirements) + "\n", encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    how = ["--universal", "--python-version", project["requires-python"].removeprefix(">="), "--generate-hashes"]
    quiet = ["--no-annotate", "--no-header", "--no-emit-index-url", "--no-emit-find-links", "-q"]
    command = [uv, "pip", "compile", *how, *quiet, "-c", "constraints.txt", str(wanted)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    found = entries(done.stdout.decode("utf-8"))
    return {name: text for name, text in found.items() if ELSEWHERE not in text.partition("\n")[0]}


def main() -> int:
    """Resolve and write."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, extras = data["project"], data["project"]["optional-dependencies"]
    major, oldest = numbers(ANY_TORCH)
    torches = [f"torch=={major}.{minor}.*" for minor in range(oldest, NEWEST_TORCH[1] + 1)]
    of_project = [*project["dependencies"], *extras["ui"]]  # a checkout has the web page as well
    run = [*of_project, *data["build-system"]["requires"], *BUILDS, torches[-1]]
    with tempfile.TemporaryDirectory(prefix="lora-rocm-lock-", ignore_cleanup_errors=True) as name:
        uv, folder = install_uv(Path(name) / "tools"), Path(name)
        of_run, of_pip = resolved(uv, folder, run), resolved(uv, folder, ["pip"])
        for torch in torches[:-1]:  # fails if a torch cannot be installed together with the pinned packages
            resolved(uv, folder, [torch])
        of_dev, of_triton = resolved(uv, folder, [*run, *extras["dev"]]), resolved(uv, folder, extras["triton"])
    pinned = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    missing = {name: text for name, text in (of_dev | of_pip).items() if name not in pinned}
    unknown = [text.split()[0] for name, text in missing.items() if not OF_TORCH.match(name)]
    if unknown:
        print("constraints.txt lacks", *unknown, sep="\n")
        return 1
    parts = {
        "pip": of_pip,
        # with the marker of dev, as a package is in one lock: click needs colorama on Windows, mkdocs everywhere
        "run": {name: of_dev.get(name, text) for name, text in of_run.items() if name in pinned},
        "dev": {name: text for name, text in of_dev.items() if name in pinned and name not in of_run},
        "triton": {name: text for name, text in of_triton.items() if name == "triton"},
    }
    for part, found in parts.items():
        path = ROOT / LOCKS[part]
        path.parent.mkdir(exist_ok=True)
        path.write_text(HEADER + "".join(found[name] for name in sorted(found)), encoding="utf-8", newline="\n")
        print(f"{LOCKS[part]}: {len(found)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
