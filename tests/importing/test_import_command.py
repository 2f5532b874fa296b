"""The command: where it writes, what it prints, how it ends."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.recipe.load import load_recipe, load_text
from tests.command_line import command_line

WHOLE = 'network_module = "networks.lora"\npretrained_model_name_or_path = "a.safetensors"\ntrain_data_dir = "sets"\n'
LOSSY = f"{WHOLE}keep_tokens_separator = '|||'\n"
HARMLESS = f"{WHOLE}metadata_tags = 'a'\n"
DAMAGED = f"{WHOLE}seed = \n"


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("whole", WHOLE), ("lossy", LOSSY), ("harmless", HARMLESS), ("damaged", DAMAGED)):
        Path(f"{name}.toml").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(("name", "strict"), [("whole", 0), ("lossy", 2), ("harmless", 0), ("damaged", 2)])
def test_strict_ends_with_2_if_something_was_lost_that_changes_the_weights(name: str, strict: int) -> None:
    plain, checked = command_line("import", f"{name}.toml"), command_line("import", f"{name}.toml", "--strict")
    assert (plain.exit_code, checked.exit_code) == (0, strict) and plain.stdout == checked.stdout
    assert load_text(plain.stdout, Path("redirected.yaml")).recipe.lora.rank == 4
    assert f"{name}.toml:1" in plain.stderr and "--output" in plain.stderr.splitlines()[-1]
    assert plain.stdout.startswith("# ") and "name_or_path: a.safetensors" in plain.stdout


def test_the_recipe_is_written_and_accepted() -> None:
    ended = command_line("import", "whole.toml", "--output", "my r.yaml")
    assert ended.exit_code == 0 and "name_or_path:" not in ended.stdout
    assert load_recipe(Path("my r.yaml")).recipe.lora.rank == 4
    assert ended.stdout.splitlines()[-1] == f"next: {quoted(['lora-rocm', 'check', 'my r.yaml'])}"
    assert command_line("check", "my r.yaml", "--schema-only").exit_code == 0


@pytest.mark.parametrize(
    ("system", "base", "told"),
    [
        ("linux", "C:/models/x.safetensors", True),
        ("linux", r"\\\\nas\\x", True),
        ("linux", "/home/me/x", False),
        ("linux", "stabilityai/stable-diffusion-xl-base-1.0", False),
        ("win32", "C:/models/x.safetensors", False),
        ("win32", "/home/me/x", True),
    ],
)
def test_paths_of_another_system_are_named(monkeypatch: pytest.MonkeyPatch, system: str, base: str, told: bool) -> None:
    Path("p.toml").write_text(WHOLE.replace("a.safetensors", base), encoding="utf-8")
    monkeypatch.setattr("lora_rocm.importing.importer.sys", SimpleNamespace(platform=system))
    notices = json.loads(command_line("import", "p.toml", "--json").stdout)["notices"]
    assert any("model.name_or_path" in each for each in notices) == told


def test_a_file_is_never_replaced() -> None:
    Path("r.yaml").write_text("mine", encoding="utf-8")
    ended = command_line("import", "whole.toml", "--output", "r.yaml", "--json")
    assert ended.exit_code == 2 and json.loads(ended.stdout)["error"]["code"] == "file-exists"
    assert Path("r.yaml").read_text(encoding="utf-8") == "mine"


def test_options_take_precedence_over_the_file() -> None:
    ended = command_line("import", "whole.toml", "--option", "network_dim=32", "--option", "flip_aug", "--json")
    found = json.loads(ended.stdout)
    assert "rank: 32" in found["recipe"] and "flip_aug: true" in found["recipe"]


def test_json_has_each_setting_with_its_place_and_outcome() -> None:
    found = json.loads(command_line("import", "lossy.toml", "--json").stdout)
    rows = {row["key"]: row for row in found["settings"]}
    assert rows["train_data_dir"] == {
        "key": "train_data_dir", "value": "sets", "where": "lossy.toml:3", "outcome": "taken", "ours": "data.path",
        "note": None, "changes_weights": False,
    }  # fmt: skip
    assert rows["network_dim"]["where"] == "" and rows["network_dim"]["ours"] == "lora.rank"
    lost = rows["keep_tokens_separator"]
    assert (lost["outcome"], lost["ours"], lost["changes_weights"]) == ("unsupported", None, True) and lost["note"]
    assert not found["is_complete"] and found["output"] is None and found["unread"] == []


def test_an_unread_line_has_its_place() -> None:
    (part,) = json.loads(command_line("import", "damaged.toml", "--json").stdout)["unread"]
    assert part["where"] == "damaged.toml:4"


def test_several_files_are_one_configuration() -> None:
    Path("d.toml").write_text("[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'other'\n", encoding="utf-8")
    found = json.loads(command_line("import", "whole.toml", "d.toml", "--json").stdout)
    assert "path: other" in found["recipe"]


@pytest.mark.parametrize("arguments", [(), ("nowhere.toml",), ("whole.toml", "--nothing")])
def test_wrong_arguments_end_with_2(arguments: tuple[str, ...]) -> None:
    assert command_line("import", *arguments).exit_code == 2


PAGES = Path(__file__).parents[2] / "docs" / "how-to"
COMMANDS = [
    line for line in (PAGES / "moving-over.md").read_text("utf-8").splitlines() if line.startswith("lora-rocm import")
]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_of_the_page_for_kohya_users(line: str) -> None:
    Path("train.toml").write_text(WHOLE, encoding="utf-8")
    assert command_line(*shlex.split(line.partition(">")[0])[1:]).exit_code == 0


@pytest.mark.parametrize("command", ["check", "train"])
def test_other_commands_name_the_import(command: str) -> None:
    ended = command_line(command, "whole.toml")
    assert ended.exit_code == 2 and "lora-rocm import whole.toml --output" in ended.stderr
