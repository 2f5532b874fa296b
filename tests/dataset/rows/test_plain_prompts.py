"""Rows of plain prompts with answers: found in every source, and never by a download."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_rocm.dataset.rows.hf_datasets import was_opened
from lora_rocm.dataset.rows.records import PAIRED, READERS
from lora_rocm.dataset.sources.text_scan import prompts_are_plain
from lora_rocm.families.causal_lm.family import CausalLM
from lora_rocm.importing.language import COLUMNS
from lora_rocm.model_files.chat_template import lacks_chat_template
from lora_rocm.ui.recipe_draft import edited
from tests.families.causal_lm.adapted import recipe_of
from tests.tiny_llm import SPECIAL, write_tiny_llm

PLAIN = {"prompt": "a", "completion": "b"}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
LISTS = {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}


def table(path: Path, *rows: object) -> dict[str, str]:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return {"dataset": str(path)}


@pytest.mark.parametrize(
    ("tables", "is_plain"),
    [
        ([[PLAIN]], True),
        ([[{"prompt": "", "completion": ""}, PLAIN]], True),
        ([[PLAIN], [PLAIN]], True),
        ([[PLAIN], [CHAT]], False),
        ([[CHAT]], False),
        ([[LISTS]], False),
        ([[{**PLAIN, "system": "Be short."}]], False),
        ([[{"text": "a"}]], False),
    ],
)
def test_all_sources_have_to_begin_with_plain_prompts(
    tables: list[list[object]], is_plain: bool, tmp_path: Path
) -> None:
    sources = [table(tmp_path / f"{number}.jsonl", *rows) for number, rows in enumerate(tables)]
    assert prompts_are_plain(recipe_of(tmp_path, data={"sources": sources})) is is_plain


def test_rows_that_are_not_on_this_machine_are_unknown_and_are_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object) -> None:
        raise AssertionError("a data set was opened")

    monkeypatch.setattr("lora_rocm.dataset.rows.text_rows.opened", opened)
    for name in (str(tmp_path / "gone.jsonl"), str(tmp_path / "gone"), "someone/chats"):
        assert prompts_are_plain(recipe_of(tmp_path, data={"sources": [{"dataset": name}]})) is None
    # A run that has opened it before knows its rows
    monkeypatch.setattr("lora_rocm.dataset.rows.text_rows.opened", lambda *_: [PLAIN])
    monkeypatch.setattr("lora_rocm.dataset.sources.text_scan.was_opened", lambda *_: True)
    assert prompts_are_plain(recipe_of(tmp_path, data={"sources": [{"dataset": "someone/chats"}]}))


@pytest.mark.parametrize(("row", "is_plain"), [(PLAIN, True), (CHAT, False)])
def test_a_folder_of_rows_is_read(row: object, is_plain: bool, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    table(folder / "train.jsonl", row)
    assert not was_opened(str(folder), "train")
    assert prompts_are_plain(recipe_of(tmp_path, data={"sources": [{"dataset": str(folder)}]})) is is_plain
    assert was_opened(str(folder), "train")


def test_a_folder_without_a_chat_template_is_known(tmp_path: Path) -> None:
    assert not lacks_chat_template(str(tmp_path)) and not lacks_chat_template("someone/model")
    config = tmp_path / "tokenizer_config.json"
    config.write_text("{}", encoding="utf-8")
    assert lacks_chat_template(str(tmp_path))
    config.write_text('{"chat_template": "a"}', encoding="utf-8")
    assert not lacks_chat_template(str(tmp_path))
    config.write_text("{}", encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text("a", encoding="utf-8")
    assert not lacks_chat_template(str(tmp_path))


def test_prompts_of_chats_and_previews_have_the_format_of_the_rows(tmp_path: Path) -> None:
    """A preview and a chat ask ``prompt_ids``; the trained tokens of a plain row begin with the same ones."""
    base = write_tiny_llm(tmp_path / "base")
    asked = [{"role": "user", "content": "Hello"}]
    for row, notices, begins in ((PLAIN, 1, "Hello"), (CHAT, 0, SPECIAL[1])):
        source = table(tmp_path / f"{notices}.jsonl", row)
        family = CausalLM(recipe_of(base, data={"sources": [source]}))
        written = str(family.texts.tokenizer.decode(family.prompt_ids(asked), skip_special_tokens=False))
        assert written.startswith(begins) and len(family.prompt_notices) == notices
    gone = CausalLM(recipe_of(base, data={"sources": [{"dataset": str(tmp_path / "gone.jsonl")}]}))
    assert gone.prompt_ids(asked) == family.prompt_ids(asked) and len(gone.prompt_notices) == 1


def test_the_recipe_page_warns_of_plain_rows_for_a_model_with_a_chat_template(tmp_path: Path) -> None:
    base = write_tiny_llm(tmp_path / "base")
    found = dict[str, int]()
    for name, row in (("plain", PLAIN), ("chat", CHAT)):
        path = table(tmp_path / f"{name}.jsonl", row)["dataset"]
        text = f"model: {{family: causal-lm, name_or_path: {base}}}\ndata: {{sources: [{{dataset: {path}}}]}}\n"
        found[name] = len(edited(f"{text}train: {{max_train_steps: 1}}\n", tmp_path / "a.yaml").notices)
    assert found["plain"] == found["chat"] + 1


def test_an_import_knows_the_columns_that_rows_may_have() -> None:
    assert list(map(frozenset, COLUMNS)) == [*(columns for columns, _ in READERS), PAIRED]
