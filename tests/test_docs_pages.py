"""The pages of the documentation: current, readable, and true to the program."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lora_rocm.commands.check import check
from lora_rocm.recipe.kinds import every_kind
from lora_rocm.recipe.reference import json_schema
from scripts import docs_errors
from scripts.docs_commands import commands
from scripts.docs_pages import DOCS, writers

LONG_PAGES = ("reference/", "lab/")
"""Folders with pages of any length and with sentences from the program or a journal."""
CODE_BLOCK = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
MAX_WORDS, MAX_SENTENCE_WORDS = 2000, 30
GENERATED = writers()
PROSE = sorted(
    path.relative_to(DOCS).as_posix()
    for path in DOCS.rglob("*.md")
    if not path.relative_to(DOCS).as_posix().startswith("lab/")
)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_current(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == GENERATED[name](), "run python -m scripts.docs_pages"


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def without_code(text: str) -> str:
    """A page without front matter, code blocks and tables; code in a line is one word, a link is its text."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = CODE_BLOCK.sub("", text)
    text = re.sub(r"^(    .*|\|.*|<!--.*)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"<https?://[^>]*>", "address", text)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page: a paragraph, a heading or an item of a list ends one."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=#)", without_code(text)):
        plain = " ".join(re.sub(r"^\s*(?:[-*]|\d+\.|#+)\s+", "", block).split())
        yield from (part for part in re.split(r"(?<=[.!?])[\"*)]* (?=[\"*(]*[A-Z0-9_a-z])", plain) if part)


def test_sentences_are_told_apart() -> None:
    page = "# Head\n\nOne `a b c`. Two\nlines [x y](z.md).\n\n- item. more\n- second\n\n```\ncode. code\n```\n\n"
    page += "| a. | b |\n"
    assert list(sentences(page)) == ["Head", "One code.", "Two lines x y.", "item.", "more", "second"]


@pytest.mark.parametrize("name", [name for name in PROSE if not (name.startswith("reference/") and name in GENERATED)])
def test_no_sentence_is_long(name: str) -> None:
    long = [each for each in sentences(text_of(name)) if len(each.split()) > MAX_SENTENCE_WORDS]
    assert long == []


@pytest.mark.parametrize("name", [name for name in PROSE if not name.startswith(LONG_PAGES)])
def test_no_page_is_long(name: str) -> None:
    assert len(text_of(name).split()) <= MAX_WORDS


def anchors(path: Path) -> set[str]:
    """The places of a page that a link can name."""
    text = CODE_BLOCK.sub("", path.read_text(encoding="utf-8"))
    heads = [re.sub(r"[`*]|\[|\]\([^)]*\)", "", head) for head in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    slugs = [re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads]
    return {*slugs, *re.findall(r'<a id="(\w+)">', text)}


def links(text: str) -> list[str]:
    text = CODE_BLOCK.sub("", text)
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "code", text))


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: path.relative_to(DOCS).as_posix())
def test_links_and_their_places_exist(path: Path) -> None:
    for link in links(path.read_text(encoding="utf-8")):
        if re.match(r"https?://|mailto:", link):
            continue
        file, _, place = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not place or place in anchors(target), link


def test_no_bar_in_code_of_a_table() -> None:
    """GitHub and mkdocs read it differently."""
    assert [name for name in PROSE if re.search(r"^\|.*`[^`|]*\\\|[^`]*`", text_of(name), re.MULTILINE)] == []


def test_a_wrong_place_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One `two`\n\n## A DoRA, and more\n", encoding="utf-8")
    assert anchors(tmp_path / "a.md") == {"one-two", "a-dora-and-more"}
    assert links("[x](a.md#b) `[y](z)`\n```\n[n](m)\n```\n") == ["a.md#b"]


def known_keys() -> tuple[set[str], set[str]]:
    """(sections, all keys as section.key) of every family, adapter and optimizer."""
    sections, keys = set(), set()
    for section in ("model", "lora", "optim"):
        for kind in every_kind(section, kind_registry()):
            for name, field in kind.recipe.model_fields.items():
                sections.add(name)
                keys |= {f"{name}.{key}" for key in getattr(field.annotation, "model_fields", {})}
    return sections, keys


def kind_registry() -> Any:
    from lora_rocm.families.registry import FAMILIES

    return FAMILIES


def cited_keys(text: str) -> set[str]:
    """Recipe keys that a page writes as `section.key`, also with a value behind them."""
    return set(re.findall(r"`([a-z_]+\.[a-z_0-9]+)(?=[`:])", text))


FILES = re.compile(r"\.(md|json|jsonl|yaml|yml|txt|log|csv|html|index|bat|py|toml|safetensors|gguf|sft|tmp)$")
OF_OTHERS = ("reference/errors.md", "reference/environment.md", "reference/kohya-names.md")
"""Pages with words of the sources, and with names of other programs."""
NOT_KEYS = {"torch.distributed", "torch.cuda", "error.code", "llama.cpp"}


@pytest.mark.parametrize("name", [name for name in PROSE if name not in OF_OTHERS])
def test_every_recipe_key_exists(name: str) -> None:
    sections, keys = known_keys()
    moved = {"train.min_snr_gamma", "train.noise_offset", "train.zero_terminal_snr"}
    cited = {key for key in cited_keys(text_of(name)) if key.partition(".")[0] in sections and not FILES.search(key)}
    assert sorted(cited - keys - moved - NOT_KEYS) == []


def test_keys_are_found_in_a_page() -> None:
    sections, keys = known_keys()
    assert cited_keys("`data.path` and `lora.rank: 3`, `model.levitate`") == {
        "data.path",
        "lora.rank",
        "model.levitate",
    }
    assert {"objective.beta", "optim.rounding", "lora.factor", "model.guidance"} <= keys
    assert "model.levitate" not in keys and "model" in sections


COMMAND = re.compile(r"lora-rocm ((?:cache |bench |queue )?[a-z]+)([^\n]*)")


def code_in(text: str) -> list[str]:
    """The lines of blocks of code, and code in lines. A line continued by a backslash is one line."""
    text = text.replace("\\\n", " ")
    blocks = [line for block in CODE_BLOCK.findall(text) for line in block.splitlines()]
    return [*blocks, *re.findall(r"`([^`]+)`", CODE_BLOCK.sub("", text))]


def wrong_commands(text: str) -> list[str]:
    """Commands and options in the code of a page that the program does not have."""
    known = commands()
    wrong = []
    for name, rest in (found for code in code_in(text) for found in COMMAND.findall(code)):
        if name not in known:
            wrong.append(name)
            continue
        options = {option for each in known[name].options for option in each.names} | {"--help", "-h"}
        rest = re.split(r"[>;#(|]| && ", rest)[0]
        wrong += [f"{name} {flag}" for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", rest) if flag not in options]
    return wrong


@pytest.mark.parametrize("name", [name for name in PROSE if name not in OF_OTHERS])
def test_every_command_and_option_exists(name: str) -> None:
    assert wrong_commands(text_of(name)) == []


def test_a_wrong_command_is_noticed() -> None:
    assert wrong_commands("`lora-rocm train my.yaml --resume latest` and `lora-rocm cache stats --dir x`") == []
    assert wrong_commands("lora-rocm levitates. `lora-rocm COMMAND --help`, `lora-rocm env \\| a --b`") == []
    assert wrong_commands("```\nlora-rocm train my.yaml \\\n    --levitate\n```") == ["train --levitate"]
    assert wrong_commands("`lora-rocm levitate my.yaml`") == ["levitate"]


def snippets() -> list[tuple[str, str]]:
    """(page, text) of every YAML block of a page."""
    return [
        (name, textwrap.dedent(block))
        for name in PROSE
        for block in re.findall(r"^ *```yaml\n(.*?)^ *```$", text_of(name), re.DOTALL | re.MULTILINE)
    ]


@pytest.mark.parametrize(
    ("name", "block"), snippets(), ids=[f"{name}-{number}" for number, (name, _) in enumerate(snippets())]
)
def test_recipes_in_pages_are_recipes(name: str, block: str, tmp_path: Path) -> None:
    recipe = yaml.safe_load(block)
    texts = recipe.get("model", {}).get("family") == "causal-lm"
    rest: dict[str, Any] = {"model": {"name_or_path": "base"}, "data": {"path": "texts" if texts else "images"}}
    rest["train"] = {"max_train_steps": 10}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({**rest, **recipe}), encoding="utf-8")
    if recipe.get("train", {}).keys() & {"max_train_steps", "epochs"} == set():
        file.write_text(
            yaml.safe_dump({**rest, **recipe, "train": {**rest["train"], **recipe.get("train", {})}}), encoding="utf-8"
        )
    check(str(file), schema_only=True, notify=lambda text: None)


def test_there_are_recipes_in_pages() -> None:
    assert len(snippets()) > 25


def test_every_error_code_is_explained() -> None:
    assert docs_errors.unexplained() == []
    assert len(docs_errors.codes()) > 200
    page = text_of("reference/errors.md")
    assert [code for code in docs_errors.codes() if f"\n## {code}\n" not in page] == []


SOURCE = """
WORDS = "A thing is broken."


def _error(code: str, what: str) -> UserError:
    return UserError(code, what, fix="Mend it.")


def fail(number: int) -> None:
    if number:
        raise _error("by-a-helper", f"There are {number} things.")
    what = "No longer true."
    if number:
        raise GaveUpError("first", what, fix="x")
    if number > 2:
        what = "Many."
    else:
        what = WORDS
    raise StorageError("plain", what, fix="Buy " + "another.")
"""


def test_codes_are_found_where_an_error_is_made() -> None:
    found = docs_errors.Source([SOURCE]).codes()
    assert sorted(found) == ["by-a-helper", "first", "plain"]
    assert list(found["first"].what) == ["No longer true."] and found["first"].exit_codes == {4}
    assert list(found["by-a-helper"].what) == ["There are … things."] and found["by-a-helper"].exit_codes == {2}
    assert sorted(found["plain"].what) == ["A thing is broken.", "Many."] and list(found["plain"].fix) == [
        "Buy another."
    ]


def test_every_code_in_the_sources_is_found() -> None:
    """A code that is written as the first argument of an error, by a search that knows nothing of helpers."""
    names = "|".join(docs_errors.CLASSES)
    made = re.compile(rf'\b(?:{names})\(\s*"([a-z0-9-]+)"')
    sources = [path.read_text(encoding="utf-8") for path in docs_errors.ROOT.rglob("*.py")]
    written = {code for source in sources for code in made.findall(source)}
    assert len(written) > 150 and sorted(written - docs_errors.codes().keys()) == []


def test_the_tables_of_explanations_name_real_codes() -> None:
    own = docs_errors.explained()
    made = {code for codes in own.put_together.values() for code in codes}
    assert sorted((own.meaning.keys() | made) - docs_errors.codes().keys()) == []


def test_the_schema_has_the_sections_of_the_pages() -> None:
    assert {f"reference/recipe/{name}.md" for name in json_schema()["properties"] if name != "base"} <= GENERATED.keys()


QUESTIONS = {
    "how do I resume": ("how-to/resume.md", "--resume latest"),
    "what does code X mean": ("reference/errors.md", "## disk-low"),
    "which file for Forge": ("how-to/use-the-result.md", "**Forge, A1111** | `my-style.safetensors`"),
    "my card has 8 GB": ("how-to/low-memory.md", "## My card has 8 GB"),
    "kohya's network_alpha": ("reference/kohya-names.md", "| `network_alpha` | [`lora.alpha`]"),
    "report a bug": ("how-to/report-a-bug.md", "lora-rocm doctor --report"),
}
"""A newcomer's question -> the page, and the answer on it."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_frequent_question_is_three_links_away(question: str) -> None:
    page, answer = QUESTIONS[question]
    assert answer in text_of(page)
    found, pages_here = {"index.md"}, {"index.md"}
    for _ in range(3):
        pages_here = {
            (DOCS / name).parent.joinpath(link.partition("#")[0]).resolve().relative_to(DOCS.resolve()).as_posix()
            for name in pages_here
            for link in links(text_of(name))
            if link.partition("#")[0].endswith(".md") and not link.startswith(("http", "../../")) and "../C" not in link
            if (DOCS / name).parent.joinpath(link.partition("#")[0]).resolve().is_relative_to(DOCS.resolve())
        } - found
        found |= pages_here
    assert page in found
