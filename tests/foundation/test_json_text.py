"""JSON of users: the true reason why it cannot be used, and no key that is lost."""

from __future__ import annotations

import json

import pytest

from lora_rocm.foundation.json_text import BadJson, NoJson, parse_json

BAD: list[tuple[str | bytes, type[BadJson], str]] = [
    ("", NoJson, "Expecting value"),
    ('{"a": 1', NoJson, "column 8"),
    (b'{"a": "\xff"}', NoJson, "utf-8"),
    ("9" * 6000, BadJson, "too many digits"),
    ('{"a": [-' + "9" * 6000 + "]}", BadJson, "too many digits"),
    ("[" * 99_999, BadJson, "nested too deep"),
    ('{"a":' * 99_999, BadJson, "nested too deep"),
    ('{"a": 1, "b": 2, "a": 1}', BadJson, 'key "a" twice'),
    ('[{"a": {"\\u0062": 1, "b": 2}}]', BadJson, 'key "b" twice'),
    ('{"\\u001b[0m": 1, "\\u001b[0m": 2}', BadJson, r"\\x1b"),
]


@pytest.mark.parametrize(("text", "kind", "reason"), BAD, ids=lambda value: str(value)[:20])
def test_the_reason_is_the_true_one(text: str | bytes, kind: type[BadJson], reason: str) -> None:
    with pytest.raises(BadJson, match=reason) as caught:
        parse_json(text)
    assert type(caught.value) is kind and caught.value.sentence.endswith(".")
    assert ("not JSON" in str(caught.value)) == (kind is NoJson)


def test_all_other_json_is_read_as_python_reads_it() -> None:
    for text in ('{"a": [1, {"a": null}], "A": "9", "b": {"a": 1e9}}', "9" * 4000, "[" * 200 + "]" * 200, "NaN1"[:3]):
        assert repr(parse_json(text)) == repr(json.loads(text))
    assert parse_json('{"a": 1, "a": 2}', repeated_keys=True) == {"a": 2}
