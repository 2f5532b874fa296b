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
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
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


def test_make_targets_of_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    used = set(
        re.findall(
            r"(?:^|`)make ([a-z]+)", "".join(page.read_text(encoding="utf-8") for page in DOCUMENTS), re.MULTILINE
        )
    )
    assert {"install", "test", "check"} <= used
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


DOCUMENTS = (ROOT / "CONTRIBUTING.md", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
CITED = re.compile(r"`(?:python |\.venv/bin/python )?([\w./<>*-]+(?:\.(?:py|toml|yaml|md|bat)|/))`")
NAME_IN_FILE = re.compile(r"`(\w+)` (?:of |in |\()`([\w./-]+\.(?:py|toml))`")
NOT_OURS = {
    "convert_lora_to_gguf.py", "convert_z_image_lora_to_comfy.py", "network_norm.py", "torch.py", "docs/building.md",
    "configs/", "checkpoints/step-00000500/", "merged/", "peft/", "runs/<recipe>-<time>/", "samples/", "tensorboard/",
    "grid/", "tries/", "earlier-exports/step-00000500/",
    "my.yaml", "my-chat.yaml", "my-lora.yaml", "recipe.yaml", "NAME-embeddings/", "samples/asked/", "recipe.asked.yaml",
    "unsloth-cli.py", "config.toml", "FILE-lora-rocm.yaml", "FOLDER.yaml",
}  # fmt: skip
"""Files of other projects, of a run, and of the user."""


def cited_paths(text: str) -> set[str]:
    return set(CITED.findall(text)) - NOT_OURS


def is_there(cited: str, files: list[str]) -> bool:
    """Whether a file or folder has this path, or ends in it; <name> and * stand for any."""
    pattern = re.sub(r"<\w+>|\\\*|\*", "[^/]+", re.escape(cited.rstrip("/")).replace(r"\<", "<").replace(r"\>", ">"))
    ends = re.compile(rf"(?:.*/)?{pattern}" + ("/.*" if cited.endswith("/") else ""))
    return any(ends.fullmatch(file) for file in files)


def files_here() -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in tracked_files()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_a_document_names_is_there(document: Path) -> None:
    files = files_here()
    assert [
        cited for cited in sorted(cited_paths(document.read_text(encoding="utf-8"))) if not is_there(cited, files)
    ] == []


def test_a_file_that_is_not_there_is_noticed() -> None:
    files = ["lora_rocm/optim/base.py", "lora_rocm/families/sdxl/spec.py"]
    for cited in ("optim/base.py", "families/<name>/spec.py", "families/*/spec.py", "optim/", "base.py"):
        assert cited_paths(f"see `{cited}`.") == {cited} and is_there(cited, files), cited
    for cited in ("optim/bases.py", "tim/base.py", "<name>/families/spec.py", "opt/"):
        assert not is_there(cited, files), cited


def test_every_name_that_a_document_places_in_a_file_is_in_it() -> None:
    paths, checked = tracked_files(), 0
    for document in DOCUMENTS:
        for name, cited in NAME_IN_FILE.findall(document.read_text(encoding="utf-8").replace("\n", " ")):
            found = [path for path in paths if path.as_posix().endswith(f"/{cited}")]
            assert any(re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")) for path in found), (name, cited)
            checked += 1
    assert checked >= 5


def test_every_variable_that_is_read_is_in_a_document() -> None:
    product = [*(ROOT / "lora_rocm").rglob("*.py"), *(ROOT / "scripts").rglob("*.py"), *BAT_FILES]
    read = {name for path in product for name in re.findall(r"LORA_ROCM_[A-Z_]+", path.read_text(encoding="utf-8"))}
    documents = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    internal = {"LORA_ROCM_SETTINGS", "LORA_ROCM_STACK"}  # set by the parent for its children
    assert sorted(name for name in read - internal if name not in documents) == []
