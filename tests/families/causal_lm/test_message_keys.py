"""Keys of messages other than role and content: they mask a turn, are written by the template, or are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_rocm.dataset.rows.records import Conversation, Pair, UnusableText, read, record_of, written
from lora_rocm.dataset.rows.row_cells import RowAccount, RowCells
from lora_rocm.dataset.rows.text_rows import rows_of
from lora_rocm.families.causal_lm.chat import ChatTokenizer
from lora_rocm.recipe.schema import DataSection
from lora_rocm.recipe.source_sections import DataSource
from tests.tiny_llm import CHAT, SPECIAL, STRIPPING, tiny_tokenizer
from tests.wording import saying

END = SPECIAL[0]
HEAD, TAIL = "{% for m in messages %}<|start|>{{ m.role }}\n", "<|end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"


def calling(call: str) -> str:
    """A template that lists the tools, and writes each call ``c`` in some way."""
    calls = f"{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}"
    return TOOLS + HEAD + "{{ m.content }}" + calls + TAIL + ASK


# What templates of these models do with the arguments of a call.
STYLES = {
    "llama-3.1": calling('{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'),
    "qwen-2.5": calling('{% set f = c.function %}{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'),
    "mistral": calling("[{{ c.function | tojson }}]"),
    "gpt-oss": calling("to=functions.{{ c.function.name }} json{{ c.function.arguments | tojson }}"),
    "glm": calling("{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}"),
    "deepseek": calling("{{ c.function.name + '\n' + c.function.arguments }}"),
    "printing": calling("{{ c.function.name }} {{ c.function.arguments }}"),
    "qwen-3": calling(
        "{% set a = c.function.arguments %}{{ c.function.name }}{% if a is string %}{{ a }}{% else %}{{ a | tojson }}"
        "{% endif %}"
    ),
}
THINKING = CHAT.replace(
    "{{ m.content }}", "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
)
USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SECOND = {"role": "assistant", "content": "5"}
CITY = {"city": "Oslo", "days": 2}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


def reader(template: str = CHAT, train_on: str = "answers", pairs: bool = False) -> ChatTokenizer:
    return ChatTokenizer(tiny_tokenizer(template), 512, train_on, "tiny", pairs)


def ids(found: ChatTokenizer, row: dict[str, Any]) -> list[tuple[int, ...]]:
    return [
        found.tokens(part).ids for part in map(read, found.parts(written(record_of(row)))) if not isinstance(part, Pair)
    ]


def trained(found: ChatTokenizer, row: dict[str, Any]) -> list[str]:
    """The stretches of a row that are trained on."""
    shown = "".join(map(found.shown, found.parts(written(record_of(row)))))
    return [piece.split("⟧")[0] for piece in shown.split("⟦")[1:]]


@pytest.mark.parametrize("key", ["weight", "train", "training", "loss", "trainable", "loss_mask"])
@pytest.mark.parametrize("template", [CHAT, STRIPPING])
def test_a_turn_that_its_row_excludes_is_not_trained_on(key: str, template: str) -> None:
    for no, yes in ((0, 1), (False, True), (0.0, 1.0), ("false", "true")):
        row = {"messages": [USER, {**ANSWER, key: no}, USER, {**SECOND, key: yes}]}
        assert trained(reader(template), row) == [f"5{END}"]
        assert not reader(template).notices
    assert trained(reader(template), {"messages": [USER, ANSWER, USER, SECOND]}) == [f"4{END}", f"5{END}"], "control"
    sharegpt = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", key: 0}]}
    with pytest.raises(UnusableText, check=saying("families/nothing-to-learn")):
        record_of(sharegpt)


def test_an_excluded_turn_stays_excluded_whatever_else_is_trained_on() -> None:
    row = {"messages": [{**USER, "weight": 0}, {**ANSWER, "weight": 0}, USER, SECOND]}
    (found,) = trained(reader(train_on="all"), row)
    assert "4" not in found and "2+2?" in found and f"5{END}" in found
    with pytest.raises(UnusableText, match="rewrites"):
        later = {"messages": [USER, {**ANSWER, "content": "<think>c</think>4", "weight": 0}, USER, SECOND]}
        trained(reader(STRIPPING, "all"), later)
    last = {"messages": [USER, ANSWER, USER, {**SECOND, "weight": 0}]}
    assert trained(reader(), last) == [f"4{END}"]
    with pytest.raises(UnusableText, check=saying("families/last-answer-is-excluded")):
        trained(reader(train_on="last-turn"), last)
    with pytest.raises(UnusableText, check=saying("families/nothing-to-learn")):
        record_of({"prompt": [USER, ANSWER, USER], "completion": [{**SECOND, "train": False}]})
    with pytest.raises(UnusableText, check=saying("families/excludes-the-chosen-answer")):
        record_of({"prompt": [USER], "chosen": [{**ANSWER, "weight": 0}], "rejected": [SECOND]}, pairs=True)


THIRD, RESULT = {"role": "user", "content": "3+3?"}, {"role": "tool", "content": "6"}
ASKED = f"<|start|>user\n3+3?{END}\n"
GROUPING = (  # results of tools that follow each other are one turn, as in Qwen's templates
    "{% for m in messages %}{% if m.role != 'tool' or loop.previtem.role != 'tool' %}<|start|>{{ m.role }}\n{% endif %}"
    "{{ m.content }}{% if m.role != 'tool' or loop.last or loop.nextitem.role != 'tool' %}<|end|>\n{% endif %}"
    "{% endfor %}" + ASK
)


@pytest.mark.parametrize(
    ("completion", "wanted", "last"),
    [
        ([ANSWER], [f"4{END}"], f"4{END}"),
        ([ANSWER, SECOND], [f"4{END}", f"5{END}"], f"5{END}"),
        ([ANSWER, THIRD, SECOND], [f"4{END}", ASKED, f"5{END}"], f"5{END}"),
        ([ANSWER, THIRD], [f"4{END}", ASKED], f"4{END}"),
        ([THIRD, SECOND], [ASKED, f"5{END}"], f"5{END}"),
        ([ANSWER, {**THIRD, "weight": 0}, SECOND], [f"4{END}", f"5{END}"], f"5{END}"),
        ([{**ANSWER, "weight": 0}, THIRD, SECOND], [ASKED, f"5{END}"], f"5{END}"),
        ([{**ANSWER, "train": True}, {**THIRD, "train": True}], [f"4{END}", ASKED], f"4{END}"),
        ([ANSWER, RESULT, RESULT, SECOND], [f"4{END}", f"<|start|>tool\n66{END}\n", f"5{END}"], f"5{END}"),
    ],
)
def test_every_message_of_a_completion_is_trained_on(completion: list[Any], wanted: list[str], last: str) -> None:
    """As with TRL's mask of completions; of the prompt nothing is, also not an answer."""
    for system in ({}, {"system": "Be short."}):
        row = {"prompt": [THIRD, {**SECOND, "content": "9"}, USER], "completion": completion, **system}
        record = record_of(row)
        assert trained(reader(GROUPING), row) == wanted and read(written(record)) == record
        assert trained(reader(GROUPING, "last-turn"), row) == [last]
        whole = trained(reader(GROUPING, "all"), row)
        assert all(any(piece in each for each in whole) for piece in wanted)
        cells = RowCells(row)
        record_of(cells)
        others = any(each["role"] != "assistant" for each in completion)
        assert any("completion" in remark for remark in cells.remarks) == others


def test_answers_of_a_completion_that_the_template_rewrites_are_cut_apart_or_refused() -> None:
    thinks = {"role": "assistant", "content": "<think>a</think>4"}
    row = {"prompt": [USER], "completion": [thinks, {**THIRD, "weight": 0}, SECOND]}
    assert trained(reader(STRIPPING), row) == [f"<think>a</think>4{END}", f"5{END}"]
    with pytest.raises(UnusableText, match="Message 3 .* completion"):
        trained(reader(STRIPPING), {**row, "completion": [thinks, THIRD, SECOND]})
    for completion in ([THIRD], [{**ANSWER, "weight": 0}], [{**ANSWER, "weight": 0}, THIRD]):
        with pytest.raises(
            UnusableText, check=saying("families/nothing-to-learn")
        ):  # the prompt's answer does not replace it
            record_of({"prompt": [USER, ANSWER, USER], "completion": completion})


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"weight": 0.5}, "weight 0.5"),
        ({"weight": "much"}, "weight 'much'"),
        ({"loss": [0, 1]}, "loss"),
        ({"mask": True}, "mask True"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}, "train_detail"),
    ],
)
def test_another_weight_and_parts_of_a_message_are_refused(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableText, match=reason):
        record_of({"messages": [USER, {**ANSWER, **keys}]})
    assert record_of({"messages": [USER, {**ANSWER, **dict.fromkeys(keys)}]}) == Conversation((USER, ANSWER))


def test_a_key_that_the_template_does_not_write_is_named_once_with_its_rows() -> None:
    row = {"messages": [{**USER, "name": "Ann", "id": None}, {**ANSWER, "id": 7, "note": ""}]}
    found = reader()
    for _ in range(3):
        found.parts(written(record_of(row)))
    (notice,) = found.notices
    assert "id (3 rows)" in notice and "name (3 rows)" in notice and "note" not in notice
    knows = reader(CHAT.replace("{{ m.content }}", "{{ m.content }}{{ m.name }}{{ m.id }}"))
    knows.parts(written(record_of(row)))
    assert not knows.notices, "the control: this template writes them"
    pair = {"prompt": [USER], "chosen": [{**ANSWER, "id": 1}], "rejected": [{**SECOND, "score": 2}]}
    of_pairs = reader(pairs=True)
    of_pairs.parts(written(record_of(pair, pairs=True)))
    assert "id (1 row)" in of_pairs.notices[-1] and "score (1 row)" in of_pairs.notices[-1]


def test_descriptions_of_functions_that_the_template_does_not_write_are_said() -> None:
    row = record_of({"messages": [USER, ANSWER], "tools": [WEATHER]})
    found, knows = reader(), reader(TOOLS + CHAT)
    found.parts(written(row))
    knows.parts(written(row))
    assert "tools" in found.notices[0] and "1 row" in found.notices[0] and not knows.notices


def test_thoughts_are_written_or_their_row_is_refused() -> None:
    row = {"messages": [USER, {**ANSWER, "reasoning_content": "add"}, USER, SECOND]}
    with pytest.raises(UnusableText, match="Message 2 has reasoning_content"):
        reader().parts(written(record_of(row)))
    assert trained(reader(THINKING), row) == [f"(add)4{END}", f"5{END}"]
    only_last = THINKING.replace("m.reasoning_content %}", "m.reasoning_content and loop.last %}")
    assert trained(reader(only_last), row) == [f"(add)4{END}", f"5{END}"], "each answer is a sample of its own"
    assert not reader(THINKING).notices


def tool_row(arguments: Any) -> dict[str, Any]:
    called = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "Sunny."},
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": WEATHER}]}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("arguments", [CITY, {}, {"list": [1, None, {"d": None}], "text": 'a "b" {c}'}])
def test_arguments_as_a_text_and_as_a_mapping_are_the_same_tokens(style: str, arguments: dict[str, Any]) -> None:
    row, found = tool_row(arguments), reader(STYLES[style])
    wanted = ids(found, row)
    text = json.dumps(arguments)
    assert ids(found, tool_row(text)) == wanted
    if style != "glm" and arguments:
        assert text in found.shown(written(record_of(row))), "as JSON, in no further quotes"
    as_texts = {key: json.dumps(value) for key, value in tool_row(text).items()}
    inner = tool_row(text)
    inner["messages"][1]["tool_calls"] = json.dumps(inner["messages"][1]["tool_calls"])
    inner["tools"] = [json.dumps(each) for each in inner["tools"]]
    assert ids(found, as_texts) == ids(found, inner) == wanted, "a table may hold JSON at every place"


def test_a_text_that_is_no_mapping_stays_a_text() -> None:
    found = reader(STYLES["qwen-2.5"])
    for text in ("Oslo", "[1]", "{"):
        assert json.dumps(text) in found.shown(written(record_of(tool_row(text))))


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [("{not json", False), ("", False), ('"a"', False), ('{"a": 1, "a": 2}', False), ('{"a": 1}', True)],
)
def test_arguments_that_are_no_json_object_set_the_row_aside(arguments: str, fits: bool) -> None:
    text = written(record_of(RowCells(tool_row(arguments)), False))
    if fits:
        assert reader(STYLES["qwen-2.5"]).parts(text)
        return
    with pytest.raises(UnusableText, check=saying("families/no-json-object")):
        reader(STYLES["qwen-2.5"]).parts(text)


@pytest.mark.parametrize(
    ("function", "fits"),
    [
        ({"name": "w", "arguments": {}}, True),
        ({"name": "w"}, True),
        ({"name": "w", "arguments": None}, False),
        ({"name": "w", "arguments": [1]}, False),
        ({"name": "w", "arguments": 3}, False),
        ({"name": "w", "args": {"a": 1}}, False),
        ({"name": "", "arguments": {}}, False),
        ({"arguments": {}}, False),
        ("{'name': 'w', 'arguments': {}}", False),
    ],
)
def test_a_call_that_is_not_whole_sets_the_row_aside(function: Any, fits: bool) -> None:
    template = calling("[{{ c.function | tojson }}]")
    messages = [USER, {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}, USER, ANSWER]
    if fits:
        assert len(trained(reader(template), {"messages": messages})) == 2
        return
    with pytest.raises(UnusableText, check=saying("families/message-2-calls")):
        trained(reader(template), {"messages": messages})


def test_a_template_that_takes_texts_gets_them_letter_for_letter() -> None:
    tight = '{"city":"Oslo"}'
    for style in ("deepseek", "printing", "qwen-3"):
        assert tight in reader(STYLES[style]).shown(written(record_of(tool_row(tight))))


def test_roles_of_other_trainers_for_calls_and_results() -> None:
    call = json.dumps({"name": "weather", "arguments": CITY})
    found, wanted = reader(STYLES["qwen-2.5"]), tool_row(CITY)
    llama_factory = {
        "conversations": [
            {"from": "human", "value": "Weather?"},
            {"from": "function_call", "value": call},
            {"from": "observation", "value": "sun"},
            {"from": "gpt", "value": "Sunny."},
        ],
        "tools": json.dumps(wanted["tools"]),
    }
    swift = {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "tool_call", "content": f"[{call}]"},
            {"role": "tool_response", "content": "sun"},
            {"role": "assistant", "content": "Sunny."},
        ],
        "tools": wanted["tools"],
    }
    older = {"messages": [dict(each) for each in wanted["messages"]], "functions": [WEATHER]}
    older["messages"][1] = {"role": "assistant", "content": None, "function_call": json.loads(call)}
    assert ids(found, llama_factory) == ids(found, swift) == ids(found, older) == ids(found, wanted)
    with pytest.raises(UnusableText, match="not JSON"):
        record_of({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "b"}]})


ROWS = [
    tool_row({"city": "Oslo"}),
    tool_row({"expr": "2+2", "deep": {"a": [{"b": 1}]}}),
    {
        **tool_row({"city": "Rome", "deep": {"c": 2}}),
        "tools": [{"type": "function", "function": {**WEATHER, "strict": True}}],
    },
    {"messages": [USER, {**ANSWER, "name": "Ann"}]},
]
PAIRS = [
    {"prompt": [USER], "chosen": [row["messages"][1]], "rejected": [{"role": "assistant", "content": "no"}], **row}
    for row in ROWS[:2]
]


@pytest.mark.parametrize("style", ["qwen-2.5", "mistral", "qwen-3"])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_a_table_of_arrow_gives_the_tokens_of_its_json_lines(
    tmp_path: Path, style: str, pairs: bool, kind: str
) -> None:
    rows, found = PAIRS if pairs else ROWS, reader(STYLES[style], pairs=pairs)
    lines, table = tmp_path / "t.jsonl", tmp_path / ("t.parquet" if kind == "parquet" else "saved")
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    padded = Dataset.from_list(rows)
    padded.to_parquet(str(table)) if kind == "parquet" else padded.save_to_disk(str(table))
    assert "null" in json.dumps(padded[0]), "the control: Arrow has filled it up"

    def shown(path: Path) -> list[str]:
        (source,) = DataSection(sources=(DataSource(dataset=str(path)),)).resolved_sources()
        texts = [written(record_of(row, pairs)) for _, row, _ in rows_of(source) if not isinstance(row, UnusableText)]
        return [found.shown(part) for text in texts for part in found.parts(text)]

    assert shown(table) == shown(lines) and len(shown(lines)) == len(rows)


def test_a_null_that_json_lines_hold_stays(tmp_path: Path) -> None:
    row = tool_row({"city": None, "places": [None, 1]})
    assert '{"city": null, "places": [null, 1]}' in reader(STYLES["qwen-2.5"]).shown(written(record_of(row)))
    path = tmp_path / "t.parquet"
    Dataset.from_list([row]).to_parquet(str(path))
    (source,) = DataSection(sources=(DataSource(dataset=str(path)),)).resolved_sources()
    ((_, cells, _),) = rows_of(source)
    assert not isinstance(cells, UnusableText)
    assert '{"places": [null, 1]}' in reader(STYLES["qwen-2.5"]).shown(written(record_of(cells)))


NAMES = st.sampled_from(
    "weight train training loss name id score end_turn recipient channel mask masked label lang history tools system "
    "system_prompt functions reasoning_content weights Train note tool_call_id refusal prefix source kto_tag".split()
)
VALUES = st.one_of(st.sampled_from([0, 1, True, False, 0.5, "", "a", "b"]), st.just(None), st.just([]), st.just(["a"]))
KEYS = st.dictionaries(NAMES, VALUES, max_size=2)


@settings(max_examples=150, deadline=None)
@given(KEYS, KEYS, KEYS, st.sampled_from(["messages", "conversations", "prompt", "instruction", "text"]), st.booleans())
def test_every_key_and_column_is_used_or_named(
    columns: dict[str, Any], of_user: dict[str, Any], of_answer: dict[str, Any], form: str, reads: bool
) -> None:
    template = CHAT.replace("{{ m.content }}", "{{ m.name }}{{ m.score }}{{ m.content }}") if reads else CHAT

    def row_of(columns: dict[str, Any], *keys: dict[str, Any]) -> dict[str, Any]:
        user, answer = ({**message, **more} for message, more in zip((USER, ANSWER), keys, strict=True))
        plain: dict[str, dict[str, Any]] = {
            "messages": {"messages": [user, answer, USER, SECOND]},
            "conversations": {
                "conversations": [
                    {"from": {"user": "human", "assistant": "gpt"}[each["role"]], "value": each["content"]}
                    | {key: value for key, value in each.items() if key not in ("role", "content")}
                    for each in (user, answer, USER, SECOND)
                ]
            },
            "prompt": {"prompt": [user], "completion": [answer]},
            "instruction": {"instruction": "2+2?", "output": "4"},
            "text": {"text": "2+2=4"},
        }
        return {**columns, **plain[form]}

    def seen(row: dict[str, Any]) -> tuple[object, str]:
        """The tokens with their mask, and all notices about the row."""
        cells, account, found = RowCells(row), RowAccount(), reader(template)
        try:
            parts = found.parts(written(record_of(cells)))
            account.add(cells)
            tokens = [found.tokens(part) for part in map(read, parts) if not isinstance(part, Pair)]
        except UnusableText as error:
            return None, error.what
        return tokens, " ".join((*account.notices("t.jsonl"), *found.notices))

    tokens, said = seen(row_of(columns, of_user, of_answer))
    if tokens is None:
        return
    holders: list[tuple[dict[str, Any], int]] = [(columns, 0)]
    if form not in ("instruction", "text"):
        holders += [(of_user, 1), (of_answer, 2)]
    for keys, at in holders:
        for key, value in keys.items():
            if value in (None, "", []) or (
                key.lower() in ("weight", "weights", "train", "training", "loss") and value in (0, 1)
            ):
                continue  # without a value, or with the default
            less = [columns, of_user, of_answer]
            less[at] = {name: each for name, each in keys.items() if name != key}
            used = seen(row_of(*less))[0] != tokens
            assert used or key in said, (key, value, said)
