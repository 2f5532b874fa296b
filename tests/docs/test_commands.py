"""Every command in the README and on the pages under Start is run unchanged, except the commands in ``NOT_RUN``.

The pages train SDXL and a Qwen, which are gigabytes. The tests use tiny models of the package instead, and fewer
steps, by editing the recipe that the page has (``STAND_INS``). The commands themselves are not changed.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from lora_rocm.cli import app
from tests.docs.pages import EXAMPLE, PAGES, ROOT, SHELLS, START, Block, blocks

NOT_RUN = {
    r"make install": "makes the .venv that this test runs in, from the network (tests/test_install.py)",
    r"source .*activate": "changes the reader's shell (test_the_lines_of_linux_make_and_enter_an_environment)",
    r"python3 -m venv lora": "the same test runs it",
    r"py -3 -m venv lora|lora\\Scripts\\activate": "Windows (the workflow runs the .bat files there)",
    r"pip install .*|uv tool install .*": "gigabytes for an AMD GPU (tests/docs/test_install_lines.py tries the lines)",
    r"scripts\\windows\\(install|shell)\.bat": "Windows (tests/windows runs these files under Wine)",
}
"""Pattern of a whole command -> why it is not run here."""
STAND_INS = {
    "my-lora.yaml": {
        "stabilityai/stable-diffusion-xl-base-1.0": "builtin:tiny-sdxl",
        "resolution: 1024": "resolution: 128",
        "max_train_steps: 1500": "max_train_steps: 4",
        "every_n_steps: 250": "every_n_steps: 2",
        "sample:\n": "sample:\n  steps: 2\n",
    },
    "my-chat.yaml": {
        "Qwen/Qwen3-1.7B": "builtin:tiny-llama",
        "max_train_steps: 60": "max_train_steps: 4",
        "every_n_steps: 20": "every_n_steps: 2",
        "sample:\n": "sample:\n  steps: 8\n",
    },
}
"""Recipe of a page -> replacements in it; each old text has to be present."""
PROGRAM = str(Path(sys.executable).with_name("lora-rocm.exe" if sys.platform == "win32" else "lora-rocm"))
QUICK = re.compile(r"lora-rocm doctor")
"""Commands of the quick set; the others take minutes."""


def why_not_run(command: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.fullmatch(pattern, command)), None)


def files_of_the_reader(page: str, folder: Path) -> None:
    """Write the reader's files: those that the page shows, and pictures with captions."""
    for block in blocks(page):
        if block.title:
            content = block.content
            for there, here in STAND_INS.get(block.title, {}).items():
                assert there in content, f"{block.title} has no {there!r}"
                content = content.replace(there, here)
            (folder / block.title).write_text(content, encoding="utf-8")
    pictures = ROOT / "lora_rocm" / "builtin" / "demo_images"
    (folder / "my-images").mkdir()
    for path in sorted(pictures.glob("zibu_0*")):
        shutil.copy(path, folder / "my-images")


def run(block: Block, command: str, folder: Path) -> None:
    words = block.words(command)
    assert words[0].removeprefix(".venv/bin/") == "lora-rocm", command
    done = subprocess.run([PROGRAM, *words[1:]], cwd=folder, capture_output=True, encoding="utf-8", errors="replace")
    assert done.returncode == 0, f"{block.page}: {command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


@functools.cache
def run_demo(block: Block, command: str, folder: Path) -> None:
    """The demo takes minutes and is the same on every page."""
    run(block, command, folder)


def commands(page: str) -> list[tuple[Block, str]]:
    found = [(block, command) for block in blocks(page) for command in block.commands()]
    return [(block, command) for block, command in found if why_not_run(command) is None]


@pytest.mark.parametrize("page", PAGES)
def test_a_block_is_commands_or_a_file_or_an_example(page: str) -> None:
    assert blocks(page)
    assert [
        block.content
        for block in blocks(page)
        if not (block.language in SHELLS or block.title or block.language == EXAMPLE)
    ] == []


def test_what_is_not_run_is_on_a_page_and_the_rest_is_the_program() -> None:
    everything = [command for page in PAGES for block in blocks(page) for command in block.commands()]
    assert [pattern for pattern in NOT_RUN if not any(re.fullmatch(pattern, each) for each in everything)] == []
    assert [each for each in everything if why_not_run(each) is None and "lora-rocm " not in each] == []
    assert why_not_run("rm -r runs") is None and why_not_run("lora-rocm train my.yaml") is None


def unknown_options(words: list[str]) -> list[str]:
    group = typer.main.get_command(app)
    command = group.commands.get(words[1])  # type: ignore[attr-defined]
    known = {option for param in (command or group).params for option in (*param.opts, *param.secondary_opts)}
    given = [word.partition("=")[0] for word in words[1:] if word.startswith("-")]
    return [option for option in given if option not in known] + ([] if command else [words[1]])


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_their_options_exist(page: str) -> None:
    for block, command in commands(page):
        assert unknown_options(block.words(command)) == [], command
    assert unknown_options(["lora-rocm", "train", "--sett", "x"]) == ["--sett"]
    assert unknown_options(["lora-rocm", "fly"]) == ["fly"]


@pytest.mark.parametrize("page", PAGES)
def test_the_quick_commands_of_a_page_work(page: str, tmp_path: Path) -> None:
    files_of_the_reader(page, tmp_path)
    for block, command in commands(page):
        if QUICK.match(command):
            run(block, command, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES)
def test_all_commands_of_a_page_work_in_order(
    page: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    files_of_the_reader(page, tmp_path)
    for block, command in commands(page):
        if command.endswith("lora-rocm demo"):
            run_demo(Block("", "bash", "", ""), "lora-rocm demo", tmp_path_factory.getbasetemp())
        else:
            run(block, command, tmp_path)


def in_bash(lines: list[str], folder: Path) -> str:
    """The output of a reader's lines in one shell."""
    command = ["bash", "-c", "\n".join(["set -e", *lines])]
    done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform == "win32", reason="lines for Linux")
def test_make_install_calls_the_installer_and_its_environment_is_entered() -> None:
    (block,) = (each for each in blocks(START[0]) if each.commands()[:1] == ["make install"])
    make, source = block.commands()
    assert "scripts/install.py --dev" in in_bash([f"{make} --dry-run"], ROOT)
    activate = ROOT / source.removeprefix("source ")
    if activate.is_file():
        assert in_bash([source, "command -v python"], ROOT) == str(activate.with_name("python"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="lines for Linux")
def test_the_lines_of_linux_make_and_enter_an_environment(tmp_path: Path) -> None:
    (block,) = (each for each in blocks(START[0]) if each.language == "bash" and "-m venv" in each.content)
    *lines, install = block.commands()
    assert len(lines) == 2 and install.startswith("pip install ")
    assert in_bash([*lines, "command -v pip"], tmp_path) == str(tmp_path / "lora" / "bin" / "pip")


def test_a_command_that_fails_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="nowhere"):
        run(Block("README.md", "bash", "", ""), "lora-rocm status nowhere", tmp_path)
