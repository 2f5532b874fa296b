"""A secret in any construct of a shell reaches no output of an import."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from lora_rocm.errors import UserError
from lora_rocm.importing.formats import command_line
from lora_rocm.importing.formats.shell_secrets import MAX_LETTERS, shell_secrets
from lora_rocm.importing.formats.shell_words import Shell
from tests.importing.test_known_secrets import HEADS, UNUSUAL, made_up, printed

SH = (
    # expansions, commands and quotation marks
    "export HF_TOKEN=${X:-§}", "HF_TOKEN=${X:=§}", "HF_TOKEN=${X-§}", "HF_TOKEN=${X/a/§}", ': "${HF_TOKEN:=§}"',
    "HF_TOKEN=${X:-${Y:-§}}", "HF_TOKEN=$(echo §)", 'HF_TOKEN="$(printf %s "§")"', "HF_TOKEN=`echo §`",
    "HF_TOKEN=$(echo § | tr -d ' ')", "HF_TOKEN=$(cat <<< §)", "HF_TOKEN='§'", 'HF_TOKEN="§"', "HF_TOKEN=$'§'",
    'X=§\nHF_TOKEN=${!Y}\nY=X', "HF_TOKEN+=§", "declare -x HF_TOKEN=§", "readonly HF_TOKEN=§",
    # arrays and loops
    "A=(--token §)", "A=(--lr 1)\nA+=('--token' \"§\")", "A=(--token=§)", "declare -A A=([hf_token]=§)", "A[token]=§",
    "for X in §; do export HF_TOKEN=$X; done", "X=(§)\nexport HF_TOKEN=${X[0]}",
    # pipes, here-strings, here-documents and files
    "echo § | huggingface-cli login", "printf '%s' '§' | wandb login --relogin", "huggingface-cli login <<< §",
    "echo § | tee log | huggingface-cli login", "echo § | (cat | hf auth login)", "cat <<< § | hf auth login",
    "hf auth login <<EOF\n§\nEOF", "cat <<'EOF' | gh auth login --with-token\n§\nEOF",
    "echo § | xargs hf login --token",
    "echo § | docker login -u me --password-stdin", "echo § > ~/.cache/huggingface/token", "echo § | tee ~/.hf/token",
    "read -r X <<< §\nhf auth login --token $X", "echo § | while read X; do export HF_TOKEN=$X; done",
    "cat > a.toml <<EOF\nhuggingface_token = \"§\"\nEOF", "echo '{\"token\": \"§\"}' > a.json",
    # functions, conditions, and commands in texts
    "f() { export HF_TOKEN=$1; }\nf §", "function f { hf auth login --token \"$1\"; }\nf '§'",
    "set -- §\nwandb login $1",
    'eval "export HF_TOKEN=§"', "bash -c 'wandb login §'", "[ -n \"$X\" ] || export HF_TOKEN=§",
    "if a; then wandb login §; fi",
    "python -c \"from huggingface_hub import login; login('§')\"",
    "python -c 'import os; os.environ[\"HF_TOKEN\"] = \"§\"'",
    "wandb login \\\n  §", "HF_TOKEN=§ wandb online", "env HF_TOKEN=§ wandb online", "printf -v HF_TOKEN %s §",
)  # fmt: skip
BAT = (
    "set HF_TOKEN=§", 'set "HF_TOKEN=§"', "setx HF_TOKEN §", "echo §| huggingface-cli login",
    "set X=§\nset HF_TOKEN=!X!",
    "set X=§\nset HF_TOKEN=%X:~0,99%", "for %%i in (§) do set HF_TOKEN=%%i", "call :f §\n:f\nset HF_TOKEN=%~1",
    "if not defined HF_TOKEN (set HF_TOKEN=§)", "wandb login §", "echo §> token",
)  # fmt: skip
PS1 = (
    "$env:HF_TOKEN = '§'", '$env:HF_TOKEN="§"', "$a = @('--token', '§')", "'§' | huggingface-cli login",
    "[Environment]::SetEnvironmentVariable('HF_TOKEN', '§')", "Set-Item -Path Env:HF_TOKEN -Value §",
    "$env:HF_TOKEN = $(if ($x) { 'q' } else { '§' })", "$x = '§'\n$env:HF_TOKEN = \"$x\"", "$env:HF_TOKEN ??= '§'",
    "$a = @{token = '§'}", "foreach ($x in '§') { $env:HF_TOKEN = $x }", "wandb login §",
)  # fmt: skip
CONSTRUCTS: list[tuple[Shell, str]] = [
    *(("sh", each) for each in SH),
    *(("bat", each) for each in BAT),
    *(("ps1", each) for each in PS1),
]
OTHERS = "--output_name run-§-2 --logging_dir logs/§ --note § --§ 5 --some_key 5"
"""Other places of the same secret in the command of the trainer, all of which are listed."""


def script(shell: Shell, construct: str, secret: str) -> str:
    return f"{construct}\n{HEADS[shell]} {OTHERS}\n".replace("§", secret)


@pytest.mark.parametrize(("shell", "construct"), CONSTRUCTS)
def test_a_secret_in_a_construct_is_printed_nowhere(shell: Shell, construct: str, tmp_path: Path) -> None:
    for seed in range(2):
        secret = made_up(7 * seed + len(construct))[1]
        found = printed(tmp_path / f"a.{shell}", script(shell, construct, secret))
        assert secret not in found and secret.lstrip("0") not in found and "some_key" in found


def test_the_control_sees_a_secret_that_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "shell_secrets", lambda *of: set())
    for shell, construct in CONSTRUCTS[::4]:
        assert f"{UNUSUAL}abc" in printed(tmp_path / f"a.{shell}", script(shell, construct, f"{UNUSUAL}abc"))


@pytest.mark.parametrize(
    "text",
    [
        "X=${Y:-word}", "X=$(echo word)", "A=(--lr word)", "echo word | tee log", "cat <<< word", "f() { a; }\nf word",
        "export HF_TOKEN=$Y\nX=word", "huggingface-cli login\nX=word", "huggingface-cli login && echo word",
        "huggingface-cli login --token $Y && cd word", "# HF_TOKEN=word", "export max_tokens=word",
        "HF_TOKEN= train.py word", "if [ -z \"$HF_TOKEN\" ]; then echo word; fi", "HF_TOKEN=$(cat file)\ncat word",
        'train.py --token "$T" "${A[@]}" --name word\nA=(--other word)', "echo ${HF_TOKEN:?set a word first}",
        "HF_TOKEN=${1:?}\ntrain.py word",
    ],
)  # fmt: skip
def test_words_that_reach_no_secret_are_shown(text: str) -> None:
    assert "word" not in shell_secrets(text, "sh", "a.sh")


@pytest.mark.parametrize(
    "cell",
    [
        "!huggingface-cli login --token @",
        "%env HF_TOKEN=@",
        "!echo @ | wandb login",
        "X = '@'\n!hf auth login --token {X}",
    ],
)
def test_a_secret_in_a_command_of_a_notebook(cell: str, tmp_path: Path) -> None:
    code = f"from unsloth import FastLanguageModel\n{cell}\nFastLanguageModel.get_peft_model(m, r=8, note='run-@')\n"
    for secret in ("q5abcde", "word"):
        text = code.replace("@", secret if secret == "q5abcde" else "$NAME")
        cells = [{"cell_type": "code", "source": text.replace("run-$NAME", "run-word")}]
        found = printed(tmp_path / "a.ipynb", json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))
        assert "q5abcde" not in found and ("run-word" in found) == (secret == "word")


def test_a_default_in_the_environment_file_of_simpletuner(tmp_path: Path) -> None:
    text = "export MODEL_TYPE=lora\nexport MODEL_FAMILY=sdxl\nexport HUB_TOKEN=${X:-q5abc}\nexport MODEL_NAME=a/b\n"
    found = printed(tmp_path / "config.env", f"{text}export OUTPUT_DIR=out/q5abc\nexport NOTE=seven\n")
    assert "q5abc" not in found and "seven" in found


@pytest.mark.parametrize(
    "part", ["$(", "'\"", "a|", "= ", "login|", '"HF_TOKEN" ', "--token a ", "<<E ", "read x|", "\"'`$(${a:-", "a=$b "]
)
def test_a_hostile_script_takes_no_long_time(part: str) -> None:
    began = time.process_time()
    shell_secrets(part * (MAX_LETTERS // 16 // len(part)), "sh", "a.sh")
    assert time.process_time() - began < 10
    with pytest.raises(UserError):
        shell_secrets(part * MAX_LETTERS, "sh", "a.sh")
