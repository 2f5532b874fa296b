"""A row's keys about the loss are applied, refused, or reported as without effect; in every spelling and place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.dataset.rows import loss_keys
from lora_rocm.dataset.rows.loss_keys import LossKey, meaning_of, spelled
from lora_rocm.dataset.rows.records import Conversation, Pair, UnusableText, read, record_of, written
from lora_rocm.dataset.rows.row_cells import RowAccount, RowCells
from lora_rocm.dataset.sources.text_scan import scan_texts
from lora_rocm.errors import DataError
from lora_rocm.families.causal_lm.chat import ChatTokenizer
from lora_rocm.foundation.tables import read_rows
from lora_rocm.recipe.schema import DataSection
from lora_rocm.recipe.source_sections import DataSource
from tests.tiny_llm import CHAT, tiny_tokenizer

TABLE = read_rows(Path(loss_keys.__file__).with_suffix(".toml"), LossKey)
USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SECOND = {"role": "assistant", "content": "5"}
TOKENIZER = tiny_tokenizer(CHAT)
REFUSED = None


def part(key: str, value: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "4", key: value}]


# Place of a key -> the row that has it there, and whether it is one of pairs.
PLACES: dict[str, tuple[Callable[[str, Any], dict[str, Any]], bool]] = {
    "row of messages": (lambda key, value: {"messages": [USER, ANSWER, USER, SECOND], key: value}, False),
    "row of conversations": (lambda key, value: {"conversations": [USER, ANSWER, USER, SECOND], key: value}, False),
    "row of a completion": (lambda key, value: {"prompt": "2+2=", "completion": "4", key: value}, False),
    "row of an instruction": (lambda key, value: {"instruction": "2+2?", "output": "4", key: value}, False),
    "row of a text": (lambda key, value: {"text": "2+2=4", key: value}, False),
    "row of a pair": (lambda key, value: {"prompt": "2+2=", "chosen": "4", "rejected": "5", key: value}, True),
    "answer": (lambda key, value: {"messages": [USER, {**ANSWER, key: value}, USER, SECOND]}, False),
    "question": (lambda key, value: {"messages": [{**USER, key: value}, ANSWER, USER, SECOND]}, False),
    "answer of a completion": (lambda key, value: {"prompt": [USER], "completion": [{**ANSWER, key: value}]}, False),
    "answer of a pair": (
        lambda key, value: {"prompt": [USER], "chosen": [{**ANSWER, key: value}], "rejected": [SECOND]},
        True,
    ),
    "part": (lambda key, value: {"messages": [USER, {**ANSWER, "content": part(key, value)}, USER, SECOND]}, False),
}
VALUES = (False, True, 0, 1, "0", "1.0", "false", 0.5, -1, 3, "0.5", [0, 1], {"a": 1}, "Rome", "good", None)


def spellings(name: str) -> Iterator[str]:
    first, *others = name.split("_")
    yield from (name, name.upper(), "-".join((first, *others)).title(), "".join((first, *map(str.title, others))))


def seen(row: dict[str, Any], pairs: bool, train_on: str = "answers") -> tuple[list[Any] | None, str]:
    """The tokens of a row with its mask (None: it is refused), and all notices about it."""
    cells, account, found = RowCells(row), RowAccount(), ChatTokenizer(TOKENIZER, 512, train_on, "tiny", pairs)
    try:
        parts = found.parts(written(record_of(cells, pairs)))
    except UnusableText as error:
        assert error.fix
        return REFUSED, error.what
    account.add(cells)
    records = [record for each in parts if each is not None for record in _sides(read(each))]
    return [found.tokens(record) for record in records], " ".join((*account.notices("t.jsonl"), *found.notices))


def _sides(record: Any) -> list[Any]:
    return [record.chosen, record.rejected] if isinstance(record, Pair) else [record]


def expected(meaning: LossKey, name: str, value: Any, place: str) -> str:
    """The table's expectation: "same", "excluded", "refused", "noted"."""
    is_row, flag = place.startswith("row"), loss_keys.flag_of(value)
    if meaning.kind == "harmless":
        return "same" if value is None else "noted"
    if place == "row of a text" and name in meaning.beside_text:
        return "same" if value is None else "noted"
    if value is None:
        return "refused" if meaning.kind == "label" and is_row and place != "row of a text" else "same"
    if meaning.is_data(name, value) and (meaning.kind != "mask" or is_row or place == "part"):
        return "noted"
    if meaning.kind != "mask" or flag is None:
        return "refused"
    if is_row or place == "part":
        return "same" if flag else "refused"
    if place == "question":
        return "refused" if flag else "same"  # of answers alone; with train_on: all, see below
    if not flag and place != "answer":
        return "refused"  # nothing is left to learn
    return "same" if flag else "excluded"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("meaning", TABLE, ids=lambda meaning: meaning.id)
def test_every_key_value_and_place_does_what_the_table_says(meaning: LossKey, place: str) -> None:
    row_of, pairs = PLACES[place]
    plain, always_said = seen(row_of("id", None), pairs)
    assert plain is not None
    names = [name for name in meaning.names if name not in row_of("id", None)]
    names += [f"{begin}x" for begin in meaning.begins] + [f"x_{end}" for end in meaning.ends]
    for number, name in enumerate(names):
        for spelling in spellings(name) if number == 0 else (name,):  # the first name in all spellings
            for value in VALUES if number == 0 else (0, True, 0.5, None):
                want = expected(meaning, name, value, place)
                tokens, said = seen(row_of(spelling, value), pairs)
                said = said.removesuffix(always_said)
                case = (spelling, value, want, said)
                if want == "refused":
                    assert tokens is REFUSED and (spelling in said or place not in ("row", "answer")), case
                elif want == "excluded":
                    assert tokens is not REFUSED and not said and tokens != plain, case
                    assert sum(tokens[0].trained) < sum(plain[0].trained) and tokens[0].ids == plain[0].ids, case
                else:
                    assert tokens == plain, case
                    is_flag = place == "part" and want == "same" and value is not None
                    assert (spelling in said) == (want == "noted" or is_flag), case


def test_spellings_of_one_key_are_one_key() -> None:
    for meaning in TABLE:
        for name in meaning.names:
            assert {meaning_of(each) for each in spellings(name)} == {meaning_of(name)} == {meaning}
    assert (
        meaning_of("weight_kg") is meaning_of("note") is meaning_of("trainer") is meaning_of("attention_mask") is None
    )


def test_no_name_is_in_two_rows_of_the_table() -> None:
    names = [spelled(name) for meaning in TABLE for name in meaning.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("yes", "no"), [({"train": True}, {"weight": 0}), ({"Weight": 1}, {"weight": "0"})])
@pytest.mark.parametrize("place", ["row of messages", "row of a text", "answer", "answer of a pair"])
def test_keys_that_contradict_each_other_are_refused_by_name(
    yes: dict[str, Any], no: dict[str, Any], place: str
) -> None:
    row_of, pairs = PLACES[place]
    ((key, value), (other, opposite)) = (*yes.items(), *no.items())
    row = row_of(key, value)
    holder = row if place.startswith("row") else (row.get("chosen") or row["messages"][1:])[0]
    holder[other] = opposite
    tokens, said = seen(row, pairs)
    assert tokens is REFUSED and key in said and other in said
    holder[other] = value
    assert seen(row, pairs)[0] == seen(row_of("id", None), pairs)[0], "the control: they agree"


def test_a_question_is_trained_on_where_its_row_and_the_recipe_say_so() -> None:
    row = {"messages": [{**USER, "train": True}, ANSWER]}
    tokens, said = seen(row, pairs=False)
    assert tokens is REFUSED and "objective.train_on" in said
    assert seen(row, False, "all") == seen({"messages": [USER, ANSWER]}, False, "all")
    (excluded,), _ = (seen({"messages": [{**USER, "Train": 0}, ANSWER]}, False, "all")[0] or [None]), ""
    (whole,) = seen({"messages": [USER, ANSWER]}, False, "all")[0] or [None]
    assert sum(excluded.trained) < sum(whole.trained)


def test_columns_of_two_answers_are_refused_unless_the_better_one_is_the_text() -> None:
    talk = [USER, ANSWER]
    assert (
        seen({"messages": talk, "chosen": talk, "rejected": [USER, SECOND]}, False)[0]
        == seen({"messages": talk}, False)[0]
    )
    other = {"messages": talk, "chosen": [USER, SECOND], "rejected": talk}
    assert seen(other, False)[0] is REFUSED
    with pytest.raises(UnusableText) as caught:
        record_of({"conversations": [USER], "chosen": ANSWER, "rejected": SECOND})
    assert "objective.loss: dpo" in caught.value.fix and "chosen" in caught.value.what


@pytest.mark.parametrize("excluded", [("chosen",), ("rejected",), ("chosen", "rejected")])
@pytest.mark.parametrize("begin", [[], [USER]])
def test_the_excluded_side_of_a_pair_is_named(excluded: tuple[str, ...], begin: list[Any]) -> None:
    row = {"prompt": [USER], "chosen": [*begin, ANSWER], "rejected": [*begin, SECOND]}
    assert seen(row, pairs=True)[0] is not REFUSED
    for side in excluded:
        row[side] = [*begin, {**row[side][-1], "weight": 0}]
    tokens, said = seen(row, pairs=True)
    assert tokens is REFUSED and "every answer" not in said
    assert [side for side in ("chosen", "rejected") if side in said] == [*excluded]


def test_names_that_say_something_of_the_loss_have_a_class() -> None:
    kinds = {
        "mask": ("importance", "importance_weight", "sample_importance", "score_weight"),
        "label": ("thumbs", "thumbs_up", "thumb"),
        "harmless": ("rating", "stars"),
    }
    for kind, names in kinds.items():
        assert {getattr(meaning_of(name), "kind", None) for name in names} == {kind}


def test_preference_rows_of_llama_factory_are_pairs() -> None:
    asked = [{"from": "human", "value": "2+2?"}]
    sides = ({"from": "gpt", "value": text} for text in ("4", "5"))
    row = {"conversations": asked, **dict(zip(("chosen", "rejected"), sides, strict=True))}
    cells, account = RowCells(row), RowAccount()
    found = record_of(cells, pairs=True)
    account.add(cells)
    assert found == Pair(Conversation((USER, ANSWER), last_only=True), Conversation((USER, SECOND), last_only=True))
    assert not account.notices("t.jsonl")


def test_a_table_of_which_all_rows_are_refused_is_one_error_that_names_the_column(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [{"messages": [USER, ANSWER], "Loss-Weight": weight} for weight in (0.5, 0.25)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        scan_texts(DataSection(sources=(DataSource(dataset=str(path)),)))
    assert caught.value.code == "no-usable-texts"
    assert f"{path}:1" in caught.value.where and "Loss-Weight 0.5" in caught.value.where
    train_on = json.dumps({"text": "a", "train_on_inputs": False})
    path.write_text(train_on, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        scan_texts(DataSection(sources=(DataSource(dataset=str(path)),)))
    assert "train_on_inputs" in caught.value.where and "objective.train_on" in caught.value.fix


@pytest.mark.parametrize(
    ("row", "places"),
    [
        ({"messages": []}, ("messages",)),
        ({"input_ids": [1, 2], "labels": [-100, 2]}, ("input_ids", "tokens")),
        ({"input": "a", "preferred_output": "b", "non_preferred_output": "c"}, ("preferred_output", "two answers")),
        ({"messages": [USER, {**ANSWER, "content": ["a", 3]}]}, ("message 2", "Part 1", "'a'")),
        ({"messages": [USER, {**ANSWER, "content": [{"type": "refusal", "refusal": "no"}]}]}, ("Part 1", "'refusal'")),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "refusal": "no"}]},
            ("Message 2", "refusal", "'no'"),
        ),
        ({"conversations": [USER, {**ANSWER, "content": 3}]}, ("Message 2 of conversations", "3")),
        ({"prompt": [USER], "completion": [{"content": "a"}]}, ("Message 1 of completion", "role", "content")),
    ],
)
def test_a_refused_row_says_where_and_what(row: dict[str, Any], places: tuple[str, ...]) -> None:
    with pytest.raises(UnusableText) as caught:
        record_of(row)
    assert all(place in caught.value.what for place in places), caught.value.what
