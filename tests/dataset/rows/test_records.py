"""Rows of tables are recognised by their columns, and rows without usable text are named."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from lora_rocm.dataset.rows.records import (
    MARK,
    QUESTIONS,
    Completion,
    Conversation,
    Pair,
    UnusableText,
    read,
    record_of,
    written,
)
from lora_rocm.dataset.rows.row_cells import MAX_NAMED, RowAccount, RowCells
from lora_rocm.dataset.rows.text_rows import rows_of
from lora_rocm.dataset.sources.text_scan import scan_texts
from lora_rocm.errors import DataError
from lora_rocm.recipe.schema import DataSection
from lora_rocm.recipe.source_sections import DataSource
from tests.wording import Saying, Worded, saying, says, worded

ASK, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
CHAT = Conversation((ASK, ANSWER))
SAME: list[tuple[dict[str, Any], object]] = [
    ({"messages": [{**ASK, "name": None}, ANSWER], "id": 7}, CHAT),
    ({"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}, CHAT),
    ({"conversations": [ASK, ANSWER]}, CHAT),
    ({"conversations": [ASK, {"role": "assistant", "value": "4"}]}, CHAT),
    ({"instruction": "2+2?", "input": "", "output": "4"}, CHAT),
    *(({ask: "2+2?", answer: "4"}, CHAT) for ask, answer in QUESTIONS),
    ({"question": "2+2?", "answer": "4", "text": "2+2=4"}, "2+2=4"),
    ({"prompt": [ASK], "completion": [ANSWER]}, Conversation((ASK, ANSWER), last_only=True)),
    ({"prompt": "2+2=", "completion": "4"}, Completion("2+2=", "4")),
    ({"text": "2+2=4"}, "2+2=4"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}, ANSWER]}, CHAT),
    ({"messages": [ASK, {**ANSWER, "content": [{"type": "text", "text": text} for text in ("4", None)]}]}, CHAT),
]


@pytest.mark.parametrize(("row", "record"), SAME)
def test_a_row_is_recognised_by_its_columns(row: dict[str, Any], record: Any) -> None:
    assert record_of(row) == record
    assert read(written(record)) == record


def test_parts_of_an_instruction_are_one_question() -> None:
    found = record_of({"instruction": "Add", "input": "2+2", "output": "4", "system": "Be short."})
    assert isinstance(found, Conversation) and [message["content"] for message in found.messages] == [
        "Be short.",
        "Add\n\n2+2",
        "4",
    ]


def test_a_plain_text_stays_itself_even_if_it_looks_like_a_record() -> None:
    assert written("a") == "a"
    assert read(written(MARK + "{}")) == MARK + "{}"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"ask": "2+2?", "reply": "4"}, lambda error: "ask, reply" in error.what),
        ({"question": "2+2?", "answer": ""}, lambda error: "answer" in error.what),
        ({"messages": [ASK]}, saying("dataset/no-message-has-the-role-assistant")),
        ({"messages": [ASK, {**ANSWER, "content": " "}]}, saying("dataset/message-2-assistant-is-empty")),
        ({"messages": "hello"}, saying("dataset/the-column-messages-is-a-text-that-3")),
        ({"messages": '[{"role": "user"'}, saying("dataset/the-column-messages-is-a-text-that-2", "dataset/column-17")),
        ({"messages": '{"role": "user"}'}, saying("dataset/the-column-messages-is-no-list-of")),
        ({"messages": "[" * 99_999}, saying("dataset/the-column-messages", "dataset/nested-too-deep")),
        (
            {"messages": '[{"role": "user", "content": "a", "content": "b"}]'},
            saying("dataset/messages", "dataset/key-content-twice"),
        ),
        ({"messages": [ASK, ANSWER], "tools": ['{"name": "a", "name": "b"}']}, saying("dataset/key-name-twice")),
        (
            {"messages": [ASK, {**ANSWER, "tool_calls": '[{"name": "a", "name": "b"}]'}]},
            saying("dataset/key-name-twice"),
        ),
        (
            {"prompt": "[{'role': 'user', 'content': 'a'}]", "completion": "b"},
            saying("dataset/begins-like-a-list-of-messages"),
        ),
        (
            {"prompt": "a", "completion": '[{"role": "assistant", "content": "b"'},
            saying("dataset/begins-like-a-list-of-messages"),
        ),
        (
            {"prompt": '[{"role": "user", "content": "a"}, {"content": "b"}]', "completion": [ANSWER]},
            saying("dataset/has-no-role"),
        ),
        ({"messages": " "}, saying("dataset/the-column-messages-is-empty")),
        ({"conversations": "[1]"}, saying("dataset/the-column-conversations-is-no-list-of")),
        ({"messages": None}, saying("dataset/the-column-messages-is-empty")),
        ({"conversations": [1]}, saying("dataset/the-column-conversations-is-no-list-of")),
        ({"prompt": "a", "completion": None}, saying("dataset/the-completion-is-empty")),
        ({"prompt": None, "completion": [ANSWER]}, saying("dataset/the-prompt-is-empty")),
        (
            {"messages": [{**ASK, "content": [{"type": "text", "text": 3}]}, ANSWER]},
            saying("dataset/a-content-that-is-no-text"),
        ),
        ({"messages": [{"content": "a"}]}, saying("dataset/has-no-role")),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]},
            saying("dataset/has-the-type-image"),
        ),
        ({"prompt": "2+2=", "completion": ""}, saying("dataset/the-completion-is-empty")),
        ({"text": None}, saying("dataset/the-text-is-empty-2")),
        ({"messages": [ASK, ANSWER], "tools": "add"}, saying("dataset/the-column-tools-is-a-text-that")),
        ({"messages": [ASK, ANSWER], "tools": '{"name": "add"}'}, saying("dataset/the-column-tools-is-no-list")),
        ({"messages": [ASK, ANSWER], "tools": {"name": "add"}}, saying("dataset/the-column-tools-is-no-list")),
        ({"messages": [{**ASK, "content": 4}, ANSWER]}, saying("dataset/a-content-that-is-no-text")),
        ({"messages": [ASK, {**ANSWER, "content": []}]}, saying("dataset/message-2", "dataset/is-empty")),
        ({"messages": [{**ASK, "content": [{"type": "text"}]}, ANSWER]}, saying("dataset/message-1-user-is-empty")),
        ({"messages": [{"role": "user"}, ANSWER]}, saying("dataset/message-1-user-is-empty")),
        ({"messages": [{**ASK, "role": "usr"}, ANSWER]}, saying("dataset/message-1-has-the-role-usr")),
        ({"messages": [ASK, {**ANSWER, "tool_calls": 3}]}, saying("dataset/tool-calls-of-a-message-is-no")),
        ({"messages": [ASK, {**ANSWER, "tool_calls": "w"}]}, saying("dataset/tool-calls-of-a-message-is-a")),
        ({"messages": [ASK, ANSWER], "functions": 3}, saying("dataset/the-column-functions-is-no-list")),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, saying("dataset/a-pair-of-answers")),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, saying("dataset/has-no-role")),
        ({"instruction": ["a"], "output": "b"}, saying("dataset/the-instruction-is-no-text")),
    ],
)
def test_what_cannot_be_learned_from_is_named(row: dict[str, Any], reason: Saying) -> None:
    with pytest.raises(UnusableText, check=reason):
        record_of(row)


KEPT_BACK: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "completion": "b", "label": False}, "label"),
    ({"prompt": [ASK], "completion": [ANSWER], "label": True}, "label"),
    ({"prompt": "a", "completion": "b", "label": "False"}, "label"),
    ({"prompt": "a", "completion": "b", "label": 1}, "label"),
    ({"messages": [ASK, ANSWER], "label": True}, "label"),
    ({"messages": [ASK, ANSWER], "label": 1}, "label"),
    ({"messages": [ASK, ANSWER], "desirable": True}, "desirable"),
    ({"messages": [ASK, ANSWER], "weight": 0.5}, "weight"),
    ({"messages": [ASK, {**ANSWER, "Weight": 0}]}, "weight"),
    ({"messages": [ASK, {**ANSWER, "weight": 0, "train": True}]}, "train"),
    ({"conversations": [ASK, ANSWER], "kto_tag": False}, "kto_tag"),
    ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "history"),
    ({"instruction": "a", "output": "b", "history": '[["c", "d"]]'}, "history"),
    ({"instruction": "a", "output": "b", "reasoning_content": "c"}, "reasoning_content"),
    ({"messages": [ASK, ANSWER], "chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
    ({"conversations": [ASK, ANSWER], "image": "a.jpg"}, "image"),
    ({"messages": [ASK, ANSWER], "weight": 0}, "weight"),
    ({"text": "a", "train": False}, "train"),
]


@pytest.mark.parametrize(("row", "column"), KEPT_BACK)
def test_a_column_that_changes_what_a_row_means_and_is_not_read_is_refused(row: dict[str, Any], column: str) -> None:
    with pytest.raises(UnusableText) as caught:
        record_of(row)
    assert column in caught.value.what
    for empty in (None, "", []) if column in row else ():
        if column in ("label", "kto_tag", "desirable"):  # an answer of unknown worth
            with pytest.raises(UnusableText, match=column):
                record_of({**row, column: empty})
        else:
            record_of({**row, column: empty})
    assert record_of({"text": "a", "history": "b", "image": "c", "label": False}) == "a", "a text is whole without them"
    assert record_of({"messages": [ASK, ANSWER], "label": "sums"}) == CHAT


BE_SHORT = {"role": "system", "content": "Be short."}


@pytest.mark.parametrize("column", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASK, ANSWER]},
        {"messages": json.dumps([ASK, ANSWER])},
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {"prompt": [ASK], "completion": [ANSWER]},
        {"prompt": "2+2?", "completion": "4"},
        {"prompt": json.dumps([ASK]), "completion": json.dumps([ANSWER])},
        {"instruction": "2+2?", "output": "4"},
    ],
)
def test_the_systems_message_may_be_a_column_of_every_conversation(row: dict[str, Any], column: str) -> None:
    found = record_of({**row, column: "Be short."})
    assert isinstance(found, Conversation) and found.messages == (BE_SHORT, ASK, ANSWER)
    assert record_of({**row, column: ""}) == record_of(row)


def test_the_systems_message_may_be_a_column_of_pairs() -> None:
    for row in ({"prompt": "2+2?", "chosen": "yes", "rejected": "no"}, {"chosen": [ASK, YES], "rejected": [ASK, NO]}):
        pair = record_of({**row, "system": "Be short."}, pairs=True)
        assert isinstance(pair, Pair) and isinstance(pair.chosen, Conversation)
        assert pair.chosen.messages == (BE_SHORT, ASK, YES)


def test_two_systems_messages_are_said() -> None:
    def said(**columns: Any) -> tuple[Any, list[str]]:
        row, account = RowCells(columns), RowAccount()
        found = record_of(row)
        account.add(row)
        return found, account.notices("t.jsonl")

    first = Conversation((BE_SHORT, ASK, ANSWER))
    found, notices = said(messages=[BE_SHORT, ASK, ANSWER], system="Be long.")
    assert found == first and "column system " in notices[0] and len(notices) == 1
    assert said(messages=[BE_SHORT, ASK, ANSWER], system="Be short.") == (first, []), "the control: it says the same"
    found, notices = said(messages=[ASK, ANSWER], system="Be short.", system_prompt="Be long.")
    assert found == first and "system_prompt" in notices[0]


YES, NO = ({"role": "assistant", "content": text} for text in ("yes", "no"))
TALK = Pair(Conversation((ASK, YES), last_only=True), Conversation((ASK, NO), last_only=True))
TEXTS = Pair(Completion("2+2=", "4"), Completion("2+2=", "5"))
TRAITS = Pair(Completion("Q: a A:", " b c"), Completion("Q: a A:", " d c"))
PAIRS: list[tuple[dict[str, Any], Pair]] = [
    ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, TEXTS),
    ({"chosen": "2+2=4", "rejected": "2+2=5", "prompt": None}, TEXTS),
    ({"chosen": "Q: a A: b c", "rejected": "Q: a A: d c"}, TRAITS),
    ({"prompt": [ASK], "chosen": [YES], "rejected": [NO]}, TALK),
    ({"prompt": [ASK], "chosen": YES, "rejected": "no", "messages": [ASK, ANSWER]}, TALK),
    ({"chosen": [ASK, YES], "rejected": [ASK, NO]}, TALK),
    ({"prompt": ASK["content"], "chosen": [ASK, YES], "rejected": [ASK, NO], "score": 3}, TALK),
    ({"prompt": ASK["content"], "chosen": [YES], "rejected": [NO]}, TALK),
    ({"prompt": [ASK], "chosen": [ASK, YES], "rejected": [ASK, NO]}, TALK),
]


@pytest.mark.parametrize(("row", "record"), PAIRS)
def test_two_answers_to_a_prompt_are_a_pair(row: dict[str, Any], record: Pair) -> None:
    assert record_of(row, pairs=True) == record
    assert read(written(record)) == record


OTHER = {"role": "user", "content": "3+3?"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b"}, worded("dataset/has-no-column-rejected-its-columns-are")),
        ({"messages": [ASK, YES]}, worded("dataset/has-no-column-chosen-and-rejected")),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, worded("dataset/are-the-same")),
        ({"chosen": "ab", "rejected": "ab"}, worded("dataset/are-the-same")),
        ({"chosen": [ASK, YES], "rejected": [ASK, YES]}, worded("dataset/are-the-same")),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, worded("dataset/the-rejected-answer-is-empty")),
        ({"prompt": "a", "chosen": None, "rejected": None}, worded("dataset/the-chosen-answer-is-empty")),
        ({"prompt": "a", "chosen": "b", "rejected": ["c"]}, worded("dataset/the-rejected-answer-is-no-list-of")),
        ({"prompt": ["a"], "chosen": "b", "rejected": "c"}, worded("dataset/the-prompt-is-no-list-of-messages")),
        ({"prompt": [ASK], "chosen": [YES], "rejected": []}, worded("dataset/the-rejected-answer-is-empty")),
        (
            {"prompt": [ASK], "chosen": [{**YES, "content": ""}], "rejected": [NO]},
            worded("dataset/the-chosen-answer-is-empty"),
        ),
        ({"chosen": "Q: a A: b", "rejected": "Q: a A:"}, worded("dataset/both-answers-share-the-rejected-one-is")),
        ({"chosen": "yes", "rejected": "no"}, worded("dataset/begin-differently")),
        ({"chosen": [YES], "rejected": [NO]}, worded("dataset/differ-or-there-is-none")),
        ({"chosen": [ASK, YES], "rejected": [OTHER, NO]}, worded("dataset/prompts-of-chosen-and-rejected-differ")),
        (
            {"prompt": [ASK], "chosen": [YES, ASK, YES], "rejected": [NO, ASK, NO]},
            worded("dataset/more-than-one-message"),
        ),
    ],
)
def test_what_is_no_pair_is_named(row: dict[str, Any], reason: Worded) -> None:
    with pytest.raises(UnusableText, check=saying(reason)):
        record_of(row, pairs=True)


def test_pairs_are_named_where_texts_are_wanted_and_read_where_pairs_are(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + '\n{"text": "d"}', "utf-8")
    data = DataSection(sources=(DataSource(dataset=str(path)),))
    found, other = scan_texts(data, pairs=True), scan_texts(data)
    assert [read(sample.caption) for sample in found.samples] == [Pair(Completion("a", "b"), Completion("a", "c"))]
    assert [(each.where.rpartition(":")[2], each.what[:16]) for each in found.set_aside] == [
        ("2", worded("dataset/it-has-no-column"))
    ]
    assert [sample.caption for sample in other.samples] == ["d"]
    assert "objective.loss: dpo" in other.set_aside[0].fix


def test_an_answer_that_only_calls_a_tool_may_say_nothing() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    assert isinstance(record_of({"messages": [ASK, call]}), Conversation)


def scanned(path: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Texts, and the place and reason of each skipped row."""
    found = scan_texts(DataSection(sources=(DataSource(dataset=str(path)),)))
    return [sample.caption for sample in found.samples], [(each.where, each.what) for each in found.set_aside]


def test_bad_lines_are_named_by_their_number_and_the_others_are_used(tmp_path: Path) -> None:
    lines = [b'{"text": "a"}', b"", b"{", b'{"text": "\xff"}', b"[1]", b'{"text": ""}', '{"text": "ä"}'.encode()]
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    texts, aside = scanned(path)
    assert texts == ["a", "ä"]
    assert [where.rpartition(":")[2] for where, _ in aside] == ["3", "4", "5", "6"]
    assert [what.split(":")[0] for _, what in aside] == [
        worded("dataset/it-is-no-json"),
        worded("dataset/it-is-not-utf-8-text"),
        worded("dataset/it-is-no-json-object"),
        worded("dataset/the-text-is-empty"),
    ]


BAD_ROWS = {
    "key twice": ('"messages": [], "messages": [MESSAGES]', 'key "messages" twice'),
    "key of a message twice": ('"messages": [{"role": "user", "role": "user"}, MESSAGES]', 'key "role" twice'),
    "key of a tool twice": ('"messages": [MESSAGES], "tools": [{"name": "a", "name": "b"}]', 'key "name" twice'),
    "long number": ('"messages": [MESSAGES], "id": ' + "9" * 6000, "too many digits"),
    "deep": ('"messages": [MESSAGES], "id": ' + "[" * 9999, "nested too deep"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_what_makes_a_row_of_json_unusable_is_said(name: str, suffix: str, tmp_path: Path) -> None:
    row, reason = BAD_ROWS[name]
    good = ", ".join(map(json.dumps, (ASK, ANSWER)))
    lines = ["{" + each.replace("MESSAGES", good) + "}" for each in ('"messages": [MESSAGES]', row)]
    path = tmp_path / f"t{suffix}"
    path.write_text("\n".join(lines) if suffix == ".jsonl" else f"[{','.join(lines)}]", encoding="utf-8")
    found = list(rows_of(DataSection(sources=(DataSource(dataset=str(path)),)).resolved_sources()[0]))
    ((where, bad),) = ((where, row) for where, row, _ in found if isinstance(row, UnusableText))
    assert re.search(reason, bad.what) and "no JSON" not in bad.what
    assert where == (f"{path.name}:2" if suffix == ".jsonl" else f"{path.name}:1")


def test_a_plain_answer_that_is_a_list_in_json_or_python_stays_a_text() -> None:
    for answer in ('[{"city": "Oslo"}]', "[{'city': 'Oslo'}]", '[{"a": 1, "a": 2}]', "[1, 2", '[{"role": "x"}, 3]'):
        assert record_of({"prompt": "a", "completion": answer}) == Completion("a", answer)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_parquet_file_with_two_fields_of_one_name_is_refused(depth: int, tmp_path: Path) -> None:
    """Without the check the last of two fields of a struct counts."""
    for twice in (False, True):
        field = pyarrow.field("a", pyarrow.string())
        fields = [field, field if twice else field.with_name("b")]
        for _ in range(depth):
            fields = [pyarrow.field("messages", pyarrow.list_(pyarrow.struct(fields)))]
        schema = pyarrow.schema([pyarrow.field("text", pyarrow.string()), *fields])
        columns = [pyarrow.array(["x"]), *(pyarrow.nulls(1, each.type) for each in fields)]
        path = tmp_path / f"{depth}{twice}.parquet"
        parquet.write_table(pyarrow.Table.from_arrays(columns, schema=schema), path)
        data = DataSection(sources=(DataSource(dataset=str(path)),))
        if twice:
            with pytest.raises(DataError) as caught:
                scan_texts(data)
            assert caught.value.code == "dataset-column" and str(path) in str(caught.value)
        else:
            assert len(list(rows_of(data.resolved_sources()[0]))) == 1


def test_cells_of_a_csv_hold_lists_as_json_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    path, chat = tmp_path / "t.csv", json.dumps([ASK, ANSWER], indent=1)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("messages", "tools"), (chat, '[{"name": "add"}]'), (chat[:-2], ""), (chat, "")])
    texts, ((where, what),) = scanned(path)
    assert [read(text) for text in texts] == [
        Conversation((ASK, ANSWER), ({"name": "add"},)),
        Conversation((ASK, ANSWER)),
    ]
    line = 2 + chat.count("\n") + 1
    assert where == f"{path}:{line}" and says(what, "dataset/the-column-messages-is-a-text-that")


def test_a_json_array_a_csv_and_a_parquet_file_hold_the_same_rows(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{"prompt": "a,\nb", "completion": "c"}, {"prompt": "d", "completion": 'e"'}]
    (tmp_path / "t.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "t.csv").write_text('prompt,completion\n"a,\nb",c\nd,"e"""\n', encoding="utf-8")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    wanted = [written(Completion(**row)) for row in rows]
    for name in ("t.json", "t.csv", "t.parquet"):
        assert scanned(tmp_path / name) == (wanted, []), name


def test_lines_are_read_one_by_one(tmp_path: Path) -> None:
    """The second line is broken; the first comes before it is checked."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + b"x" * (1 << 25) + b'\n{"text": "b"}\n')
    (source,) = DataSection(sources=(DataSource(dataset=str(path)),)).resolved_sources()
    rows = list(rows_of(source))
    assert [row for _, row, _ in rows if isinstance(row, dict)] == [{"text": "a"}, {"text": "b"}]
    assert isinstance(rows[1][1], UnusableText) and says(rows[1][1].what, "dataset/longer-than-16-mib")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["", "a", "assistant", "user", "{", "[1]", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "type", "text", "tool_calls"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
COLUMNS = ("messages", "conversations", "prompt", "completion", "instruction", "input", "output", "system", "tools", "text", "question", "answer")  # fmt: skip  # noqa: E501


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(COLUMNS), JSON, max_size=5))
@settings(max_examples=2000)
def test_any_row_is_a_record_or_named(row: dict[str, Any]) -> None:
    """A row of any JSON never ends a run."""
    try:
        record = record_of(row)
    except UnusableText as error:
        assert error.what and error.fix
    else:
        assert read(written(record)) == record


@pytest.mark.parametrize("content", ["", "\n\n"])
@pytest.mark.parametrize("name", ["t.jsonl", "t.csv"])
def test_a_table_without_rows_is_named(tmp_path: Path, name: str, content: str) -> None:
    """Also next to one that has rows."""
    (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "full.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    sources = tuple(DataSource(dataset=str(tmp_path / each)) for each in ("full.jsonl", name))
    with pytest.raises(DataError, check=saying("dataset/this-table-has-no-rows")) as caught:
        scan_texts(DataSection(sources=sources))
    assert caught.value.code == "dataset-empty" and caught.value.where == str(tmp_path / name)


def test_rows_that_fail_alike_say_their_remedy_once(tmp_path: Path) -> None:
    table = tmp_path / "pairs.jsonl"
    table.write_text('{"chosen": "a", "rejected": "b"}\n' * 2, encoding="utf-8")
    data = DataSection(sources=(DataSource(dataset=str(table)),))
    with pytest.raises(DataError, check=saying("dataset/no-text-can-be-used-found-2")) as caught:
        scan_texts(data)
    assert (
        says(caught.value.where, "dataset/table-2-it-is-a-pair-of", table=table)
        and "objective.loss: dpo" in caught.value.fix
    )
    table.write_text('{"chosen": "a", "rejected": "b"}\n{"text": ""}\n', encoding="utf-8")
    with pytest.raises(DataError, check=saying("dataset/no-text-can-be-used-found-2")) as caught:
        scan_texts(data)
    assert "objective.loss: dpo" in caught.value.fix and says(caught.value.fix, "dataset/fill-it-or-take-the-row-away")


def test_a_lone_surrogate_is_set_aside_with_its_place(tmp_path: Path) -> None:
    table = tmp_path / "chats.jsonl"
    table.write_text('{"text": "cut \\ud83d"}\n{"text": "whole \\ud83d\\ude00"}\n', encoding="utf-8")
    found = scan_texts(DataSection(sources=(DataSource(dataset=str(table)),)))
    assert len(found.samples) == 1 and [problem.where for problem in found.set_aside] == [f"{table}:1"]
    assert says(found.set_aside[0].what, "dataset/a-lone-surrogate-ud83d")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_columns_that_nothing_reads_are_named_with_their_rows(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t{suffix}"
    rows = [{"instruction": "a", "output": "b", "input": "", "source": "x", "note": note} for note in ("n", "", "")]
    if suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(str(path))
    elif suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        lines = map(json.dumps, rows)
        path.write_text(f"[{','.join(lines)}]" if suffix == ".json" else "\n".join(lines), encoding="utf-8")
    (notice,) = scan_texts(DataSection(sources=(DataSource(dataset=str(path)),))).notices
    assert "source (3 rows)" in notice and "note (1 row)" in notice and str(path) in notice
    assert not any(read in notice for read in ("instruction", "output", "input"))


def test_the_account_of_columns_is_bounded() -> None:
    account = RowAccount()
    for number in range(5000):
        row = RowCells({"text": "a", f"c{number}\n\ud800": 1})
        record_of(row)
        account.add(row)
    (notice,) = account.notices("t.jsonl")
    assert len(account.columns.of_name) == 1000 and notice.count("(1 row)") == MAX_NAMED and "\n" not in notice
    notice.encode("utf-8")
