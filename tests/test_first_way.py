"""A new user needs no documentation: each command's output has the command that comes next.

The installation is not part of it (``tests/test_install.py`` holds its last line), and the demo's recipe is shortened.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.program import SAMPLE, Program, Said, images
from tests.tiny_models import RUN_TARGETS, SHALLOW, write_tiny_sdxl

QUICK = {
    r"name_or_path: .*": "name_or_path: model",
    r"path: builtin:demo.*": "path: pics",
    r"resolution: \d+": "resolution: 64",
    r"rank: \d+": f"rank: 2\n  targets: ['{RUN_TARGETS}']",
    r"max_train_steps: \d+": "max_train_steps: 1",
    r"batch_size: \d+": "batch_size: 1",
    r"lr_warmup_steps: \d+": "lr_warmup_steps: 0",
    r"(?s)    - a zibu in the middle.*steps: 20": "  width: 32\n  height: 32\n  steps: 1",
    r"save_every_n_steps: \d+": "save_every_n_steps: 9",
    r"formats: .*": "formats: [kohya]",
}
"""Pattern -> what a new user writes in its place, here for a tiny model and two steps."""


def next_of(said: Said, command: str) -> list[str]:
    """The words of the ``lora-rocm`` command in an output, from the command's name on."""
    assert said.code == 0, said.text
    (line,) = [line for line in said.text.splitlines() if re.search(rf"lora-rocm {command}\b", line)]
    words = shlex.split(line[line.index("lora-rocm ") :])
    return words[1:]


def test_from_an_empty_folder_to_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = Program(monkeypatch)
    # the program alone lists the commands; new without a choice lists the recipes
    assert {"new", "demo", "recipes"} <= {*program("--help").out.split()}
    refused = program("new")
    assert refused.code == 2 and "demo" in refused.text and "--from" in refused.text
    made = program("new", "--from", "demo")
    check = next_of(made, "check")
    # make it quick
    recipe = Path(check[1])
    text = recipe.read_text(encoding="utf-8")
    for pattern, quick in QUICK.items():
        text = re.sub(pattern, quick, text, count=1)
    recipe.write_text(text, encoding="utf-8")
    write_tiny_sdxl(tmp_path / "model", **SHALLOW)
    images(tmp_path / "pics", count=1)
    # each output leads to the next command
    train = next_of(program(*check), "train")
    assert train == ["train", str(recipe)]
    trained = program(*train)
    sample, compare = next_of(trained, "sample"), next_of(trained, "compare")
    assert sample[2] == "--prompt" and sample[3] in text
    drawn = program(*sample, *SAMPLE[2:])
    assert drawn.code == 0 and list(Path(sample[1]).rglob("asked/*.png"))
    compared = program(*compare)
    assert compared.code == 0 and (Path(compare[1]) / "compare.html").is_file()


def test_a_missing_argument_is_answered_with_an_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = Program(monkeypatch)
    for command in ("train", "import", "sample", "inspect"):
        said = program(command)
        assert said.code == 2 and f"lora-rocm {command} " in said.err.splitlines()[-1], said.text
