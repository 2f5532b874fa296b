"""Command lines in scripts: options, variables, continued lines; nothing is executed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lora_rocm.importing.formats.command_line import NO_LINES, Shell, command_settings, options_of, shell_of
from lora_rocm.importing.setting import FileContent, Value

PROGRAM = re.compile(r"(?:^|[\\/\s\"'])(train\.py)(?=$|[\s\"'])")


def read(text: str, shell: Shell = "sh") -> FileContent:
    return command_settings(text, "f", PROGRAM, shell)


def pairs(content: FileContent) -> list[tuple[str, Value]]:
    return [(setting.key, setting.value) for setting in content.settings]


def test_options_with_their_lines() -> None:
    text = "#!/bin/bash\naccelerate launch --num_processes 2 \\\n  train.py --a=1 \\\n  --b 1e-4 x \\\n"
    text += "  --flag --c 'two words'\n"
    found = read(text)
    assert pairs(found) == [
        ("launcher.num_processes", 2),
        ("a", 1),
        ("b", [1e-4, "x"]),
        ("flag", True),
        ("c", "two words"),
    ]
    assert [setting.line for setting in found.settings] == [2, 3, 4, 5, 5] and not found.unread


@pytest.mark.parametrize(
    ("shell", "text"),
    [
        ("sh", 'MODEL="/m/x.safetensors" # the base\nDIR=/sets\npython train.py --model $MODEL --dir ${DIR}/a\n'),
        ("bat", 'set MODEL=/m/x.safetensors\nset "DIR=/sets"\npython train.py --model %MODEL% ^\n --dir "%DIR%/a"\n'),
        (
            "ps1",
            '$model = "/m/x.safetensors" #\n$Env:DIR = \'/sets\'\npython train.py --model $model `\n --dir "$dir/a"\n',
        ),
    ],
)
def test_variables_that_the_file_sets_are_replaced(shell: Shell, text: str) -> None:
    assert pairs(read(text, shell)) == [("model", "/m/x.safetensors"), ("dir", "/sets/a")]


@pytest.mark.parametrize(
    ("shell", "word"),
    [("sh", "$HOME/x"), ("sh", "$(date)"), ("sh", "`date`$X"), ("bat", "%USERPROFILE%"), ("ps1", "$x")],
)
def test_other_variables_are_unread(shell: Shell, word: str) -> None:
    found = read(f"python train.py --a {word} --b 2\n", shell)
    assert pairs(found) == [("b", 2)] and [part.line for part in found.unread] == [1]


@pytest.mark.parametrize(
    ("shell", "word"),
    [("sh", "${args[@]}"), ("sh", '"${args[@]}"'), ("ps1", "$ext_args"), ("ps1", "@args"), ("sh", "$MORE")],
)
def test_words_with_further_options_are_unread(shell: Shell, word: str) -> None:
    found = read(f"python train.py --b=2 {word}\n", shell)
    assert pairs(found) == [("b", 2)] and len(found.unread) == 1


def test_a_flag_does_not_take_a_list_of_options_as_its_value() -> None:
    found = read("python train.py --flag ${args[@]}\n")
    assert pairs(found) == [("flag", True)] and len(found.unread) == 1


def test_an_expression_is_not_evaluated() -> None:
    found = read('$a = Join-Path $b "c"\npython train.py --a "$a"\n', "ps1")
    assert pairs(found) == [] and len(found.unread) == 1


def test_a_value_under_a_condition_does_not_replace_the_first() -> None:
    found = read("A=1\nif [ x ]; then\n  A=2\nfi\npython train.py --a $A\n")
    assert pairs(found) == [("a", 1)] and [part.line for part in found.unread] == [3]


def test_the_program_may_be_named_by_a_variable() -> None:
    assert pairs(read('file="./train.py"\npython "$file" --a 1\n')) == [("a", 1)]
    found = read('$file = if ($x) { "train.py" } else { "b.py" }\npython $file --a 1\n', "ps1")
    assert pairs(found) == [("a", 1)] and len(found.unread) == 1


def test_only_the_first_command_is_read() -> None:
    found = read("python train.py --a 1\n# python train.py --a 2\npython train.py --a 3\n")
    assert pairs(found) == [("a", 1)] and [part.line for part in found.unread] == [3]


def test_options_without_a_continuation_belong_to_the_command() -> None:
    assert pairs(read("python train.py \n --a 1\n --b 2\necho done\n")) == [("a", 1), ("b", 2)]


@pytest.mark.parametrize("text", ["", "echo train\n", "x=1\n"])
def test_a_script_without_the_command_is_unread(text: str) -> None:
    assert len(read(text).unread) == 1 and not read(text).settings


def test_an_open_quotation_mark() -> None:
    found = read("python train.py --a 1 --b 'x\n")
    assert pairs(found)[0] == ("a", 1) and len(found.unread) == 1


def test_options_of_the_command_line_of_import() -> None:
    assert pairs(options_of(["--a=1", "--b", "--c=true"], "command line", NO_LINES)) == [
        ("a", 1),
        ("b", True),
        ("c", True),
    ]


@pytest.mark.parametrize(
    ("name", "shell"), [("a.sh", "sh"), ("a.BAT", "bat"), ("a.cmd", "bat"), ("a.ps1", "ps1"), ("a.toml", None)]
)
def test_the_shell_of_a_file(name: str, shell: Shell | None) -> None:
    assert shell_of(Path(name)) == shell
