"""Keyword arguments of calls in scripts and notebooks, read without running them."""

from __future__ import annotations

import json

import pytest

from lora_rocm.importing.formats.python_calls import call_settings
from lora_rocm.importing.setting import FileContent

SCRIPT = """\
rank = 16
model = FastModel.from_pretrained("a/b", max_seq_length=2048, load_in_4bit=True)
model = FastModel.get_peft_model(
    model,
    r=rank,
    target_modules=("q_proj", "v_proj"),
    lora_alpha=2 * rank,
)
other(r=1)
"""


def read(text: str, *functions: str) -> FileContent:
    return call_settings(text, "f.py", functions or ("from_pretrained", "get_peft_model"))


def test_arguments_with_their_lines() -> None:
    found = read(SCRIPT)
    assert [(setting.key, setting.value, setting.line) for setting in found.settings] == [
        ("from_pretrained[0]", "a/b", 2),
        ("from_pretrained.max_seq_length", 2048, 2),
        ("from_pretrained.load_in_4bit", True, 2),
        ("get_peft_model.r", 16, 5),
        ("get_peft_model.target_modules", ["q_proj", "v_proj"], 6),
    ]
    assert [part.line for part in found.unread] == [4, 7]


def test_a_notebook_is_read_without_its_magics() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["f(a=9)"]},
        {"cell_type": "code", "source": ["!pip install x\n", "%%capture\n", "f(a=1)"]},
    ]
    found = read(json.dumps({"cells": cells}), "f")
    assert [(setting.key, setting.value) for setting in found.settings] == [("f.a", 1)] and not found.unread


def test_a_name_with_two_values_is_computed() -> None:
    found = read("a = 1\na = 2\nf(b=a)\n", "f")
    assert not found.settings and len(found.unread) == 1


def test_a_secret_in_an_expression_is_not_shown() -> None:
    found = read("f(token='hf_abcdefghijklmnopqrstuvwxyz1234'.strip(), **more)\n", "f")
    assert not any("hf_" in part.why for part in found.unread) and len(found.unread) == 2


@pytest.mark.parametrize(
    "text", ["", "def f(:", "\x00", "(" * 300, '{"cells": 3}', "{", "f(a=b'x')", "f(a=" + "-" * 5000 + "1)"]
)
def test_no_text_is_an_error(text: str) -> None:
    assert isinstance(read(text, "f"), FileContent)
