"""The locks agree with constraints.txt and pyproject.toml, and pip takes no file without one of their hashes."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

from lora_rocm.hardware.wheels import ANY_TORCH
from scripts import lock_packages
from scripts.install import LOCKS, lock_command
from scripts.lock_packages import entries, normal, pins

ROOT = Path(__file__).parents[1]
SYSTEMS = {
    "linux": {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64"},
    "windows": {"sys_platform": "win32", "platform_system": "Windows", "os_name": "nt", "platform_machine": "AMD64"},
}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
ENTRY = re.compile(r"[\w.-]+==[\w.!+]+( ; [^\\\n]+)?(?P<hashes>( \\\n    --hash=sha256:[0-9a-f]{64})+)\n")


def text_of(part: str) -> str:
    return (ROOT / LOCKS[part]).read_text(encoding="utf-8")


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_locks_and_constraints_pin_the_same() -> None:
    """Each package is in one lock, with the version that constraints.txt pins; Triton alone is pinned elsewhere."""
    parts = {part: pins(text_of(part)) for part in LOCKS}
    (triton,) = project()["project"]["optional-dependencies"]["triton"]  # type: ignore[index]
    assert parts.pop("triton") == {"triton": re.search(r"==([\d.]+)", triton)[1]}  # type: ignore[index]
    assert sum(map(len, parts.values())) == len({name for part in parts.values() for name in part})
    both = {name: version for part in parts.values() for name, version in part.items()}
    assert both == pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))


def test_a_lock_has_hashes_and_nothing_else() -> None:
    """No index, no folder, no option: the user chooses where pip searches, and the lock chooses what it takes."""
    for part in LOCKS:
        text = text_of(part).removeprefix(lock_packages.HEADER)
        assert ENTRY.sub("", text) == "", part
        assert set(entries(text)) == set(pins(text)) != set()
    assert ENTRY.sub("", "--index-url https://x.example/simple\nrich==1.0 \\\n    --hash=sha256:" + "0" * 64 + "\n")


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_what_the_project_asks_for_is_locked_on_every_system(system: str, python: str) -> None:
    environment = {**SYSTEMS[system], "python_version": python, "python_full_version": f"{python}.1"}
    environment |= {"implementation_name": "cpython", "platform_python_implementation": "CPython", "extra": ""}
    there = dict[str, str]()
    for part in ("run", "dev"):
        for name, entry in entries(text_of(part)).items():
            marker = entry.partition("\n")[0].removesuffix(" \\").partition(" ; ")[2]
            if not marker or Marker(marker).evaluate(environment):  # type: ignore[arg-type]
                there[name] = pins(entry)[name]
    data = project()
    extras = data["project"]["optional-dependencies"]  # type: ignore[index]
    run = [*data["project"]["dependencies"], *extras["ui"], *data["build-system"]["requires"]]  # type: ignore[index]
    for part, asked in (("run", run), ("dev", extras["dev"])):
        for wanted in map(Requirement, asked):
            if str(wanted) == ANY_TORCH:
                continue
            name = normal(wanted.name)
            assert name in there and wanted.specifier.contains(there[name]), f"{wanted} of {part}"
            assert part == "dev" or name in pins(text_of("run"))


def wheel(folder: Path, version: str, content: str) -> str:
    """Write a tiny package as a wheel; its hash."""
    folder.mkdir(exist_ok=True)
    path, info = folder / f"tiny_thing-{version}-py3-none-any.whl", f"tiny_thing-{version}.dist-info"
    files = {
        "tiny_thing.py": content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny-thing\nVersion: {version}\nRequires-Dist: not-there\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{name},sha256={_record(text)},{len(text)}" for name, text in files.items()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": "\n".join([*rows, f"{info}/RECORD,,"])}.items():
            archive.writestr(name, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _record(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode("utf-8")).digest()).rstrip(b"=").decode("ascii")


@pytest.mark.parametrize(
    "found",
    ["the same", "other bytes", *(pytest.param(name, marks=pytest.mark.slow) for name in ("better", "no hash"))],
)
def test_pip_takes_a_file_by_its_hash_alone(found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the installer's own command. "better": a second index has the same version, and one that pip likes better."""
    wanted = wheel(tmp_path / "index", "1.0", "content = 'locked'")
    if found == "other bytes":
        wheel(tmp_path / "index", "1.0", "content = 'other'")
    folders = [tmp_path / "index"]
    if found == "better":
        for version in ("1.0", "1.0+theirs"):
            wheel(tmp_path / "theirs", version, "content = 'other'")
        folders.insert(0, tmp_path / "theirs")
    hashes = "" if found == "no hash" else f" \\\n    --hash=sha256:{wanted}"
    (tmp_path / "locks").mkdir()
    (tmp_path / LOCKS["run"]).write_text(f"tiny-thing==1.0{hashes}\n", encoding="utf-8")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("PIP_FIND_LINKS", " ".join(folder.as_uri() for folder in folders))
    command = [sys.executable, *lock_command("run"), "--no-index", "--target", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", errors="replace")
    taken = tmp_path / "site" / "tiny_thing.py"
    if found == "the same":
        assert done.returncode == 0 and "locked" in taken.read_text(encoding="utf-8"), done.stderr
    else:
        assert done.returncode != 0 and not taken.exists()
