"""The lines that install lora-rocm with pip and uv take a torch for AMD GPUs.

Folders simulate the indexes. As in the real ones, the default index has a newer torch for NVIDIA, and the vendor's has
old versions of other packages.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lora_rocm
from lora_rocm.hardware.wheels import indexes
from tests.docs.pages import Block, blocks

PAGE = "docs/start/install.md"
WHEEL = f"lora_rocm-{lora_rocm.__version__}-py3-none-any.whl"


def lines(tool: str) -> list[tuple[Block, str]]:
    return [(block, command) for block in blocks(PAGE) for command in block.commands() if command.startswith(tool)]


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """Write a package that holds nothing into an index, a folder of the simple API."""
    place = folder / name.replace("_", "-")
    place.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    extras = sorted({match[1] for need in needs if (match := re.search(r"extra == '([\w-]+)'", need))})
    metadata += "".join(f"Provides-Extra: {extra}\n" for extra in extras)
    metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
    files = {
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    path = place / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD")))
    names = "".join(f'<a href="{file.name.replace("+", "%2B")}">{file.name}</a>\n' for file in place.glob("*.whl"))
    (place / "index.html").write_text(f"<!DOCTYPE html><html><body>{names}</body></html>", encoding="utf-8")


def simulated(folder: Path) -> tuple[Path, dict[str, Path]]:
    """Make the default index, and the indexes of torch by their address."""
    default = folder / "default"
    for version in ("2.13.0", "2.15.0"):
        wheel(default, "torch", version, "nvidia_cuda", "helper>=2")
    wheel(default, "nvidia_cuda", "13.0")
    wheel(default, "helper", "2.1")
    wheel(default, "lora_rocm", lora_rocm.__version__, "torch>=2.11", "helper>=2")
    shutil.copy(default / "lora-rocm" / WHEEL, folder)
    vendors = {}
    for index in indexes().values():
        if index.kind == "rocm" and index.url and not index.only_asked:
            place = vendors[index.url] = folder / index.id
            version = index.torch.partition("==")[2]
            local = version if "+" in version else f"{version}+rocm{index.rocm}"
            wheel(place, "torch", local, "helper>=1", "kernels ; extra == 'device-gfx1201'")
            wheel(place, "torch", "2.14.0+rocm7.14.1", "helper>=1", "kernels ; extra == 'device-gfx1201'")
            wheel(place, "kernels", "1.0")
            wheel(place, "helper", "1.0")
    return default, vendors


def with_simulated(words: list[str], vendors: dict[str, Path]) -> list[str]:
    return [vendors[word].as_uri() if word in vendors else word for word in words]


def test_the_lines_name_torch_and_index_of_the_table() -> None:
    found = [block.words(command) for tool in ("pip", "uv") for block, command in lines(tool)]
    assert len(found) >= 4
    for words in found:
        assert WHEEL in words
        (index,) = (each for each in indexes().values() if each.url in words)
        wanted = index.torch.format(gfx="gfx1201")
        assert any(word == wanted or word == f"{wanted}+rocm{index.rocm}" for word in words), words
        assert index.kind == "rocm" and not index.only_asked


@pytest.mark.parametrize("number", [0, 1])
def test_pip_takes_a_torch_for_amd(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default, vendors = simulated(tmp_path)
    block, command = lines("pip")[number]
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("PIP_INDEX_URL", default.as_uri())
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)

    def chosen(words: list[str]) -> dict[str, str]:
        dry = [sys.executable, "-m", *words, "--dry-run", "--ignore-installed", "-q", "--report", "report.json"]
        subprocess.run(dry, cwd=tmp_path, check=True, capture_output=True)
        found = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["install"]
        return {each["metadata"]["name"].replace("_", "-"): each["metadata"]["version"] for each in found}

    words = with_simulated(block.words(command), vendors)
    taken = chosen(words)
    assert "+rocm" in taken["torch"] and "nvidia-cuda" not in taken and taken["helper"] == "2.1"
    assert ("kernels" in taken) is ("device-" in command)
    without = [word for word in words if not word.startswith("torch")]
    if number == 0:  # the table's lines name torch because of this
        assert chosen(without)["torch"] != taken["torch"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_uv_takes_a_torch_for_amd(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs uv in PATH, or the network to install it."""
    from scripts.uv_tool import install_uv

    uv = shutil.which("uv") or install_uv(tmp_path / "uv")
    default, vendors = simulated(tmp_path)
    block, command = lines("uv")[number]
    for name, value in {
        "DEFAULT_INDEX": default.as_uri(),
        "TOOL_DIR": str(tmp_path / "tools"),
        "NO_CONFIG": "1",
    }.items():
        monkeypatch.setenv(f"UV_{name}", value)
    monkeypatch.setenv("UV_TOOL_BIN_DIR", str(tmp_path / "bin"))
    words = with_simulated(block.words(command), vendors)
    subprocess.run([uv, *words[1:]], cwd=tmp_path, check=True, capture_output=True)
    site = next((tmp_path / "tools").rglob("site-packages"))
    taken = {path.name.removesuffix(".dist-info") for path in site.glob("*.dist-info")}
    (torch,) = (name for name in taken if name.startswith("torch-"))
    assert "+rocm" in torch and "helper-2.1" in taken and not any(name.startswith("nvidia") for name in taken)
    assert any(name.startswith("kernels") for name in taken) is ("device-" in command)
