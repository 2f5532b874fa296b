"""The project around the code: versions, package data, README, line endings, words that do not belong here."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lora_rocm
from lora_rocm.cli import app

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BAT_FILES = sorted((ROOT / "scripts" / "windows").glob("*.bat"))
# Paths of somebody's machine, and hosts that only an installer has to know. Folders of AMD's and NAME are nobody's.
FOREIGN = re.compile(r"(?<![\w.])/(?:work|root)/[a-z]|/opt/(?!rocm|amd)[a-z]|pypi\.|pythonhosted", re.IGNORECASE)
HOMES = re.compile(r"(?<![\w.])/home/(?!NAME)[a-z]|[A-Z]:\\Users\\(?!NAME)[a-z]", re.IGNORECASE)


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], capture_output=True, encoding="utf-8", cwd=ROOT)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def foreign_words(text: str, homes: bool = True) -> list[str]:
    found = [*FOREIGN.finditer(text), *(HOMES.finditer(text) if homes else ())]
    return [match.group() for match in found]


def test_one_version() -> None:
    version = PYPROJECT["project"]["version"]
    assert lora_rocm.__version__ == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_package_data_is_there() -> None:
    package = files("lora_rocm")
    assert package.joinpath("builtin", "tiny_sdxl", "model_index.json").is_file()
    assert len(list((ROOT / "lora_rocm" / "builtin" / "demo_images").glob("*.png"))) >= 10
    assert PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == {"recipes": "lora_rocm/recipes"}


LOAD_FROM_WHEEL = """
import lora_rocm.recipe.load as load
assert load.__file__.startswith(sys.argv[1]), load.__file__
for name in load.shipped_recipes():
    load.load_recipe(name)
print(sorted(load.shipped_recipes()))
"""


def test_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="part of the dev extra")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    package = [path.relative_to(ROOT) for path in tracked_files() if path.is_relative_to(ROOT / "lora_rocm")]
    assert [path for path in package if not (site / path).is_file()] == []
    run = [sys.executable, "-c", f"import sys; sys.path.insert(0, sys.argv[1]){LOAD_FROM_WHEEL}", str(site)]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert done.stdout.strip() == str(sorted(path.name for path in (ROOT / "recipes").glob("*.yaml"))), done.stderr


def readme_commands() -> set[str]:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return {command for block in blocks for command in re.findall(r"\blora-rocm ([a-z]+)", block)}


def command_exists(command: str) -> bool:
    return CliRunner().invoke(app, [command, "--help"]).exit_code == 0


def test_commands_of_the_readme_exist() -> None:
    assert "train" in readme_commands()
    assert [command for command in sorted(readme_commands()) if not command_exists(command)] == []
    assert not command_exists("levitate")


def test_links_in_the_documentation_lead_somewhere() -> None:
    pages = [path for path in tracked_files() if path.suffix == ".md"]
    assert ROOT / "README.md" in pages
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    used = set(re.findall(r"\bmake ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"demo", "test", "check"} <= used
    assert [target for target in sorted(used) if f"\n{target}:" not in makefile] == []


def test_the_repository_speaks_of_itself_alone() -> None:
    found = {}
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" not in content and path != Path(__file__):
            is_test = path.is_relative_to(ROOT / "tests")  # tests make up people, to see whether names leak
            found[path] = foreign_words(content.decode("utf-8"), homes=not is_test)
    assert {path: words for path, words in found.items() if words} == {}


def test_foreign_words_are_noticed() -> None:
    assert len(foreign_words("cd /work/x; ls /home/ann; C:\\Users\\ann; see py" + "pi.org; /opt/x")) == 5
    assert foreign_words("https://download.pytorch.org/whl/cpu and runs/work/x") == []


def test_line_endings() -> None:
    assert {path.stem for path in BAT_FILES} >= {"demo", "test", "train", "resume", "sample", "install"}
    for path in BAT_FILES:
        content = path.read_bytes()
        assert content.count(b"\n") == content.count(b"\r\n") > 0, path.name
        assert content.isascii(), path.name
    for path in tracked_files():
        if path.suffix in {".py", ".yaml", ".toml", ".md", ".sh"}:
            assert b"\r\n" not in path.read_bytes(), path


def test_names_are_legal_on_windows() -> None:
    for path in tracked_files():
        for part in path.relative_to(ROOT).parts:
            assert not re.search(r'[<>:"|?*\\]|[. ]$', part), path
            assert part.split(".")[0].upper() not in {"CON", "PRN", "AUX", "NUL", "COM1", "LPT1"}, path
