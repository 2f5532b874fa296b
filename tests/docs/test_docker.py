"""The Dockerfile, read but not built: its paths exist, and its versions are the tables' and the page's."""

from __future__ import annotations

import fnmatch
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from lora_rocm.doctor.linux_checks import CONTAINER_FLAGS
from lora_rocm.hardware.wheels import INDEX_VARIABLE, TORCH_VARIABLE, indexes
from scripts import install
from tests.docs.pages import ROOT, blocks

PAGE = "docs/how-to/docker.md"
PYTHON_OF = {"ubuntu:24.04": (3, 12)}
"""Base image -> the version of its package python3."""


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile in order: (name, arguments)."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


FILE = instructions((ROOT / "Dockerfile").read_text(encoding="utf-8"))


def of(name: str) -> list[str]:
    return [arguments for kind, arguments in FILE if kind == name]


def arguments_of_build() -> dict[str, str]:
    return {name: value for name, _, value in (each.partition("=") for each in of("ARG"))}


def is_sent(path: str, rules: list[str]) -> bool:
    """Whether .dockerignore lets a path into the build. The last rule that fits it, or a folder above it, decides."""
    sent = True
    for rule in rules:
        pattern = rule.lstrip("!").removeprefix("**/")
        parts = Path(path).parts
        above = ["/".join(parts[: number + 1]) for number in range(len(parts))]
        names = list(parts) if "**/" in rule else above
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            sent = rule.startswith("!")
    return sent


RULES = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
RULES = [rule for rule in RULES if rule and not rule.startswith("#")]


def copied() -> list[str]:
    return [source for each in of("COPY") for source in each.split()[:-1]]


def test_what_is_copied_exists_and_is_sent() -> None:
    assert all((ROOT / path).exists() and is_sent(path, RULES) for path in copied())
    assert {rule.lstrip("!") for rule in RULES if rule.startswith("!")} == set(copied())


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("lora_rocm/cli.py", True), ("locks/run.txt", True), ("lora_rocm/__pycache__/cli.pyc", False),
        (".venv/bin/python", False), (".git/config", False), ("runs/a/lora.safetensors", False), (".env", False),
        ("cache/x", False), ("my-images/1.png", False), ("tests/test_cli.py", False),
    ],
)  # fmt: skip
def test_nothing_else_is_sent(path: str, sent: bool) -> None:
    assert is_sent(path, RULES) == sent


def test_the_installer_finds_its_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [
        *install.LOCKS.values(),
        "constraints.txt",
        "pyproject.toml",
        project["readme"],
        *project["license-files"],
    ]
    needed += ["recipes/sdxl.yaml", "lora_rocm/hardware/wheels.toml", "scripts/install.py", "scripts/venv_state.py"]
    assert all(any(path == given or path.startswith(f"{given}/") for given in copied()) for path in needed)
    command = next(each for each in of("RUN") if "install.py" in each)
    assert f'{INDEX_VARIABLE}="$TORCH_INDEX" {TORCH_VARIABLE}="$TORCH" python3 scripts/install.py' in command


def test_the_pytorch_is_the_one_of_the_table() -> None:
    arguments = arguments_of_build()
    index = indexes()[arguments["TORCH_INDEX"]]
    assert arguments["TORCH"] == index.torch and index.kind == "rocm" and "linux" in index.systems


def test_the_python_of_the_base_is_supported() -> None:
    (base,) = of("FROM")
    assert install.OLDEST_PYTHON <= PYTHON_OF[base] <= (3, 14) and sys.version_info >= install.OLDEST_PYTHON


def test_the_page_builds_with_arguments_of_the_file_and_of_the_table() -> None:
    commands = [shlex.split(command) for block in blocks(PAGE) for command in block.commands() if " build " in command]
    given = dict(
        word.split("=", 1) for command in commands for number, word in enumerate(command)
        if command[number - 1] == "--build-arg"
    )  # fmt: skip
    assert given.keys() == arguments_of_build().keys() and len(commands) >= 2
    index = indexes()[given["TORCH_INDEX"]]
    assert given["TORCH"] == index.torch.format(gfx="gfx1201") and "linux" in index.systems


def test_the_page_runs_it_with_the_gpu_and_the_volumes_of_the_file() -> None:
    (command,) = (each for block in blocks(PAGE) for each in block.commands() if each.startswith("docker run"))
    words = shlex.split(command)
    pairs = list(zip(words, words[1:], strict=False))
    assert [value for name, value in pairs if name == "--device"] == ["/dev/kfd", "/dev/dri"]
    groups = [value for name, value in pairs if name == "--group-add"]
    assert [re.findall(r"getent group (\w+)", group) for group in groups] == [["video"], ["render"]]
    assert all(group in CONTAINER_FLAGS[0] for group in groups), "doctor says the same"
    mounted = {value.partition(":")[2] for name, value in pairs if name == "-v"}
    assert mounted == {of("WORKDIR")[-1], *of("VOLUME")} and "--init" in words and "--shm-size" in words
    settings = dict(word.split("=", 1) for each in of("ENV") for word in each.split())
    assert settings["HOME"] in of("VOLUME") and of("WORKDIR")[0] in settings["PATH"]
    assert of("ENTRYPOINT") == ['["lora-rocm"]'] and words[-2:] == ["lora-rocm", "doctor"]
