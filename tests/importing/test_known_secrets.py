"""A value that reaches a secret key, under any name and by any substitution, is hidden wherever it is printed."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_rocm.commands.import_config import import_config, outcomes_text
from lora_rocm.errors import UserError
from lora_rocm.importing.known_secrets import KnownSecrets
from lora_rocm.importing.setting import FileContent, Setting, Value
from lora_rocm.recipe.load import load_text
from tests.command_line import command_line

SECRET_KEYS = ("wandb_api_key", "huggingface_token", "hub_token", "some_password", "aws_secret")
HEADS = {
    "sh": "accelerate launch sdxl_train_network.py --network_module=networks.lora --train_data_dir pics",
    "bat": "accelerate launch sdxl_train_network.py --network_module=networks.lora --train_data_dir pics",
    "ps1": "accelerate launch sdxl_train_network.py --network_module=networks.lora --train_data_dir pics",
}
ASSIGNED = {
    "sh": ("{name}={value}\n", 'export {name}="{value}"\n', "{name}='{value}'; "),
    "bat": ("set {name}={value}\r\n", 'set "{name}={value}"\r\n'),
    "ps1": ('${name} = "{value}"\n', "$env:{name} = '{value}'\n"),
}
USED = {"sh": ("${name}", "${{{name}}}"), "bat": ("%{name}%",), "ps1": ("${name}", "$env:{name}")}
UNUSUAL = "q5"
"""Begins each made-up secret, so that no word of the program contains one."""


def made_up(seed: int) -> tuple[str, str, str]:
    """A variable's name, a secret that no pattern recognises, and a secret key."""
    drawn = random.Random(seed)
    name = "".join(drawn.choices(string.ascii_letters, k=drawn.randint(1, 9)))
    letters = drawn.choice((string.ascii_lowercase, string.ascii_letters, string.ascii_letters + string.digits + "-_."))
    secret = UNUSUAL + "".join(drawn.choices(letters, k=drawn.randint(2, 20))) + "z"
    return name, drawn.choice((secret, secret, "0071" + str(seed) * 3 + "5")), drawn.choice(SECRET_KEYS)


def printed(path: Path, text: str, *options: str) -> str:
    """Everything that an import prints or writes: recipe, table and JSON. The recipe is one that lora-rocm accepts."""
    path.write_text(text, encoding="utf-8")
    try:
        found = import_config([path], options, None)
    except UserError as error:
        return str(error)
    assert load_text(found.recipe, Path("r.yaml")).recipe
    return f"{found} {outcomes_text(found)}"


def scripts(shell: str, name: str, secret: str, key: str) -> Iterator[str]:
    """Scripts in which a variable reaches a secret key, and other places too."""
    for assigned in ASSIGNED[shell]:
        for used in USED[shell]:
            if "env:" in assigned and "env:" not in used:
                continue
            begin, value = assigned.format(name=name, value=secret), used.format(name=name)
            others = (
                f'--output_name "{value}" --logging_dir logs/{value} --note run-{value}-2 --seed {value} --{value} 5'
            )
            yield f'{begin}{HEADS[shell]} {others} --{key} "{value}" --some_key 5\n'
            yield f"{begin}{HEADS[shell]} --{key}={value} {others} --some_key 5\n"
            yield f"{begin}other login --{key} {value}\n{HEADS[shell]} {others} --some_key 5\n"
            yield f"{begin}wandb login {value}\n{HEADS[shell]} {others} --some_key 5\n"


@pytest.mark.parametrize("shell", HEADS)
@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["in turn", "all"])
def test_a_variable_of_a_shell(shell: str, is_whole: bool, tmp_path: Path) -> None:
    """Each script with one made-up secret, in turn; all scripts with each in the slow set."""
    for seed in range(40 if is_whole else 20):
        name, secret, key = made_up(seed)
        texts = list(scripts(shell, name, secret, key))
        for text in texts if is_whole else [texts[seed % len(texts)]]:
            found = printed(tmp_path / f"a.{shell}", text)
            assert secret not in found and (secret.lstrip("0") not in found) and "some_key" in found, text


def test_a_variable_with_a_secret_name_is_hidden_under_other_keys(tmp_path: Path) -> None:
    text = f"export HF_TOKEN=harmless1\n{HEADS['sh']} --output_name run$HF_TOKEN --some_key 5\n"
    found = printed(tmp_path / "a.sh", text)
    assert "harmless1" not in found and "some_key" in found


def test_an_anchor_of_yaml(tmp_path: Path) -> None:
    for seed in range(12):
        name, secret, key = made_up(seed)
        text = (
            "base_model: a/b\nadapter: lora\nlora_r: 8\nmicro_batch_size: 2\n"
            f"wandb_name: &{name} '{secret}'\noutput_dir: out/{secret}/x\n{key}: *{name}\nseed: 7\n"
        )
        found = printed(tmp_path / "a.yaml", text)
        assert secret not in found and "seed = 7" in found


@pytest.mark.parametrize("kind", ["py", "ipynb"])
def test_a_constant_of_python(kind: str, tmp_path: Path) -> None:
    lines = (
        "login({name})", "os.environ['{key}'] = {name}", "trainer.push_to_hub('x', {key}={name})", "{key} = '{secret}'",
        "settings = {{'{key}': {name}}}",
    )  # fmt: skip
    for seed, line in enumerate(lines * 2):
        name, secret, key = made_up(seed)
        code = (
            f"from unsloth import FastLanguageModel\n{name} = '{secret}'\n"
            f"{line.format(name=name, key=key, secret=secret)}\n"
            f"FastLanguageModel.get_peft_model(m, r=8, note={name}, run_name='run-{secret}', path=f'{secret}-{{x}}')\n"
        )
        cells = [{"cell_type": "code", "source": code}]
        text = json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}) if kind == "ipynb" else code
        found = printed(tmp_path / f"a.{kind}", text)
        assert secret not in found and "lora.rank" in found, code


def test_an_option_of_the_command_line(tmp_path: Path) -> None:
    text = 'network_module = "networks.lora"\ntrain_data_dir = "s"\noutput_name = "run-q5xyz"\nsome_key = 5\n'
    found = printed(tmp_path / "a.toml", text, "huggingface_token=q5xyz")
    assert "q5xyz" not in found and "some_key" in found


@pytest.mark.parametrize("value", ["", "none", "True", "1", "64", "$HF_TOKEN", "${HF_TOKEN}"])
def test_values_that_are_no_secrets_hide_nothing(value: str, tmp_path: Path) -> None:
    text = f'{HEADS["sh"]} --output_name "none True 64 cat" --network_dim 64 --huggingface_token "{value}"\n'
    found = printed(tmp_path / "a.sh", text)
    assert "none True 64 cat" in found and "rank: 64" in found


def test_a_token_of_a_tokenizer_is_no_secret(tmp_path: Path) -> None:
    text = f'{HEADS["sh"]} --placeholder_token cat --output_name "a cat"\n'
    assert "a cat" in printed(tmp_path / "a.sh", text)


def test_the_control_sees_a_secret_that_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KnownSecrets, "of", classmethod(lambda cls, content: cls()))
    name, secret, key = "X", "q5abc", SECRET_KEYS[0]
    texts = list(scripts("sh", name, secret, key))[:3]
    assert all(secret in printed(tmp_path / "a.sh", text) for text in texts)


def test_a_flood_of_secrets_is_refused(tmp_path: Path) -> None:
    begin = "base_model: a/b\nadapter: lora\nlora_r: 8\nmicro_batch_size: 2\n"
    lines = [f"key{number}_token: secret{number}\n" for number in range(1001)]
    refused = printed(tmp_path / "a.yaml", begin + "".join(lines))
    assert "secret7" not in refused and "key7_token" not in refused and "a.yaml" in refused
    assert "key7_token" in printed(tmp_path / "a.yaml", begin + "".join(lines[:1000]))  # the control


def test_short_secrets_are_whole_words_and_the_longest_is_replaced_first() -> None:
    secrets = KnownSecrets.of(FileContent([Setting("token", ["abc", "abc-defg"])]))
    assert secrets.hidden("abc abcd run_abc abc-defg") == "*** abcd run_*** ***"
    assert secrets.are_in({"a": [1, "x-abc"]}) and not secrets.are_in(["abcd", True])


def test_a_variable_in_the_environment_file_of_simpletuner(tmp_path: Path) -> None:
    text = (
        "export MODEL_TYPE=lora\nexport MODEL_FAMILY=sdxl\nexport X=q5abc\nexport HUB_TOKEN=$X\n"
        "export TRACKER_RUN_NAME=run-$X\nexport MODEL_NAME=a/b\nexport OUTPUT_DIR=out/$X\nexport NOTE=seven\n"
    )
    found = printed(tmp_path / "config.env", text)
    assert "q5abc" not in found and "seven" in found


@pytest.mark.parametrize(
    "text",
    [
        '{"secrets": {"cloud": {"id": "ZULU", "jupyter": "ZULU"}, "kaggle": ["ZULU"]}}',
        '{"hub_token": {"value": "ZULU"}}',
        '{"hub": {"token": {"a": {"b": "ZULU"}}}}',
        '{"secrets": {"list": [{"name": "hf", "value": "ZULU"}]}}',
        '{"env": [{"name": "HF_TOKEN", "value": "ZULU"}]}',
        '{"hf_tokens": ["ZULU"], "HF_TOKEN_2": "ZULU", "wandb_key": "ZULU", "smtp_pass": "ZULU"}',
        '{"discord_webhook": "ZULU", "huggingface token": "ZULU", "api_keys": ["ZULU"], "pw": "ZULU"}',
    ],
)
def test_sections_and_pairs_of_secrets_are_hidden(text: str, tmp_path: Path) -> None:
    content = {"base_model": "b", "network_dim": 16, "resume_from_checkpoint": "x"} | json.loads(text)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"network_module": "networks.lora", "pretrained_model_name_or_path": "b"} | content))
    shown = command_line("import", str(path)), command_line("import", str(path), "--json")
    assert all("ZULU" not in each.stdout + each.stderr for each in shown) and "16" in shown[0].stdout


@pytest.mark.parametrize(
    "key", ["stop_token", "tool_token", "special_tokens", "tokens", "use_auth_token", "num_tokens"]
)
def test_names_of_tokens_of_a_text_are_no_secrets(key: str) -> None:
    value: Value = key == "use_auth_token" or "shown"
    assert not Setting(key, value, "config.json", 1).is_secret
