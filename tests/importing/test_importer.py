"""From files to a recipe that lora-rocm accepts; no input raises anything but UserError."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from lora_rocm.errors import UserError
from lora_rocm.importing.importer import PLACEHOLDER, import_files
from lora_rocm.importing.registry import MODULES, trainer_of
from lora_rocm.importing.rows import table_of
from lora_rocm.recipe.key_rules.table import rules_for
from lora_rocm.recipe.kinds import every_kind
from lora_rocm.recipe.load import load_text
from tests.importing.imported import CONFIGS, check_outcomes, imported, outcome_of, row_of, values_of

PARTS = ("concepts.json", "samples.json")
"""Files that belong to a configuration of OneTrainer, and are none alone."""
FILES = sorted(
    path
    for path in CONFIGS.rglob("*")
    if path.is_file() and path.suffix not in (".md", ".txt") and path.name not in PARTS
)
MINIMAL = 'network_module = "networks.lora"\nnetwork_dim = 8\n'
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz1234"


@pytest.mark.parametrize("trainer", MODULES)
def test_each_row_of_a_table_can_be_carried_out(trainer: str) -> None:
    table, functions = table_of(trainer), trainer_of(trainer).functions
    assert table.version
    keys = [key for row in table.row for key in row.keys]
    assert len(keys) == len({*keys}) and all(key == key.lower() for key in keys)
    used = {row.function for row in table.row if row.kind == "convert"}
    assert used <= functions.keys()
    assert all(row.note for row in table.row if row.kind in ("not-needed", "unsupported"))
    assert all(row.ours for row in table.row if row.kind == "same")


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_configuration_gives_a_recipe_and_an_outcome_for_each_setting(path: Path) -> None:
    try:
        check_outcomes([path])
    except UserError as error:  # a part of a configuration, or one for another base
        assert error.code in ("import-unknown", "import-family") and path.parent.name != "kohya"
        return
    found = import_files([path])
    assert load_text(found.text, Path("r.yaml")).recipe
    assert not re.search(r"\bhf_\w{9}|[0-9a-f]{40}", found.text)


def test_what_a_configuration_lacks_is_filled_in(tmp_path: Path) -> None:
    found = imported(tmp_path, a_toml=MINIMAL)
    assert values_of(found)["model.name_or_path"] == values_of(found)["data.path"] == PLACEHOLDER
    assert sum(PLACEHOLDER in notice for notice in found.notices) == 2


def test_a_key_that_lora_rocm_refuses_is_lost_alone(tmp_path: Path) -> None:
    found = imported(tmp_path, a_toml=f"{MINIMAL}max_grad_norm = -3\ngradient_accumulation_steps = 2\n")
    assert outcome_of(found, "max_grad_norm") == "unsupported" and row_of(found, "max_grad_norm").changes_weights
    assert values_of(found)["train.gradient_accumulation_steps"] == 2 and found.loses_something


def test_a_key_without_an_effect_is_not_lost(tmp_path: Path) -> None:
    found = imported(tmp_path, a_toml=f"{MINIMAL}keep_tokens = 2\n")
    assert outcome_of(found, "keep_tokens") == "not-needed" and not found.loses_something


def test_a_setting_that_changes_no_weights_may_be_lost(tmp_path: Path) -> None:
    found = imported(tmp_path, a_toml=f'{MINIMAL}metadata_tags = "a"\n')
    assert outcome_of(found, "metadata_tags") == "unsupported" and not found.loses_something


def test_secrets_are_nowhere(tmp_path: Path) -> None:
    text = (
        f'{MINIMAL}huggingface_token = "{TOKEN}"\nwandb_api_key = "abc-def"\noutput_name = "{TOKEN}"\nx = "{TOKEN}"\n'
    )
    found = imported(tmp_path, a_toml=f"{text}sample_prompts = ['{TOKEN}']\nbroken =\n")
    everything = f"{found.text} {found.unread} {[(row.setting.shown, row.value, row.note) for row in found.outcomes]}"
    assert TOKEN not in everything and "abc-def" not in everything


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("a.toml", b"", "import-unknown"),
        ("a.toml", b"a = 1\n", "import-unknown"),
        ("r.yaml", b"model: {name_or_path: x}\nlora: {rank: 3}\n", "import-unknown"),
        ("a.json", b"[1, 2", "import-unknown"),
        ("a.toml", b"network_dim = 3\x00", "import-unreadable"),
        ("a.toml", b"\x81\x8d\x8f\x90", "import-unreadable"),
        ("a.toml", None, "import-unreadable"),
        ("a.toml", b"x" * (5 << 20), "import-unreadable"),
        ("a.sh", b"accelerate launch sd3_train_network.py --a 1", "import-family"),
    ],
)
def test_a_file_that_cannot_be_imported(name: str, content: bytes | None, code: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        import_files([tmp_path / name])
    assert caught.value.code == code and name in caught.value.where and caught.value.fix


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "cp1252"])
def test_encodings_of_windows(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(f'{MINIMAL}output_name = "für"\n'.encode(encoding))
    assert values_of(import_files([path]))["output.name"] == "für"


VALUES = (
    "0", "-1", "1e400", "nan", "true", '""', "[]", "{}", '"x"', "[1, 2, 3, 4]", '["a=b", "=", "c"]', '"1,2"',
    "99999999999",
    '"../../x"', '"$HOME"', '"~"', '"\\u0000"', '"a\\nb"', '"hf_abcdefghijklmnopqrstuvwxyz1234"', "1979-05-27", "[[1]]",
)  # fmt: skip


def mutated(text: str, rng: random.Random) -> str:
    """A text with a few random changes: lines removed, doubled, swapped or cut, values replaced, letters damaged."""
    lines = text.splitlines()
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(lines)) if lines else 0
        kind = rng.randrange(8)
        if not lines:
            break
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(at, lines[at])
        elif kind == 2:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        elif kind == 3:
            lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
        elif kind == 4:
            lines = lines[: at + 1]
        elif kind in (5, 6):
            lines[at] = re.sub(r"(?<=[=:]).*", lambda _: f" {rng.choice(VALUES)}", lines[at], count=1)
        else:
            place = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:place] + rng.choice("\"'[]{}=:,#\\\t$%\u2028\ud7ff") + lines[at][place:]
    return "\n".join(lines)


@pytest.mark.parametrize("seed", range(60))
def test_no_damaged_file_raises_anything_but_a_user_error(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    source = FILES[seed % len(FILES)]
    path = tmp_path / source.name
    path.write_text(mutated(source.read_text(encoding="utf-8"), rng), encoding="utf-8")
    try:
        check_outcomes([path])
        found = import_files([path])
    except UserError as error:
        assert error.code.startswith("import-")
        return
    assert load_text(found.text, Path("r.yaml")).recipe
    outcomes = [id(row.setting) for row in found.outcomes]
    assert len(outcomes) == len({*outcomes})


WORDS = re.compile(r"has no effect|is not read with|does nothing without")


def test_rules_about_keys_without_an_effect_are_marked() -> None:
    """A key that such a rule refuses changes nothing, so the importer does not report it as lost."""
    every = {rule for kinds in every_kind("model") for rule in rules_for(kinds.family)}
    assert {rule.id for rule in every if WORDS.search(rule.what)} <= {rule.id for rule in every if rule.is_idle}
    assert {rule.id for rule in every if rule.id.startswith(("no-effect:", "alone:"))} <= {
        rule.id for rule in every if rule.is_idle
    }
    assert 0 < sum(not rule.is_idle for rule in every)


def test_a_key_of_a_prompt_that_previews_lack_is_listed(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('[{"prompt": "a cat", "clip_skip": 2}]', encoding="utf-8")
    found = imported(tmp_path, train_toml="network_dim = 4\nsample_prompts = 'p.json'\n")
    assert values_of(found)["sample.prompts[0].prompt"] == "a cat"
    (lost,) = (row for row in found.outcomes if row.setting.key.endswith("clip_skip"))
    assert (lost.outcome, lost.changes_weights, lost.setting.where) == (
        "unsupported",
        False,
        f"{tmp_path / 'p.json'}:1",
    )
