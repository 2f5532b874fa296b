"""Recipes with texts of several lines and with comments in unusual places, for property tests."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

COMMENTS = st.sampled_from(["", "", " # why", "  # why: how"])
BETWEEN = st.sampled_from(["", "", "", "\n", "# a comment\n", "  # a comment\n", "\n\n# a comment\n\n"])
FOLLOWING = st.lists(
    st.sampled_from(["a text", "two # words", "- item", "", "  deeper", "# not a comment"]), max_size=4
)
INDICATORS = st.sampled_from([">", ">-", ">+", "|", "|-", "|2"])


def _block(indicator: str, comment: str, lines: Sequence[str]) -> str:
    return f" {indicator}{comment}\n" + "".join(f"    {line}\n" if line else "\n" for line in lines)


VALUES = st.one_of(
    st.builds("{}\n".format, COMMENTS),
    st.builds(" {}{}\n".format, st.sampled_from(["1", "a text", "'a: text'", "[x, y]", "{x: 1}", "null"]), COMMENTS),
    st.builds("{}\n    a text\n{}    and more\n".format, COMMENTS, st.sampled_from(["", "\n", "\n\n"])),
    st.builds(_block, INDICATORS, COMMENTS, FOLLOWING),
    st.builds(" 'one\n{}    two'{}\n".format, st.sampled_from(["", "\n"]), COMMENTS),
    st.builds(" [x,{}\n    y]{}\n".format, COMMENTS, COMMENTS),
    st.builds("{}\n    - one{}\n{}    -\n    - two\n".format, COMMENTS, COMMENTS, BETWEEN),
)
KEYS = st.lists(st.tuples(st.sampled_from("bkxy"), VALUES, BETWEEN), max_size=3, unique_by=lambda each: each[0])


def _recipe(sections: Sequence[tuple[str, str, Sequence[tuple[str, str, str]], str]]) -> str:
    lines = ""
    for name, comment, keys, after in sections:
        lines += f"{name}:{comment}\n" + "".join(f"  {key}:{value}{between}" for key, value, between in keys) + after
    return lines


def odd_recipes() -> st.SearchStrategy[str]:
    """Texts with sections that have such keys. Nearly all are YAML."""
    section = st.tuples(st.sampled_from("abc"), COMMENTS, KEYS, BETWEEN)
    return st.lists(section, max_size=3, unique_by=lambda each: each[0]).map(_recipe)
