"""From a table of conversations to the items of a run: held-out rows, and rows of several texts."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from lora_rocm.children.check_texts import seen
from lora_rocm.commands.check import check, render
from lora_rocm.dataset.order.batch_plan import BatchPlan
from lora_rocm.dataset.rows.records import read
from lora_rocm.dataset.rows.row_reference import separated
from lora_rocm.dataset.sources import text_scan
from lora_rocm.dataset.sources.text_scan import count_texts, find_samples
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.encoded_cache.prepare import Prepared, choose_held_out, prepare
from lora_rocm.errors import DataError
from lora_rocm.families.base import family_for
from lora_rocm.families.causal_lm.chat import ChatTokenizer
from lora_rocm.families.causal_lm.objective import IGNORED
from lora_rocm.families.causal_lm.spec import LanguageSection
from lora_rocm.planning.data_plan import plan_texts
from lora_rocm.processes.job_file import to_json
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.load import dump_recipe
from lora_rocm.recipe.schema import Recipe
from tests.tiny_llm import CHAT, STRIPPING, THINK, tiny_tokenizer, write_chats
from tests.wording import saying, says

CPU = torch.device("cpu")
COUNT = 12
CHAT_OF_ONE = [("user", "a"), ("assistant", "b")]


def recipe_of(folder: Path, template: str = CHAT, **data: Any) -> Recipe:
    """A recipe for some conversations of three turns; only the tokenizer of its base is there."""
    base = folder / "base"
    tiny_tokenizer(template).save_pretrained(base)
    (base / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    answers = [("assistant", f"{THINK}c</think>" + "a" * (number % 5)) for number in range(COUNT)]
    chats = [[turn for n in range(3) for turn in (("user", f"{n} {at}"), answers[at])] for at in range(COUNT)]
    rows = write_chats(folder / "c.jsonl", *chats)
    return recipe_from(
        {
            "model": {"family": "causal-lm", "name_or_path": str(base)},
            "data": {"sources": [{"dataset": str(rows)}], "max_length": 512, **data},
            "train": {"max_train_steps": 1},
            "cache": {"dir": str(folder / "cache")},
        }
    )


def test_pairs_of_answers_are_not_packed(tmp_path: Path) -> None:
    sections = recipe_of(tmp_path, packing=True).model_dump(mode="json", exclude_unset=True)
    with pytest.raises(ValidationError, check=saying("families/not-put-into-rows")):
        recipe_from({**sections, "objective": {"loss": "dpo"}})


def prepared(recipe: Recipe) -> Prepared:
    return prepare(recipe, family_for(recipe), Encoding(LatentCache(Path(recipe.cache.dir)), CPU))


@pytest.mark.parametrize(
    ("template", "data"),
    [
        (CHAT, {}),
        (CHAT, {"packing": True, "validation_split": 0.3}),
        (STRIPPING, {"validation_split": 0.3, "repeats": 2}),  # each conversation is cut into three samples
    ],
)
def test_check_says_the_steps_of_a_run(tmp_path: Path, template: str, data: dict[str, Any]) -> None:
    recipe = recipe_of(tmp_path, template, **data)
    train = recipe.train.model_copy(update={"max_train_steps": None, "epochs": 3, "batch_size": 2})
    recipe = recipe.model_copy(update={"train": train.model_copy(update={"gradient_accumulation_steps": 2})})
    reader, counted = family_for(recipe).texts, count_texts(recipe).of_source
    assert reader is not None
    plan = plan_texts(recipe, counted, seen(recipe, reader))
    found = prepared(recipe)
    steps = BatchPlan(found.items, 2, 2, seed=0).steps_per_epoch
    assert (plan.steps_per_epoch, plan.max_train_steps, plan.held_out) == (steps, 3 * steps, len(found.held_out))
    assert plan.buckets == found.facts.bucket_counts and plan.how_sure == ""
    part = plan_texts(recipe, counted, seen(recipe, reader, most=COUNT // 2))
    assert part.how_sure == "about " and 0 < part.steps_per_epoch < 2 * steps + 2


def row_of(key: str) -> str:
    return key.partition("#")[0]


def test_all_samples_of_a_conversation_are_on_one_side_of_the_split(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, STRIPPING, validation_split=0.3)
    found = prepared(recipe)
    training, held_out = [row_of(item.key) for item in found.items], [row_of(item.key) for item in found.held_out]
    assert len(training) + len(held_out) == 3 * COUNT
    assert set(training) | set(held_out) == {f"c.jsonl:{line}" for line in range(1, COUNT + 1)}
    assert held_out and not set(training) & set(held_out)
    reader = family_for(recipe).texts
    assert reader is not None
    samples = find_samples(recipe, parts=reader.parts).samples
    alone = choose_held_out({s.key: hashlib.sha256(s.caption.encode()).hexdigest() for s in samples}, 0.3)
    assert {row_of(key) for key in alone} & {row_of(s.key) for s in samples if s.key not in alone}, "the control"


def test_rows_hold_all_texts_of_training_once_and_held_out_ones_are_alone(tmp_path: Path) -> None:
    plain = prepared(recipe_of(tmp_path, validation_split=0.3))
    recipe = recipe_of(tmp_path, validation_split=0.3, packing=True)
    found = prepared(recipe)
    texts = [text for sample in found.samples for text in separated(sample.caption)]
    assert sorted(texts) == sorted(sample.caption for sample in plain.samples)
    assert len(found.items) < len(plain.items) / 2
    assert [item.key for item in found.held_out] == [item.key for item in plain.held_out]
    assert sum(item.share for item in found.items) == sum(item.share for item in plain.items)
    assert any(f"Packed {len(plain.items)} texts into {len(found.items)} rows" in said for said in found.notices)
    again = prepared(recipe)
    assert again.items_digest == found.items_digest != plain.items_digest
    row, family = found.items[0], family_for(recipe)
    tensors = (
        LatentCache(Path(recipe.cache.dir))
        .get("rows", row.keys["rows"][0][0], family.encoders()[0].entry.tensors)
        .tensors
    )
    ids, positions, trained = list[int](), list[int](), 0
    for text in separated(found.samples[0].caption):
        tokens = ChatTokenizer(tiny_tokenizer(), 512, "answers", "").tokens(read(text))
        ids += tokens.ids
        positions += range(len(tokens.ids))
        trained += sum(tokens.trained)
    assert tensors["input_ids"].tolist()[: len(ids)] == ids
    assert row.shape["tokens"] - 64 < len(ids) <= row.shape["tokens"] <= 512 and row.shape["tokens"] > 256
    assert tensors["positions"].tolist()[: len(ids)] == positions
    assert trained == row.share == int((tensors["labels"] != IGNORED).sum())
    ends = torch.tensor(positions[1:]).eq(0).nonzero().flatten()
    assert (tensors["labels"][ends] == IGNORED).all() and len(ends) > 1, "none learns to write what begins the next"


def checked(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch, most: int = 100) -> None:
    """``lora-rocm check``, with its child processes in this one, and without weights."""
    facts = {"num_bytes": {"model": 1}, "notices": [], "files": [], "tokenizers": []}

    def child(module: str, *job: object) -> dict[str, Any]:
        family = family_for(recipe)
        assert family.texts is not None
        found: dict[str, Any] = to_json(seen(recipe, family.texts, most, family))
        return found if module.endswith("check_texts") else facts

    monkeypatch.setattr("lora_rocm.processes.tool.run_for_json", child)
    path = folder / "recipe.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    found = check(str(path))
    assert found.error is None
    sys.stdout.write(render(found) + "\n")


def test_check_sets_aside_what_training_does_and_names_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(tmp_path, max_length=64)
    write_chats(tmp_path / "c.jsonl", CHAT_OF_ONE, [("user", "b" * 90), ("assistant", "c")], CHAT_OF_ONE)
    (aside,) = prepared(recipe).set_aside
    checked(recipe, tmp_path, monkeypatch)
    said = capsys.readouterr().out
    assert says(said, "families/texts-2-usable-1-set-aside") and "c.jsonl: 2 texts, repeats 1" in said
    assert says(said, "families/set-aside-path-2-its-answer-begins", path=tmp_path / "c.jsonl")
    assert f"{aside.where}: {aside.what} {aside.fix}" in said, "the same as of training"
    checked(recipe, tmp_path, monkeypatch, most=2)
    said = capsys.readouterr().out
    assert "texts: at most 2 usable, at least 1 skipped" in said and says(
        said, "families/the-first-2-texts-were-looked-at"
    )
    write_chats(tmp_path / "c.jsonl", CHAT_OF_ONE)
    checked(recipe, tmp_path, monkeypatch)
    assert says(capsys.readouterr().out, "families/texts-1-usable-0-set-aside"), "the control"


@pytest.mark.parametrize("packing", [False, True])
def test_check_counts_what_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], packing: bool
) -> None:
    recipe = recipe_of(tmp_path, packing=packing)
    chats = [[("user", "a" * n), ("assistant", "b")] for n in (3, 4, 5)]
    write_chats(tmp_path / "c.jsonl", *chats)

    def counted() -> tuple[int, int]:
        checked(recipe, tmp_path, monkeypatch)
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("caches in "))
        there, needed = re.search(r"(\d+) of (\d+) texts? cached", line).groups()  # type: ignore[union-attr]
        return int(there), int(needed)

    there, needed = counted()
    assert there == 0 and needed > (1 if packing else 3)
    assert counted() == (0, needed), "check itself caches nothing"
    prepared(recipe)
    assert counted() == (needed, needed)
    write_chats(tmp_path / "c.jsonl", *chats, [("user", "c"), ("assistant", "d")])
    there, more = counted()
    assert there < more and (packing or (there, more) == (needed, needed + 1))


def test_check_keeps_no_text_and_looks_at_the_first_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path)
    write_chats(tmp_path / "c.jsonl", *[[("user", f"{n}"), ("assistant", "a" * 20_000)] for n in range(100)])
    tracemalloc.start()
    assert count_texts(recipe).of_source.total() == 100
    peak_bytes = tracemalloc.get_traced_memory()[1]
    texts = [sample.caption for sample in find_samples(recipe).samples]
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert peak_bytes < 400_000 < 2_000_000 < held_bytes and len(texts) == 100, "the control holds them"
    reader, rows, read_rows = family_for(recipe).texts, list[object](), text_scan.rows_of
    assert reader is not None
    monkeypatch.setattr(text_scan, "rows_of", lambda source: (rows.append(row) or row for row in read_rows(source)))
    assert seen(recipe, reader, most=3).looked_at == 3 and len(rows) == 4


def test_what_is_trained_on_decides_the_entries(tmp_path: Path) -> None:
    recipe, found = recipe_of(tmp_path), dict[str, int]()
    prints = set[str]()
    for train_on in ("answers", "last-turn", "all"):
        asked = recipe.model_copy(update={"objective": LanguageSection(train_on=train_on)})
        prints |= {encoder.fingerprint for encoder in family_for(asked).encoders()}
        found[train_on] = sum(item.share for item in prepared(asked).items)
    assert len(prints) == 3 and 0 < found["last-turn"] < found["answers"] < found["all"]


def test_check_and_a_run_name_what_a_table_says_and_nothing_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = tmp_path / "w.jsonl"
    recipe = recipe_of(tmp_path, watched={"dataset": str(watched)})
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"validation_every_n_steps": 1})})
    watched.write_text('{"text": "a", "topic": "b"}\n', encoding="utf-8")
    turns = [{"role": "user", "content": "a", "name": "Ann"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": turns, "source": "x"}, {"messages": turns, "history": [["c", "d"]]}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    checked(recipe, tmp_path, monkeypatch)
    said = capsys.readouterr().out
    assert says(said, "families/c-jsonl-that-nothing-reads-source-1") and says(
        said, "families/w-jsonl-that-nothing-reads-topic-1"
    )
    assert "name (1 row)" in said and f"  skipped: {tmp_path / 'c.jsonl'}:2: Its column history" in said
    found = prepared(recipe)
    assert (
        len(found.notices) == 2 and "source (1 row)" in found.notices[0] and "name (1 row)" in " ".join(found.notices)
    )
    write_chats(tmp_path / "c.jsonl", CHAT_OF_ONE)
    watched.write_text('{"text": "a"}\n', encoding="utf-8")
    checked(recipe, tmp_path, monkeypatch)
    assert "nothing" not in capsys.readouterr().out and not prepared(recipe).notices, "the control"


def test_a_table_for_learning_from_bad_answers_is_no_table_of_texts(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    rows = [{"prompt": "a", "completion": "b", "label": number % 2 == 0} for number in range(4)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        count_texts(recipe)
    assert caught.value.code == "no-usable-texts" and "label" in (caught.value.where or "")
