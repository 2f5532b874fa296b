"""One Wine prefix for all workers of the suite, and the fake program, compiled once."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL

import pytest
from filelock import FileLock

from tests.windows.stage import Stage

COMPILER = "x86_64-w64-mingw32-gcc"
NEEDED = {"wine": "packages wine and wine64", COMPILER: "package mingw-w64"}
RECORDER = Path(__file__).with_name("recorder.c")


def is_required() -> bool:
    """Continuous integration has these programs or fails by name."""
    return os.environ.get("CI", "") not in ("", "0", "false") or os.environ.get("LORA_ROCM_REQUIRE_WINE") == "1"


def require(programs: dict[str, str]) -> None:
    """Skip with a reason where one is missing, or fail where they have to be there."""
    missing = [f"{program} ({package})" for program, package in programs.items() if not shutil.which(program)]
    if missing:
        reason = f"the .bat files were not tried: missing {', '.join(missing)}"
        (pytest.fail if is_required() else pytest.skip)(reason)


@pytest.fixture(scope="session")
def wine_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables that lead to the prefix; the first worker creates it, and the last one ends its server."""
    require(NEEDED)
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wine"
    shared.mkdir(exist_ok=True)
    environment = {
        "HOME": str(shared),
        "LC_ALL": "C.UTF-8",
        "PATH": os.environ["PATH"],
        "TMPDIR": str(shared),
        "WINEARCH": "win64",
        "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": "mscoree=;mshtml=;winemenubuilder.exe=",
        "WINEPREFIX": str(shared / "prefix"),
    }
    lock, users = FileLock(shared / "lock"), shared / "users"
    with lock:
        if not users.exists():
            subprocess.run(["wine", "cmd", "/c", "ver"], env=environment, check=True, stdout=DEVNULL, stderr=DEVNULL)
            options = ["-O1", "-Wall", "-Wextra", "-Werror", "-municode"]
            subprocess.run([COMPILER, *options, "-o", shared / "recorder.exe", RECORDER], check=True)
        users.write_text(str(int(users.read_text(encoding="utf-8")) + 1 if users.exists() else 1), encoding="utf-8")
    yield environment
    with lock:
        left = int(users.read_text(encoding="utf-8")) - 1
        users.write_text(str(left), encoding="utf-8")
        if not left:
            subprocess.run(["wineserver", "-k"], env=environment)


@pytest.fixture
def stage(wine_environment: dict[str, str], tmp_path: Path) -> Stage:
    """A fake of an installed checkout, in a folder with a space and an umlaut in its name."""
    return Stage(tmp_path / "lora rocm \u00fc", wine_environment)
