"""Odd rows, templates and tokenizers: each row is trained on or skipped by name, within limits of time and memory."""

from __future__ import annotations

import json
import time
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import AddedToken

from lora_rocm.base_models.tokenizers import packaged
from lora_rocm.dataset.rows.records import Completion, Conversation, UnusableText, read, written
from lora_rocm.dataset.rows.row_edge import SharedCause, row_edge
from lora_rocm.dataset.rows.row_reference import resolved
from lora_rocm.dataset.sources.text_scan import Scan, scan_texts
from lora_rocm.errors import DataError, StorageError
from lora_rocm.families.causal_lm.chat import ChatTokenizer, growth_of
from lora_rocm.families.causal_lm.chat_template import ChatTemplate
from lora_rocm.families.causal_lm.conversation import NUM_WHOLE
from lora_rocm.families.causal_lm.message_keys import with_arguments
from lora_rocm.families.causal_lm.special_tokens import SpecialTokens
from lora_rocm.families.common.tokenizers import load_tokenizer
from lora_rocm.recipe.schema import DataSection, DataSource
from tests.tiny_llm import CHAT, SPECIAL, STRIPPING, THINK, tiny_tokenizer
from tests.wording import saying, says

END, START = SPECIAL
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + CHAT.replace(
    "{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
)
IF_ODD = "{% if 'odd' in messages[0].content %}"


def chat(*contents: str, begin: str = "user") -> Conversation:
    roles = ("user", "assistant") if begin == "user" else ("assistant", "user")
    return Conversation(tuple({"role": roles[at % 2], "content": each} for at, each in enumerate(contents)))


def reader(template: Any = CHAT, max_length: int = 512, tokenizer: Any = None, pairs: bool = False) -> ChatTokenizer:
    found = tokenizer or tiny_tokenizer(None)
    found.chat_template = template
    return ChatTokenizer(found, max_length, "answers", "tiny", pairs)


def trained(found: ChatTokenizer, text: str | None) -> list[str]:
    assert text is not None
    return [piece.split("⟧")[0] for piece in found.shown(text).split("⟦")[1:]]


def rows(path: Path, *found: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return path


def scanned(table: Path, found: ChatTokenizer, pairs: bool = False) -> Scan:
    return scan_texts(DataSection(sources=(DataSource(dataset=str(table)),)), parts=found.parts, pairs=pairs)


def messages(*contents: str) -> dict[str, Any]:
    return {"messages": list(chat(*contents).messages)}


FAILS = {
    "nothing": ("{{ messages.x.y }}", UnusableText),
    "zero": ("{{ 1 // 0 }}", UnusableText),
    "overflow": ("{{ 2.0 ** 5000 }}", UnusableText),
    "range": ("{{ range(10 ** 9) }}", UnusableText),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", UnusableText),
    "surrogate": ("{{ '\ud800' }}", UnusableText),
    "decode": ("{{ 'ä'.encode().decode('ascii') }}", UnusableText),
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", UnusableText),
    "long": ("{{ 'a' * 4000000000 }}", UnusableText),
}


@pytest.mark.parametrize("name", FAILS)
@pytest.mark.parametrize("pairs", [False, True])
def test_a_row_on_which_the_template_fails_is_set_aside(name: str, pairs: bool, tmp_path: Path) -> None:
    def row(asked: str) -> dict[str, Any]:
        if not pairs:
            return messages(asked, "answer")
        return {"prompt": asked, "chosen": [{"role": "assistant", "content": "a"}], "rejected": "b"}

    template = IF_ODD + FAILS[name][0] + "{% endif %}" + CHAT
    table = rows(tmp_path / "c.jsonl", row("Hi"), row("odd"), row("Bye"))
    found = scanned(table, reader(template, pairs=pairs), pairs)
    assert len(found.samples) == 2
    (problem,) = found.set_aside
    assert problem.where == f"{table}:2" and "chat template" in problem.what and problem.fix
    with pytest.raises(DataError) as caught:
        scanned(rows(table, *[row("odd")] * 2, row("")), reader(template, pairs=pairs), pairs)
    assert caught.value.code == "chat-template-fails", "if all fail alike, the template is named"


def test_a_template_that_cannot_be_compiled_or_chosen_is_named(tmp_path: Path) -> None:
    table = rows(tmp_path / "c.jsonl", messages("Hi", "a"), messages("odd", "b"))
    deep = "{% if true %}" * 3000 + "{% endif %}" * 3000
    for template in ("{% for m in", deep, {"tool_use": CHAT, "rag": CHAT}):
        with pytest.raises(DataError) as caught:
            scanned(table, reader(template))
        assert caught.value.code == "chat-template-fails"
    assert len(scanned(table, reader({"default": CHAT})).samples) == 2, "the control"


def test_a_panic_of_the_tokenizer_sets_its_row_aside(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    hostile = pre_tokenizers.Split(Regex(r"(x+x+)+y"), "isolated")
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([hostile, backend.pre_tokenizer])
    table = rows(tmp_path / "c.jsonl", messages("Hi", "a"), messages("x" * 30, "b"), {"text": "x" * 30})
    found = scanned(table, reader(tokenizer=tokenizer))
    assert [problem.where for problem in found.set_aside] == [f"{table}:2", f"{table}:3"]
    assert all("PanicException" in problem.what for problem in found.set_aside)
    with pytest.raises(DataError) as caught:
        scanned(rows(table, {"text": "x" * 30}), reader(tokenizer=tokenizer))
    assert caught.value.code == "tokenizer-fails"


def test_the_edge_lets_through_what_is_not_of_a_row() -> None:
    for error in (KeyboardInterrupt(), SystemExit(), StorageError("x", "y"), UnusableText("a", "b")):
        with pytest.raises(type(error)) as caught, row_edge("It failed", "Repair it."):
            raise error
        assert caught.value is error
    with pytest.raises(UnusableText, match="It failed: KeyError: 'x'."), row_edge("It failed", "Repair it."):
        raise KeyError("x")


def test_values_that_are_no_json_become_text(tmp_path: Path) -> None:
    values = [date(2026, 1, 2), datetime(2026, 1, 2, tzinfo=UTC), Decimal("1.50"), b"\xffa"]
    template = CHAT.replace("{{ m.content }}", "{{ m.content }}{{ m.when }}")
    for number, (value, text) in enumerate(
        zip(values, ("2026-01-02", "2026-01-02T00:00:00", "1.50", "\\xffa"), strict=True)
    ):
        table = tmp_path / str(number)
        chats = [{**each, "when": value} for each in chat("Hi", "a").messages]
        datasets.Dataset.from_list([{"messages": chats}]).save_to_disk(str(table))
        found, data = reader(template), DataSection(sources=(DataSource(dataset=str(table)),))
        (sample,) = scan_texts(data, parts=found.parts).samples
        assert text in found.shown(resolved(sample.caption, data.resolved_sources()[0]))


def test_an_answer_at_the_front_is_trained_on() -> None:
    greeting = chat("Welcome", "Hi", "Bye", begin="assistant")
    needs_first = "{% if messages[0].role == 'x' %}{% endif %}{{ messages[0].role + '' and '' }}" + CHAT
    for template in (CHAT, needs_first):
        found = reader(template)
        (part,) = found.parts(written(greeting))
        assert trained(found, part) == [f"Welcome{END}", f"Bye{END}"]
    alternates = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + CHAT
    with pytest.raises(UnusableText, match="user first"):
        reader(alternates).parts(written(greeting))


def test_one_answer_without_thoughts_sets_its_row_aside(tmp_path: Path) -> None:
    wants = CHAT.replace("assistant\n{% endif", f"assistant\n{THINK}{{% endif")
    table = rows(tmp_path / "c.jsonl", messages("Hi", f"{THINK}a</think>b"), messages("Hi", "b"))
    found = scanned(table, reader(wants))
    assert len(found.samples) == 1 and [each.where for each in found.set_aside] == [f"{table}:2"]
    with pytest.raises(DataError) as caught:
        scanned(rows(table, messages("Hi", "b")), reader(wants))
    assert caught.value.code == "chat-template-unfit"


def test_answers_that_do_not_fit_are_left_out_and_the_others_keep_their_numbers(tmp_path: Path) -> None:
    contents = [text for n in range(6) for text in (f"q{n}", f"{THINK}t</think>" + "a" * (90 if n == 1 else 9))]
    table = rows(tmp_path / "c.jsonl", messages(*contents), messages("Hi", "a"))
    found = reader(STRIPPING, 200)
    samples = scanned(table, found).samples
    keys = [sample.key for sample in samples]
    assert keys[0] == "c.jsonl:1#0" and keys[-1] == "c.jsonl:2" and 1 < len(keys) < 7
    (source,) = DataSection(sources=(DataSource(dataset=str(table)),)).resolved_sources()
    for sample in samples:
        assert found.num_tokens(resolved(sample.caption, source)) <= 200
    left_out = 7 - len(keys)
    assert any(notice.startswith(f"{left_out} answer") for notice in found.notices)
    with pytest.raises(UnusableText, match="begins after"):
        reader(STRIPPING, 10).parts(written(chat(*contents)))
    assert None not in reader(STRIPPING, 4096).parts(written(chat(*contents))), "the control"


SPELLED = f"x{END}\n{START}assistant\n"


def ids_of(found: ChatTokenizer, record: Conversation) -> list[int]:
    return list(found.tokens(record).ids)


@pytest.mark.parametrize("place", ["description", "name", "key", "enum", "argument", "argument key", "call", "field"])
@pytest.mark.parametrize(
    "how", ["{{ %s | tojson }}", "{{ %s | tojson(ensure_ascii=true) }}", "{{ %s | string | trim }}"]
)
def test_special_tokens_in_any_string_of_the_data_are_text(place: str, how: str) -> None:
    def record(text: str) -> Conversation:
        here = dict.fromkeys(("description", "name", "key", "enum", "argument", "argument key", "call", "field"), "w")
        here[place] = text
        schema = {"properties": {here["key"]: {"enum": [1, [here["enum"]]]}}}
        tool = {"function": {"name": here["name"], "description": here["description"], "parameters": schema}}
        call = {"function": {"name": here["call"], "arguments": {here["argument key"]: [here["argument"]]}}}
        asked = {"role": "user", "content": "Hi", "extra": here["field"]}
        return Conversation((asked, {"role": "assistant", "content": "a", "tool_calls": [call]}), (tool,))

    template = (
        (how % "tools")
        + "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
        + (how % "m")
        + ("<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}")
    )
    found = reader(template)
    start, end = (found.tokenizer.convert_tokens_to_ids(token) for token in (START, END))
    ids, plain = ids_of(found, record(SPELLED)), ids_of(found, record("w"))
    assert ids.count(start) == plain.count(start) == 2 and ids.count(end) == plain.count(end) == 2

    def rendered(chat: Conversation) -> Any:
        return found.tokenizer.apply_chat_template(list(chat.messages), tools=list(chat.tools), tokenize=False)

    given = rendered(with_arguments(record(SPELLED), rendered))
    assert found.tokenizer.decode(ids) == given, "nothing else is changed"


def test_two_strings_of_the_data_do_not_make_a_token_together() -> None:
    template = CHAT.replace("{{ m.content }}", "{{ m.content }}{{ m.name }}")
    begun = [{"role": "user", "content": "a<|sta", "name": "rt|>b"}, {"role": "assistant", "content": "c", "name": ""}]
    found = reader(template)
    start = found.tokenizer.convert_tokens_to_ids(START)
    assert ids_of(found, Conversation(tuple(begun))).count(start) == 2
    alone = [{**begun[0], "name": "b"}, begun[1]]
    assert "a<|stab" in found.tokenizer.decode(ids_of(found, Conversation(tuple(alone))))


def test_a_template_that_changes_broken_tokens_sets_the_row_aside() -> None:
    counts = CHAT.replace("{{ m.content }}", "{{ m.content | length }}{{ m.content }}")
    with pytest.raises(UnusableText, check=saying("families/spells-out-special-tokens")):
        reader(counts).parts(written(chat(f"a{END}", "b")))
    assert reader(counts).parts(written(chat("a", "b"))), "the control"


def test_a_text_that_brings_its_own_ends_gets_no_second_ones() -> None:
    tokenizer = tiny_tokenizer(CHAT)
    tokenizer.add_special_tokens({"bos_token": AddedToken("<s>", special=True), "eos_token": "</s>"})
    bos, eos, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<s>", "</s>", END))
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    found = reader(CHAT, tokenizer=tokenizer)
    for text, ends in (("<s>ab</s>\n", eos), ("<s>ab</s>", eos), (f"ab{END} \n", end)):
        ids = found.tokens(text).ids
        assert ids[0] == bos and ids.count(bos) == 1 and ids.count(eos) + ids.count(end) == 1 and ends in ids
        found.parts(text)
    ids = found.tokens(Completion("<s>a", "b</s> ")).ids
    assert (ids.count(bos), ids.count(eos)) == (1, 1)
    assert says(found.notices[0], "families/3-texts-begin-or-end")
    plain = reader(CHAT, tokenizer=tokenizer)
    plain.parts("ab")
    assert plain.tokens("ab").ids[0] == bos and plain.tokens("ab").ids[-1] == eos and not plain.notices
    both = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", bos), ("</s>", eos)])
    tokenizer.backend_tokenizer.post_processor = both
    assert reader(CHAT, tokenizer=tokenizer).tokens("ab</s>\n").ids.count(eos) == 1


HOSTILE = {
    "doubling": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "adding": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "nesting": "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "dicts": "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = {1: n.x, 2: n.x} %}"
    "{% endfor %}{{ n.x }}",
    "blocks": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set t %}{{ n.x }}{{ n.x }}{% endset %}"
    "{% set n.x = t %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "power": "{{ 2 ** 9999999999 }}",
    "percent": "{{ '%4000000000d' % 1 }}",
    "star": "{{ '%*d' % (4000000000, 1) }}",
    "format": "{{ '{:>{}}'.format(1, 4000000000) }}",
    "mapping": "{{ '{a:>{b}}'.format_map({'a': 1, 'b': 4000000000}) }}",
    "filter": "{{ 'a' | center(4000000000) }}",
    "method": "{{ 'a'.zfill(4000000000) }}",
    "replace": "{{ ('a' * 3000000).replace('', 'b' * 3000000) }}",
    "join": "{{ range(90000) | join('a' * 1000000) }}",
    "tojson": "{{ [1] | tojson(indent=4000000000) }}",
    "bytes": "{{ (5).to_bytes(4000000000, 'big') | length }}",
    "batch": "{{ [1] | batch(4000000000, 'x') | list | length }}",
    "static": "{% set q %}{% for i in range(99999) %}" + "x" * 10000 + "{% endfor %}{% endset %}",
    "recursive": "{% for i in range(9) recursive %}{{ loop(range(99999)) }}{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_templates_have_limits_of_time_and_memory(name: str) -> None:
    began = time.process_time()
    with pytest.raises(SharedCause, match="OverLimit|int too large|RecursionError") as caught:
        reader(HOSTILE[name] + CHAT).parts(written(chat("Hi", "a")))
    assert caught.value.of_all.code == "chat-template-fails"
    assert time.process_time() - began < 30


def test_a_template_over_its_limits_for_most_rows_ends_the_search(tmp_path: Path) -> None:
    table = rows(tmp_path / "c.jsonl", *[messages(f"{n}", "a") for n in range(500)])
    seen = list[str]()
    found = reader("{{ 'a' * 4000000000 }}" + CHAT)
    parts = found.parts
    found.parts = lambda text: seen.append(text) or parts(text)  # type: ignore[method-assign,func-returns-value]
    with pytest.raises(DataError) as caught:
        scanned(table, found)
    assert caught.value.code == "chat-template-fails" and len(seen) < 20


ORDINARY = {
    "tags": "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}<|start|>{{ m.content | trim }}{% endif %}"
    "{% if loop.index > 50 %}{% break %}{% endif %}{{ loop.revindex ~ loop.last }}{% endfor %}",
    "namespace": "{% set ns = namespace(t='', l=[], n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.l = ns.l + [m.role] %}{% set ns.t = ns.t ~ ('A' * 3) + m['content'].replace('a', 'bb').strip() %}"
    "{% endfor %}{{ ns.t }}{{ ns.l[::-1] | join(', ') }}{{ '%05d' % ns.n }}{{ '{:>4}'.format(ns.n) }}{{ 7 % 4 }}",
    "macros": "{% macro f(x, y=2) %}{{ x | upper }}{% if caller %}{{ caller() }}{% endif %}{% endmacro %}"
    "{% for m in messages recursive %}{{ f(m.content) }}{% call f('q') %}in{% endcall %}{% endfor %}"
    "{% filter upper %}text{% endfilter %}{{ dict(a=1, b=[2, none]) }}{{ {'k': (1, 2)}.items() | list }}",
    "json": "{{ tools | tojson(indent=4) }}{{ messages | map(attribute='role') | unique | list | tojson }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}"
    "{{ messages | length }}{{ (messages | last).content }}{{ '<b>' | e }}{{ 3 * 'ab' }}{{ 2 ** 8 }}",
    "undefined": "{{ nothing }}{{ messages[0].nothing is defined }}{{ nothing | default('d') }}{{ eos_token }}",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_the_limited_sandbox_writes_what_transformers_writes(name: str) -> None:
    tokenizer = tiny_tokenizer(ORDINARY[name])
    record = chat("ä a ", "b", "<c", "d\n")
    tools = [{"type": "function", "function": {"name": "w", "parameters": {"x": [1, None, True, 0.5, "é"]}}}]
    for asked in (False, True):
        wanted = tokenizer.apply_chat_template(
            list(record.messages), tools=tools, tokenize=False, add_generation_prompt=asked
        )
        assert ChatTemplate(tokenizer, "tiny").text(record.messages, tools, asked) == wanted


def test_long_conversations_take_time_with_their_length() -> None:
    def seconds(count: int, template: str, most: int) -> tuple[float, int, list[str | None]]:
        record = chat(*(f"message {n} " + "w " * (n % 7) for n in range(count)))
        found, began = reader(template, most), time.process_time()
        parts = list(found.parts(written(record)))
        return time.process_time() - began, len(found._template._compiled), parts

    short, _, _ = seconds(300, CHAT, 10**6)
    long, _, parts = seconds(3000, CHAT, 10**6)
    assert long < 40 * max(short, 0.05), "the square of ten is a hundred"
    found = reader(CHAT, 10**6)
    assert parts[0] is not None and len(trained(found, parts[0])) == 1500
    _, _, parts = seconds(3000, STRIPPING.replace("split('</think>')", "split(' ')"), 512)
    assert len(parts) == 1500 and parts[0] is not None and parts[-1] is None


def test_places_from_a_few_messages_are_those_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"tool_calls": [{"function": {"name": "w", "arguments": {"a": 1}}}]}
    turns: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": f"a{END}"}]
    for n in range(60):
        turns.append({"role": "assistant", "content": f"b{n} ", **(calls if n % 3 else {})})
        turns.append({"role": "tool" if n % 3 else "user", "content": "x" * (n % 5)})
    record = Conversation((*turns, {"role": "assistant", "content": "end"}), ({"name": "w"},))
    odd = TOOLS.replace(
        "{% endfor %}{% if add", "{% if loop.index is divisibleby 10 %}!{% endif %}{% endfor %}{% if add"
    )
    for template in (TOOLS, odd):
        quick = reader(template, 10**5).tokens(record)
        with monkeypatch.context() as patch:
            patch.setattr("lora_rocm.families.causal_lm.conversation.NUM_WHOLE", 10**6)
            assert quick == reader(template, 10**5).tokens(record)
    assert len(record.turns) > 3 * NUM_WHOLE


def test_very_many_special_tokens_are_looked_up() -> None:
    texts = [f"<|{n}|>" for n in range(200_000)] + ["#", "<|1|>more"]
    began, special = time.process_time(), SpecialTokens(texts)
    text = "a <|17|> < <|1|>more <|x|> # #\ue0f1" * 300
    found = [text[start:end] for start, end in special.spans(text, "\ue0f1")]
    assert found == ["<|17|>", "<|1|>more", "#"] * 300
    assert special.at_end("x<|199999|>") == "<|199999|>" and special.at_end("x<|200000|>") is None
    assert special.is_begun("a <|19") and not special.is_begun("a |19") and not special.is_begun("a<|17|>")
    assert special.broken("a<|17|>b", "!") == "a<!|17|>b"
    assert time.process_time() - began < 20


def test_a_normalizer_that_makes_texts_explode_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 100)] * 6)
    with pytest.raises(DataError) as caught:
        scanned(rows(tmp_path / "c.jsonl", messages("Hi", "a"), {"text": "a"}), reader(tokenizer=tokenizer))
    assert caught.value.code == "tokenizer-fails"
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("a", "bb")])
    assert reader(tokenizer=tokenizer).parts("aa"), "the control"
    assert growth_of(json.loads(normalizers.NFC().__getstate__())) == 3


def test_the_packaged_template_keeps_its_ids() -> None:
    """The control of all the above: an ordinary conversation has the ids of ``apply_chat_template``."""
    tokenizer = load_tokenizer(packaged("qwen3"))
    found = ChatTokenizer(tokenizer, 4096, "answers", "qwen3")
    record = chat("Hi <there", "Hello", "a<|im_end|>", "b")
    parts = [read(part) for part in found.parts(written(record)) if part]
    assert len(parts) == 2
    first = parts[0]
    assert isinstance(first, Conversation)
    wanted: Any = tokenizer.apply_chat_template(list(first.messages), tokenize=True, return_dict=False)
    assert list(found.tokens(first).ids) == list(wanted)
