"""The wording of messages is in ``golden/wording.json`` alone, and all of it is asserted.

Prose is wording if the program has it in a string, three words in a row, and the test did not write it itself. So
captions, prompts and recipes of tests are data and stay where they are.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from lora_rocm.errors import Problem
from tests import wording
from tests.source_nodes import every_node
from tests.wording import FILE, mentions, phrase, says, says_if, worded

TESTS = Path(__file__).parent
PROGRAM = TESTS.parent / "lora_rocm"
ALLOWED = {"encoded_cache/test_item_table.py": "the words of a record that a resume compares"}
"""Files of tests that may compare with prose, and why."""
HOW = "Put the phrase into tests/golden/wording.json and assert says(text, key): see tests/wording.py."


def words_of(text: str) -> list[str]:
    """Words in lower case; a name with dots, such as a key of the recipe, is one."""
    return [word.rstrip(".'-") for word in re.findall(r"[^\W\d_][\w.'-]*", text.lower())]


def plain_prose(text: str) -> bool:
    """Three words or more, numbers and values included."""
    return len(text.split()) >= 3 and len(words_of(text)) >= 2


def constant(node: ast.AST) -> str | None:
    """The text of a string or an f-string; its values count as a gap."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


@cache
def runs_of_the_program() -> frozenset[tuple[str, ...]]:
    """All runs of two and three words in strings of the program."""
    runs: set[tuple[str, ...]] = set()
    for path in PROGRAM.rglob("*.py"):
        documentation: set[int] = set()
        for node in every_node(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Expr):
                documentation.add(id(node.value))
            text = constant(node) if id(node) not in documentation else None
            words = words_of(text.replace("{}", " ")) if text and " " in text else []
            for length in (2, 3):
                runs.update(zip(*(words[start:] for start in range(length)), strict=False))
    return frozenset(runs)


def prose_of_product(text: str) -> bool:
    """Whether a text is prose that the program has in a string."""
    words = words_of(text.replace("{}", " "))
    length = min(3, len(words))
    runs = zip(*(words[start:] for start in range(length)), strict=False)
    return plain_prose(text) and length >= 2 and any(run in runs_of_the_program() for run in runs)


EXPECTED = ("match", "check")
TEXT_METHODS = {"startswith", "endswith", "count", "index", "find", "split", "partition", "rpartition", "replace"}
PATTERNS = {"search", "match", "fullmatch", "findall"}
PLAIN_CALLS = {"all", "any", "bool", "len", "list", "next", "set", "sorted", "sum", "tuple"}
ASSERTING = {"says", "says_if", "saying", "holds"}
FIRST_KEY = {"says": 1, "says_if": 2, "mentions": 1, "phrase": 0, "saying": 0, "worded": 0}


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def given_texts(tree: ast.AST) -> list[str]:
    """All texts of a test file that are not expectations: their return is an echo, not a message.

    Expectations are in asserts, in ``match``, and in plain cells of the tables of ``parametrize``.
    """
    given: list[str] = []

    def visit(node: ast.AST, expected: bool) -> None:
        if isinstance(node, ast.Assert) or (isinstance(node, ast.keyword) and node.arg in EXPECTED):
            return
        if isinstance(node, ast.Call) and called(node) != "param":
            expected = called(node) == "parametrize"
        text = None if expected else constant(node)
        if text and " " in text:
            given.append(text)
        for child in ast.iter_child_nodes(node):
            visit(child, expected)

    visit(tree, False)
    return given


def allowed_file(path: Path) -> bool:
    return path.relative_to(TESTS).as_posix() in ALLOWED or path.name in ("wording.py", "test_wording.py")


def expectations(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each operand in an expression's comparison. Arguments of other calls are input."""
    text = constant(node)
    if text is not None:
        yield node.lineno, text  # type: ignore[attr-defined]
        return
    parts: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.Call):
        name = called(node)
        is_method = isinstance(node.func, ast.Attribute)
        compares = name in TEXT_METHODS | PATTERNS if is_method else name in PLAIN_CALLS
        arguments = node.args[:1] if is_method and name in PATTERNS else node.args
        parts = [node.func, *(arguments if compares else [])]
    elif isinstance(node, ast.Subscript):
        parts = [node.value]
    elif isinstance(node, ast.Dict):
        parts = node.values
    for part in parts:
        yield from expectations(part)


@dataclass
class Read:
    """The wording used by a test file: line and text, or line and key."""

    frozen: list[tuple[int, str]] = field(default_factory=list)
    keys: list[tuple[int, str]] = field(default_factory=list)
    named: set[str] = field(default_factory=set)
    asserted: set[str] = field(default_factory=set)
    denied: list[int] = field(default_factory=list)


def read(source: str) -> Read:
    """Parse a test file once."""
    found, tree = Read(), ast.parse(source)
    uses_keys = "tests.wording import" in source
    ours = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "tests.wording"
        for alias in node.names
    }
    only_denied: set[int] = set()
    for node in every_node(tree):
        if isinstance(node, ast.Assert):
            found.frozen += [row for row in expectations(node.test) if prose_of_product(row[1])]
        elif isinstance(node, ast.keyword) and node.arg == "match" and (text := constant(node.value)) is not None:
            found.frozen += [(node.value.lineno, text)] if prose_of_product(re.sub(r"\\(.)", r"\1", text)) else []
        elif uses_keys and isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = [call for call in ast.walk(node) if isinstance(call, ast.Call) and called(call) in ours]
            found.denied += [node.lineno for call in inner if called(call) in ASSERTING]
            if isinstance(node.operand, ast.Call) and called(node.operand) == "mentions":
                only_denied.update(map(id, node.operand.args))
        elif uses_keys and isinstance(node, ast.Call) and called(node) in ours & FIRST_KEY.keys():
            keys = [constant(argument) for argument in node.args[FIRST_KEY[called(node)] :]]
            found.keys += [(node.lineno, key) for key in keys if key is not None]
        elif uses_keys and isinstance(node, ast.Constant) and isinstance(node.value, str) and "/" in node.value:
            found.named.add(node.value)
            if id(node) not in only_denied:  # the walk meets what is around a constant first
                found.asserted.add(node.value)
    given = given_texts(tree) if found.frozen else []
    found.frozen = [(line, text) for line, text in found.frozen if not any(text.strip() in each for each in given)]
    return found


@cache
def files_of_tests() -> dict[str, Read]:
    return {
        path.relative_to(TESTS).as_posix(): read(path.read_text(encoding="utf-8"))
        for path in sorted(TESTS.rglob("*.py"))
        if path.name not in ("wording.py", "test_wording.py")
    }


def test_no_test_compares_with_wording() -> None:
    found = files_of_tests()
    new = [
        f"tests/{name}:{line}: {text!r}"
        for name, file in found.items()
        for line, text in file.frozen
        if name not in ALLOWED
    ]
    assert not new, "\n".join([*new, HOW])
    gone = [name for name in ALLOWED if name not in found or not found[name].frozen]
    assert not gone, f"{gone} compare with no prose: remove them from ALLOWED"


def test_each_phrase_is_asserted_somewhere() -> None:
    """A phrase that tests only deny could be worded in any style, and its test would still pass."""
    phrases = json.loads(FILE.read_text(encoding="utf-8")).keys()
    unused = phrases - set().union(*(file.named for file in files_of_tests().values()))
    assert not unused, f"{sorted(unused)} are in no test: remove them"
    only_denied = phrases - set().union(*(file.asserted for file in files_of_tests().values()))
    assert not only_denied, f"{sorted(only_denied)} are only denied: assert says(...) of the same phrase somewhere"


def test_keys_are_known_and_only_mentions_is_denied() -> None:
    phrases = json.loads(FILE.read_text(encoding="utf-8"))
    unknown = {
        f"tests/{name}:{line}": key
        for name, file in files_of_tests().items()
        for line, key in file.keys
        if key not in phrases
    }
    assert not unknown, f"{unknown}: not in {FILE.name}"
    denied = [f"tests/{name}:{line}" for name, file in files_of_tests().items() for line in file.denied]
    assert not denied, f"{denied}: write not mentions(...); what says(...) does not find, a run that renews rewrites"


def test_the_file_is_as_it_is_written() -> None:
    content = FILE.read_bytes()
    phrases = json.loads(content)
    assert content == wording.file_content(phrases)
    assert all(re.fullmatch(r"[a-z0-9_]+/[a-z0-9-]+", key) for key in phrases)


# the check of the sources


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('assert "there is no such key" in str(error.value)', True),
        ('assert x and not any("there is no such key" in one for one in notices)', True),
        ('assert [one.what for one in found] == ["there is no such key"]', True),
        ('assert text.startswith(f"there is no such {thing} here")', True),
        ('with pytest.raises(UserError, match="there is no such key"): f()', True),
        ('assert says(error, "recipe/there-is-no-such-key")', False),
        ('assert code == "no-such-key" and "lora.rank" in where, "there is no such key"', False),
        ('assert caption("there is no such key") == "x"', False),
        ('assert "purple elephants dancing tango" in text', False),
        ('give("Oh, there is no such key!")\n    assert "there is no such key" in text', False),
    ],
)
def test_wording_in_a_comparison_is_found(line: str, found: bool) -> None:
    assert bool(read(f"def test_it():\n    {line}\n").frozen) == found


def test_a_denied_assertion_and_a_key_that_is_only_denied_are_found() -> None:
    head = "from tests.wording import holds, mentions, says\n"
    assert read(head + 'assert not says(text, "a/b")').denied == [2]
    assert read(head + "assert not (x or holds(text, words))").denied == [2]
    assert read("assert not holds(path, content)").denied == [], "another function of this name"
    file = read(head + 'assert says(text, "a/b") and not mentions(text, "a/c") and mentions(text, "a/d")')
    assert file.denied == [] and file.named == {"a/b", "a/c", "a/d"} and file.asserted == {"a/b", "a/d"}
    assert sorted(file.keys) == [(2, "a/b"), (2, "a/c"), (2, "a/d")]


# the mechanism


@pytest.fixture
def phrases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A separate file, which may be rewritten."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.delenv("LORA_ROCM_UPDATE_GOLDEN", raising=False)
    found = {"a/none": "no images found in {path}", "a/braces": "{{a: {number}}}", "a/whole": "The disk is full."}
    monkeypatch.setattr(wording, "FILE", tmp_path / "wording.json")
    monkeypatch.setattr(wording, "_phrases", lambda: found)
    monkeypatch.setattr(wording, "_renewed_keys", set())
    return found


OLD = "where: x\nThere were no images found in pics/a. Put some there."
NEW = "where: x\nThe folder pics/a holds no images. Put some there."


def test_a_phrase_is_found_with_its_values(phrases: dict[str, str]) -> None:
    assert says(OLD, "a/none", path="pics/a") and says(["", OLD], "a/none", path=Path("pics/a"))
    assert says(ValueError(OLD), "a/none", path="pics/a") and says([Problem("x", OLD)], "a/none", path="pics/a")
    assert wording.saying("a/none", path="pics/a")(ValueError(OLD))
    for other in (NEW, OLD.replace("pics/a", "pics/b"), "", []):
        answer = wording.says(other, "a/none", path="pics/a")
        assert answer.found is False and mentions(other, "a/none", path="pics/a").found is False
        assert says_if(False, other, "a/none", path="pics/a") and not says_if(True, other, "a/none", path="pics/a")
    assert phrase("a/braces", number=3) == "{a: 3}" and wording.holds("{a: 3}", worded("a/braces", number=3))
    assert wording.holds("lora.rank", "rank") and not wording.holds("lora.rank", "alpha")
    assert not wording.FILE.exists(), "nothing is rewritten unless that is asked for"


def test_a_whole_text_is_compared_in_any_place(phrases: dict[str, str]) -> None:
    assert ["The disk is full.", 1] == [worded("a/whole"), 1] and {"x": "The disk is full."} == {"x": worded("a/whole")}
    assert "The disk is full. " != worded("a/whole") and ("x",) != (worded("a/whole"),)
    with pytest.raises(TypeError):
        hash(worded("a/whole"))


@pytest.mark.parametrize("values", [{}, {"file": "x"}, {"path": "x", "file": "y"}])
def test_values_that_a_phrase_does_not_have_are_refused(phrases: dict[str, str], values: dict[str, str]) -> None:
    with pytest.raises(AssertionError):
        says(OLD, "a/none", **values)
    with pytest.raises(KeyError):
        says(OLD, "a/unknown")


def test_a_new_wording_is_put_into_the_file(phrases: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_ROCM_UPDATE_GOLDEN", "1")
    assert says(NEW, "a/none", path="pics/a")
    assert json.loads(wording.FILE.read_text(encoding="utf-8")) == phrases
    assert phrases["a/none"].count("{path}") == 1 and phrases["a/none"].format(path="pics/a") in NEW
    assert says(NEW.replace("pics/a", "b"), "a/none", path="b"), "the value is a placeholder again"
    assert ["The disk is full!"] == [worded("a/whole")] and phrases["a/whole"] == "The disk is full!"
    assert says("so: [a = 4]", "a/braces", number=4) and phrases["a/braces"] == "[a = {number}]"


def test_what_is_not_alike_or_has_lost_its_value_stays(
    phrases: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_ROCM_UPDATE_GOLDEN", "1")
    before = dict(phrases)
    assert says("Loss was not finite in pics/a.", "a/none", path="pics/a").found is False
    assert says(NEW.replace("pics/a", "it"), "a/none", path="pics/a").found is False
    assert mentions(NEW, "a/none", path="pics/a").found is False, "a question never renews"
    assert "The disk is full!" != worded("a/whole")
    assert phrases == before and not wording.FILE.exists()


def test_two_wordings_of_one_key_are_not_both_taken(phrases: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_ROCM_UPDATE_GOLDEN", "1")
    assert says(NEW, "a/none", path="pics/a")
    assert says(NEW.replace("holds no", "is without"), "a/none", path="pics/a").found is False


def test_only_one_process_may_renew(phrases: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_ROCM_UPDATE_GOLDEN", "1")
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    with pytest.raises(AssertionError):
        says(NEW, "a/none", path="pics/a")
