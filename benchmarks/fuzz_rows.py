"""Fuzz target for rows of texts: each is trained on or set aside by name, with whatever template and tokenizer.

A case is a table of a few rows, a chat template and a tokenizer, all from one seed.
"""

from __future__ import annotations

import json
import random
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from benchmarks.fuzz_inputs import Refused
from benchmarks.mutations import changed
from lora_rocm.errors import DataError

ROWS = 4
PANICS = "x" * 40
"""A text on which the tokenizer of ``_tokenizer`` panics, if it has a hostile expression."""
CHAT = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
    "{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
IF = "{% if 'odd' in messages[0].content %}"
TEMPLATES: tuple[str | None, ...] = (
    None,
    CHAT,
    CHAT,
    "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT,
    "{% if tools %}{% for t in tools %}{{ t.function.name }}{{ t | tojson(indent=2) }}{% endfor %}{% endif %}" + CHAT,
    CHAT.replace("{{ m.content }}", "{{ (m | tojson(ensure_ascii=true)) if loop.last else m.content | trim | title }}"),
    CHAT.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"),
    CHAT.replace("assistant\n{% endif", "assistant\n<think>{% endif"),
    IF + "{{ 1 // 0 }}{% endif %}" + CHAT,
    IF + "{{ 2.0 ** 5000 }}{% endif %}" + CHAT,
    IF + "{{ messages.nothing.at_all }}{% endif %}" + CHAT,
    IF + "{{ '\ud800' }}{% endif %}" + CHAT,
    IF + "{{ raise_exception('no') }}{% endif %}" + CHAT,
    IF + "{{ 'a' * 4000000000 }}{% endif %}" + CHAT,
    IF + "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}{% endif %}" + CHAT,
    IF + "{{ 'x'.join(messages) }}{% endif %}" + CHAT,
    IF + "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}" + CHAT,
    "{{ messages[0].content | attr('__class__') }}" + CHAT,
    "{% for m in messages %}{{ m.content",
    "".join("{% if true %}" for _ in range(300)),
    "",
)
TEXTS = (
    *(
        "Hi",
        "odd",
        " ",
        "",
        "\0",
        "ä😀",
        "a<|end|>\n<|start|>assistant\nb",
        "<|sta",
        "rt|>",
        "\ue0f1\ue0f2\ue0f3\ue0f4",
    ),
    *("\ud83d", "<think>a</think>b", "x" * 3000, PANICS, "\x1e", "\x1e@[1]", "  a  ", "<|end|>", "a\r\nb\u2028"),
)
VALUES = (
    *(None, True, 7, -0.5, 10**30, float("nan"), float("inf"), [], {}, [[]], {"a": None}, {"": 1}, "{}", "[", b"\xff"),
    *(date(2026, 1, 2), datetime(2026, 1, 2, tzinfo=UTC), Decimal("1.5"), (1, 2)),
)
COLUMNS = ("messages", "conversations", "prompt", "completion", "instruction", "output", "text", "chosen", "rejected")


def case(rng: random.Random) -> bytes:
    """Return the seed of a case."""
    return str(rng.getrandbits(60)).encode("ascii")


def _text(rng: random.Random) -> str:
    texts = TEXTS if rng.random() < 0.4 else ("Hi", "odd", "a b", "ä😀")
    return "".join(rng.choice(texts) for _ in range(rng.choice((1, 1, 1, 2, 3))))


def _value(rng: random.Random) -> Any:
    if rng.random() < 0.05:
        deep: Any = "x"
        for _ in range(rng.choice((10, 300, 900))):
            deep = [deep]
        return deep
    return rng.choice(VALUES) if rng.random() < 0.6 else _text(rng)


def _message(rng: random.Random, role: str) -> dict[str, Any]:
    found: dict[str, Any] = {"role": role, "content": _text(rng)}
    if rng.random() < 0.02:
        found["content"] = rng.choice((None, 3, ["a"], [{"type": "text", "text": _text(rng)}], [{"type": "image"}]))
    if rng.random() < 0.1:
        arguments = {_text(rng): _value(rng)}
        found["tool_calls"] = [{"type": "function", "function": {"name": _text(rng), "arguments": arguments}}]
    if rng.random() < 0.1:
        found[rng.choice(("name", "reasoning_content", "weight", "when", "<|end|>"))] = _value(rng)
    return found


def row(rng: random.Random) -> dict[str, Any]:
    """Return a row that is good or nearly so."""
    roles = ["user", "assistant"] * rng.choice((1, 1, 2, 3, 20))
    roles = rng.choice(
        (roles, roles, roles, ["system", *roles], roles[1:], roles[:-1], ["assistant"], ["tool", *roles])
    )
    chat = [_message(rng, role) for role in roles]
    found: dict[str, Any] = rng.choice(
        (
            {"messages": chat},
            {"messages": chat, "tools": [{"type": "function", "function": {"name": "w", "description": _text(rng)}}]},
            {"conversations": [{"from": each["role"], "value": each["content"]} for each in chat]},
            {"prompt": _text(rng), "completion": _text(rng)},
            {"text": _text(rng)},
            {"prompt": chat[:1], "chosen": [_message(rng, "assistant")], "rejected": [_message(rng, "assistant")]},
        )
    )
    if rng.random() < 0.2:
        found[rng.choice((*COLUMNS, *["tools", "system", "more"] * 4))] = _value(rng)
    if rng.random() < 0.1:
        with suppress(RecursionError):  # of the copy
            other = changed(rng, found)
            found = other if isinstance(other, dict) else {"messages": other}
    return found


def _tokenizer(rng: random.Random) -> Any:
    """A tokenizer, sometimes a hostile one."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    from tests.tiny_llm import tiny_tokenizer

    found = tiny_tokenizer(rng.choice(TEMPLATES if rng.random() < 0.7 else TEMPLATES[1:7]))
    kind, backend = rng.random(), found.backend_tokenizer
    if kind < 0.15:
        hostile = pre_tokenizers.Split(Regex(r"(x+x+)+y"), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([hostile, backend.pre_tokenizer])
    elif kind < 0.2:
        backend.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 100)] * 6)
    elif kind < 0.22:
        found.chat_template = {"tool_use": CHAT, "other": CHAT}
    return found


def _written(rng: random.Random, rows: list[dict[str, Any]], folder: Path) -> Path:
    """The rows as a table: JSON Lines, or an Arrow table where they have one type."""
    if rng.random() < 0.3:
        import datasets
        import pyarrow

        datasets.disable_progress_bars()
        extra = rng.choice(VALUES)
        chats = [[{**m, "when": extra} for m in each] for each in _plain_chats(rows)]
        try:
            table = pyarrow.Table.from_pylist([{"messages": each} for each in chats])
        except (pyarrow.ArrowException, UnicodeEncodeError, TypeError, ValueError, OverflowError):
            pass
        else:
            datasets.Dataset(table).save_to_disk(str(folder / "saved"))
            return folder / "saved"
    path = folder / "rows.jsonl"
    with path.open("w", encoding="ascii") as file:
        for each in rows:
            try:
                file.write(json.dumps(each, default=str) + "\n")
            except (RecursionError, ValueError, TypeError):
                file.write('{"messages": ' + "[" * 3000 + "]" * 3000 + "}\n")
    return path


def _plain_chats(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    good = [{"role": "user", "content": "odd"}, {"role": "assistant", "content": "a"}]
    chats = [each.get("messages") for each in rows]
    return [
        [{"role": m["role"], "content": m["content"] if isinstance(m["content"], str) else "b"} for m in chat]
        if isinstance(chat, list)
        and chat
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in chat)
        else good
        for chat in chats
    ]


def read_rows(path: Path) -> None:
    """Find the rows as ``check`` and a run do, and encode what is used. The counts have to add up."""
    import shutil

    from lora_rocm.dataset.rows.records import read
    from lora_rocm.dataset.rows.row_reference import resolved
    from lora_rocm.dataset.sources.text_scan import scan_texts
    from lora_rocm.families.causal_lm.chat import ChatTokenizer
    from lora_rocm.families.causal_lm.family import TokensEncoder, _encoded_pair, _filled
    from lora_rocm.recipe.schema import DataSection, DataSource

    assert TokensEncoder.entry, "the encoder of these rows"
    rng = random.Random(path.read_bytes())
    folder = path.parent / "table"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    rows = [row(rng) for _ in range(ROWS)]
    table, tokenizer = _written(rng, rows, folder), _tokenizer(rng)
    from lora_rocm.dataset.rows import hf_datasets

    hf_datasets.opened.cache_clear()
    pairs = any("chosen" in each for each in rows) and rng.random() < 0.5
    data = DataSection(sources=(DataSource(dataset=str(table)),))
    reader = ChatTokenizer(tokenizer, rng.choice((64, 512)), rng.choice(("answers", "last-turn", "all")), "tiny", pairs)
    try:
        found = scan_texts(data, parts=reader.parts, pairs=pairs)
    except DataError as error:
        assert error.code in KNOWN and error.what and error.where and error.fix, error.code
        raise Refused(str(error)) from None
    used = {sample.key.partition("#")[0] for sample in found.samples}
    assert len(used) + len(found.set_aside) == ROWS, "a row is neither used nor set aside"
    assert all(problem.where and problem.what and problem.fix for problem in found.set_aside)
    (source,) = data.resolved_sources()
    for sample in found.samples:
        text = resolved(sample.caption, source)
        reader.num_tokens(text)
        tensors = _encoded_pair(reader, text) if pairs else _filled([reader.tokens(read(text))], 0)
        assert (tensors["labels"] >= 0).any(), "a sample without anything to train on"
        reader.shown(text)


KNOWN = frozenset(
    {
        *("no-usable-texts", "dataset-unreadable", "dataset-empty", "tokenizer-fails"),
        *("chat-template-missing", "chat-template-unfit", "chat-template-fails"),
    }
)
"""Codes of errors for a whole table."""
