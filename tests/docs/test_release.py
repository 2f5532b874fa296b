"""A release: its files install and train elsewhere; changelog, issue templates and workflow are true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import lora_rocm
from lora_rocm.hardware.wheels import indexes
from tests.docs.pages import ROOT

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def section(version: str) -> str:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return re.split(r"^## ", text.partition(f"## [{version}]")[2], flags=re.MULTILINE)[0]


def test_the_changelog_has_one_line_a_change() -> None:
    lines = section(lora_rocm.__version__).splitlines()[1:]
    bullets = [line for line in lines if line.startswith("- ")]
    assert len(bullets) > 20 and max(map(len, bullets)) <= 200
    assert [line for line in lines if line.startswith(" ")] == []
    assert {"### Added", "### Changed", "### Fixed"} <= set(lines)


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.name)
def test_an_issue_form_asks_for_the_report_of_doctor(form: Path) -> None:
    content: dict[str, Any] = YAML(typ="safe").load(form.read_text(encoding="utf-8"))
    if form.name == "config.yml":
        return
    asked = {field["id"]: field for field in content["body"] if "id" in field}
    assert "doctor --report" in asked["report"]["attributes"]["label"]
    assert asked["report"]["validations"]["required"] is True
    kinds = {field["type"] for field in content["body"]}
    assert kinds <= {"markdown", "input", "textarea", "dropdown", "checkboxes"} and content["name"]


def test_the_workflow_runs_what_is_here() -> None:
    jobs = YAML(typ="safe").load((ROOT / ".github" / "workflows" / "check.yml").read_text(encoding="utf-8"))["jobs"]
    steps = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert ".ci/run" in steps["linux"] and os.access(ROOT / ".ci" / "run", os.X_OK)
    files = [step.partition(" ")[0].replace("\\", "/") for step in steps["windows"]]
    assert {Path(file).stem for file in files} == {"install", "doctor", "demo", "test"}
    assert all((ROOT / file).is_file() for file in files)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_a_build_trains_in_an_empty_environment(tool: str, kind: str, tmp_path: Path) -> None:
    """Needs the network, 2 GB of disk, and uv in PATH or from the network. The folder has a space in its name."""
    place = tmp_path / "my environments"
    place.mkdir()
    build = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(place / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (built,) = (place / "dist").iterdir()
    torch, index = f"torch=={metadata.version('torch')}", indexes()["cpu"].url
    folder = "Scripts" if sys.platform == "win32" else "bin"
    if tool == "pip":
        venv.create(place / "empty", with_pip=True)
        pip = [
            str(place / "empty" / folder / "python"),
            "-m",
            "pip",
            "install",
            "-q",
            "--retries",
            "0",
            "--timeout",
            "15",
        ]
        subprocess.run([*pip, str(built), torch, "--extra-index-url", str(index)], check=True)
        program = place / "empty" / folder / "lora-rocm"
    else:
        from scripts.uv_tool import install_uv

        places = {"UV_TOOL_DIR": str(place / "tools"), "UV_TOOL_BIN_DIR": str(place / "bin")}
        found = os.environ.get("PIP_FIND_LINKS", "")
        where = ["--find-links", found] if found else ["--index", str(index), "--index-strategy", "unsafe-best-match"]
        command = [install_uv(place / "uv"), "tool", "install", "-q", "--python", sys.executable, *where]
        subprocess.run([*command, "--with", torch, str(built)], check=True, env={**os.environ, **places})
        program = place / "bin" / "lora-rocm"
    run = {"cwd": place, "check": True, "capture_output": True, "encoding": "utf-8"}
    assert lora_rocm.__version__ in subprocess.run([program, "--version"], **run).stdout
    subprocess.run([program, "demo"], **run)
    assert list(place.glob("runs/*/*.safetensors"))
