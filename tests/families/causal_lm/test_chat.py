"""Conversations as tokens: the chat template's tokens, and the loss covers the assistant's words."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lora_rocm.dataset.rows.records import (
    Completion,
    Conversation,
    Pair,
    Record,
    UnusableText,
    read,
    record_of,
    written,
)
from lora_rocm.dataset.rows.row_edge import SharedCause
from lora_rocm.families.causal_lm.chat import ChatTokenizer
from lora_rocm.families.causal_lm.special_tokens import BREAKS
from tests.tiny_llm import CHAT, SPECIAL, STRIPPING, THINK, tiny_tokenizer
from tests.wording import saying, worded

END, START = SPECIAL


def chat(*turns: tuple[str, str]) -> Conversation:
    return Conversation(tuple({"role": role, "content": content} for role, content in turns))


TWO = chat(("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "See you"))


def reader(template: str | None = CHAT, max_length: int = 512, train_on: str = "answers") -> ChatTokenizer:
    return ChatTokenizer(tiny_tokenizer(template), max_length, train_on, "tiny")


def trained(found: ChatTokenizer, record: Record) -> list[str]:
    """The stretches that are trained on."""
    shown = found.shown(written(record))
    return [piece.split("⟧")[0] for piece in shown.split("⟦")[1:]]


def of_template(found: ChatTokenizer, record: Conversation) -> list[int]:
    ids: Any = found.tokenizer.apply_chat_template(list(record.messages), tokenize=True, return_dict=False)
    return list(ids)


def test_the_answers_and_the_ends_of_their_turns_are_trained_on() -> None:
    found = reader()
    tokens = found.tokens(TWO)
    assert list(tokens.ids) == of_template(found, TWO)
    assert trained(found, TWO) == [f"Hello{END}", f"See you{END}"]
    assert trained(reader(train_on="all"), TWO)[0].endswith("Be kind." + found.shown(written(TWO)).split("Be kind.")[1].replace("⟦", "").replace("⟧", ""))  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_special_tokens_in_a_message_are_text_and_those_of_an_answer_are_tokens(role: str) -> None:
    found = reader()
    spelled = chat((role, f"a{END}\n{START}assistant\nb"), ("assistant", f"{THINK}c{START}d"))
    tokens = found.tokens(spelled)
    start, end = (found.tokenizer.convert_tokens_to_ids(token) for token in (START, END))
    assert tokens.ids.count(end) == 2 and tokens.ids.count(start) == 3
    assert found.tokenizer.decode(tokens.ids) == f"{START}{role}\na{END}\n{START}assistant\nb{END}\n{START}assistant\n{THINK}c{START}d{END}\n"  # fmt: skip  # noqa: E501
    assert trained(found, spelled) == [f"{THINK}c{START}d{END}"]
    assert of_template(found, spelled).count(end) == 3, "the control: the template makes a token of it"
    with pytest.raises(UnusableText, match="private-use"):
        found.tokens(chat(("user", END + BREAKS), ("assistant", "a")))


def test_letters_of_several_bytes_and_what_follows_them_keep_their_places() -> None:
    found = reader()
    for asked in ("ä😀", f"ä{END}😀"):
        assert trained(found, chat(("user", asked), ("assistant", "öß😀"))) == [f"öß😀{END}"]


def test_a_template_that_rewrites_earlier_answers_makes_a_sample_of_each() -> None:
    found = reader(STRIPPING)
    asked = chat(("user", "a"), ("assistant", f"{THINK}x</think>b"), ("user", "c"), ("assistant", f"{THINK}y</think>d"))
    parts = [read(part) for part in found.parts(written(asked))]
    assert [len(part.messages) for part in parts if isinstance(part, Conversation)] == [2, 4]
    assert [trained(found, part) for part in parts] == [[f"{THINK}x</think>b{END}"], [f"{THINK}y</think>d{END}"]]
    assert f"{START}assistant\nb{END}" in found.shown(written(parts[1]))
    assert len(reader().parts(written(asked))) == 1, "the control: this template keeps them"


def test_a_template_whose_question_is_no_beginning_of_the_answer_is_refused() -> None:
    odd = CHAT.replace("<|start|>assistant\n{% endif", "<|start|>assistant\n<think>{% endif")
    with pytest.raises(SharedCause, match="begin with") as caught:
        reader(odd).parts(written(TWO))
    assert caught.value.of_all.code == "chat-template-unfit"


def test_without_a_template_only_texts_and_completions_can_be_trained_on() -> None:
    found = reader(None)
    with pytest.raises(SharedCause, check=saying("families/no-chat-template")) as caught:
        found.parts(written(TWO))
    assert caught.value.of_all.code == "chat-template-missing"
    assert trained(found, Completion("2+2=", "4")) == [f"4{END}"]
    assert trained(found, "abc") == [f"bc{END}"], "nothing comes before the first token"


def test_a_template_that_refuses_its_messages_sets_the_row_aside() -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + CHAT
    with pytest.raises(UnusableText, match="no system here"):
        reader(strict).parts(written(TWO))


def test_of_a_pair_both_answers_are_trained_on_and_have_to_differ_within_the_longest_length() -> None:
    found = ChatTokenizer(tiny_tokenizer(CHAT), 60, "answers", "tiny", pairs=True)
    better, worse = (replace(chat(("user", "Hi"), ("assistant", text)), last_only=True) for text in ("Hello", "What"))
    record = Pair(better, worse)
    assert found.parts(written(record)) == [written(record)]
    shown = found.shown(written(record))
    assert shown.startswith("chosen:\n") and trained(found, record) == [f"Hello{END}", f"What{END}"]
    assert shown.index("\nrejected:\n") > shown.index("Hello")
    long = [Completion("a", "b" * 70 + end) for end in "cd"]
    with pytest.raises(UnusableText, check=saying("families/the-same-60-tokens")):
        found.parts(written(Pair(*long)))
    with pytest.raises(UnusableText, check=saying("families/begins-behind-the-60-tokens")):
        found.parts(written(Pair(Completion("a" * 70, "b"), Completion("a" * 70, "c"))))
    with pytest.raises(UnusableText, check=saying("families/no-pair-of-answers")):
        found.parts("a plain text")


def test_what_is_too_long_is_cut_and_said_and_an_answer_out_of_reach_is_set_aside() -> None:
    found = reader(max_length=30)
    asked = chat(("user", "a"), ("assistant", "b" * 50))
    assert len(found.tokens(asked).ids) == 30 and found.tokens(asked).whole > 60
    found.parts(written(asked))
    assert found.notices == (worded("families/1-text-is-longer-than-data-max"),)
    with pytest.raises(UnusableText, check=saying("families/begins-behind-the-30-tokens")):
        found.parts(written(chat(("user", "a" * 50), ("assistant", "b"))))
    assert not reader().notices


CALLS = "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"


@pytest.mark.parametrize("content", ["", "I look."])
def test_a_call_of_a_tool_that_the_template_leaves_out_is_named(content: str) -> None:
    calls = {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": "w", "arguments": {}}}]}
    begin, end = chat(("user", "weather?")), chat(("tool", "sun"), ("assistant", "sunny"))
    asked = Conversation((*begin.messages, calls, *end.messages))
    with pytest.raises(UnusableText, check=saying("families/message-2-assistant-calls-a-tool")) as caught:
        reader().parts(written(asked))
    assert "model.tokenizer" in caught.value.fix
    pair = Pair(Conversation((*begin.messages, calls), last_only=True), chat(("user", "weather?"), ("assistant", "no")))
    with pytest.raises(UnusableText, check=saying("families/calls-a-tool")):
        ChatTokenizer(tiny_tokenizer(CHAT), 99, "answers", "tiny", pairs=True).parts(written(pair))
    knows = reader(CHAT.replace("{{ m.content }}", CALLS))
    assert knows.parts(written(asked)) == [written(asked)], "the control: this template writes it"
    assert '"name": "w"' in trained(knows, asked)[0]
    silent = Conversation((*begin.messages, {**calls, "content": "a", "tool_calls": []}, *end.messages))
    assert reader().parts(written(silent)) == [written(silent)], "the control: nothing is called"
    wants = CHAT.replace("{{ m.content }}", "{% if not (m.content or m.tool_calls) %}{{ raise_exception('x') }}{% endif %}{{ m.content }}")  # fmt: skip  # noqa: E501
    if not content:
        assert reader(wants).parts(written(asked)) == [written(asked)]


@pytest.mark.parametrize("template", [CHAT, STRIPPING])
def test_last_turn_trains_on_the_last_answer_alone(template: str) -> None:
    thought, later = f"{THINK}x</think>b", chat(("user", "e"))
    asked = chat(("user", "a"), ("assistant", thought), ("user", "c"), ("assistant", f"{THINK}y</think>d"))
    found, wanted = reader(template, train_on="last-turn"), f"{THINK}y</think>d{END}"
    assert found.parts(written(asked)) == [written(asked)] and trained(found, asked) == [wanted]
    assert list(found.tokens(asked).ids) == of_template(found, asked)
    followed = replace(asked, messages=asked.messages + later.messages)
    assert trained(found, followed) == [wanted] and found.tokens(followed) == found.tokens(asked)
    every = [
        piece for part in reader(template).parts(written(asked)) for piece in trained(reader(template), read(part))
    ]
    assert every == [thought + END, wanted], "the control: each answer"
    assert trained(found, Completion("a", "b")) == [f"b{END}"] and trained(found, "abc") == [f"bc{END}"]


def test_plain_prompts_and_answers_are_said_if_the_tokenizer_has_a_chat_template() -> None:
    pair = Pair(Completion("a", "b"), Completion("a", "c"))
    for pairs, record in ((False, Completion("a", "b")), (True, pair)):
        found = ChatTokenizer(tiny_tokenizer(CHAT), 99, "answers", "tiny", pairs)
        found.parts(written(record))
        (warning,) = found.warnings
        assert "1 row" in warning and "messages" in warning and ("chosen" in warning) is pairs and not found.notices
        bare = ChatTokenizer(tiny_tokenizer(None), 99, "answers", "tiny", pairs)
        bare.parts(written(record))
        assert not bare.warnings, "the control: there is no template"
    found = reader()
    found.parts(written(TWO))
    assert not found.warnings, "the control: a conversation has it"


def test_templates_print_tools_and_calls_in_the_order_of_the_row() -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"z": 1, "a": 2}}}
    call = {"type": "function", "function": {"name": "look", "arguments": {"z": 1, "a": [{"y": 1, "b": 2}]}}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Seen."},
        {"role": "assistant", "content": "Done."},
    ]
    record = read(written(record_of({"messages": messages, "tools": [tool]})))
    assert isinstance(record, Conversation)
    assert json.dumps(record.tools) == json.dumps([tool])
    assert json.dumps(record.messages[1]["tool_calls"]) == json.dumps([call])
    renamed = [{**{key: message[key] for key in reversed(message)}} for message in messages]
    assert written(record_of({"tools": [tool], "messages": renamed})) == written(record)
