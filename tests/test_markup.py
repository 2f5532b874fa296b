"""Pages are escaped by construction: markup is written by templates, and in Python only by the elements of plots."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

import pytest

from tests.test_architecture import PACKAGE, ROOT, Module, package_modules

TAG = re.compile(r"(?<!\?P)(?<!\?)<[/!]?([a-zA-Z][\w-]*|\{\w*\})(\s[^<>]*|\{[^<>]*\})?/?>|<[a-zA-Z][\w-]*\s+[\w-]+=")
"""A tag, also with places for values in it. Not: named groups of regular expressions."""
NO_MARKUP = {
    "page_parts.charts": "the one function that writes elements, and escapes what is in them",
    "foundation.redact": "words in place of private ones: <home>, <user>",
    "cli": "<recipe>-<time>: the name that a run will have",
    "commands.check": "<recipe>-<time>, likewise",
    "base_models.tokenizers": "</w>: the end of a word in CLIP's vocabulary",
    "recipe.adapter_sections": "<zibu>: an example of a new token",
    "families.common.clip": "<zibu>, likewise",
}
"""Modules with texts that look like tags, and what these are."""
TYPED_MARKUP = [f"{PACKAGE}.{name}" for name in ("page_parts.rendering", "report.html")]
"""Modules that name the type of texts that are markup already."""
MARKUP = [f"{PACKAGE}.{name}" for name in ("page_parts.charts", "page_parts.inlined")]
"""Modules that make markup: elements of charts with escaped texts, and the program's own styles and scripts."""
RAW = re.compile(r"\|\s*safe\b|\bautoescape\b|\{%-?\s*raw\b|\bMarkup\b")
NETWORK = re.compile(
    r"<script(?!>\{\{ own\.library \}\}<| type=\"module\">\{\{ own\.module \}\}<)|"
    r"<(link|iframe|object|embed|base|form)\b|"
    r"\b(src|href)\s*=\s*\"(?!\{\{ it\.source \}\}\")|\bon\w+\s*=|url\(|@import"
)
OF_SERVER = re.compile(
    r"<script(?! src=\"/static/)|<(iframe|object|embed|base)\b|\s(on\w+|style)\s*=|hx-on|\bjs:|javascript:|@import|"
    r"\b(?:src|href|action|hx-get|hx-post)=\"(?!/(?!/)|#|\{\{ (?:url\(|each\.path|cancel_url))"
)
"""Things that a page of ``lora-rocm ui`` may not have: scripts and styles inside, and addresses of other servers."""
STYLE_TEXT = re.compile(r"setAttribute\(\s*[\"'`]style|<\w[^<>]*\sstyle=|createElement\(\s*[\"'`]style|<style")
SERVER_PAGES, REPORT = ROOT / PACKAGE / "ui", ROOT / PACKAGE / "report"
"""Their templates have own rules. The shared ones (page_parts) follow both."""


def tag_faults(module: Module) -> Iterator[str]:
    """Texts with tags in them."""
    said = {id(node.value) for node in module.nodes if isinstance(node, ast.Expr)}
    inside = {id(part) for node in module.nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in module.nodes:
        if id(node) in said or id(node) in inside:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        else:
            continue
        if TAG.search(text):
            yield f"{module.name}:{node.lineno} writes markup: {text:.60}"


def unescaped_faults(module: Module) -> Iterator[str]:
    """Things that keep a template from escaping a text: ``Markup``, an environment that does not escape."""
    for node in module.nodes:
        named = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if named == "Markup" and module.name not in [*TYPED_MARKUP, *MARKUP]:
            yield f"{module.name}:{node.lineno} takes a text for markup"
        if called == "Markup" and module.name not in MARKUP:
            yield f"{module.name}:{node.lineno} takes a text for markup"
        if isinstance(node, ast.Attribute) and node.attr == "__html__":
            yield f"{module.name}:{node.lineno} takes a text for markup"
        if isinstance(node, ast.FunctionDef) and node.name == "__html__":
            yield f"{module.name}:{node.lineno} takes a text for markup"
        if called in ("Environment", "Template", "SandboxedEnvironment") and isinstance(node, ast.Call):
            escapes = [word.value for word in node.keywords if word.arg == "autoescape"]
            if [ast.unparse(value) for value in escapes] != ["True"] and "jinja" in module.source:
                yield f"{module.name}:{node.lineno} makes templates that do not escape"


def template_faults(text: str, network: re.Pattern[str] = NETWORK) -> list[str]:
    """Things that a template may not have: unescaped texts, values outside of quotes in a tag, scripts, the network."""
    found = [match.group() for match in (*RAW.finditer(text), *network.finditer(text))]
    quoted = re.sub(r'="[^"]*"', "", re.sub(r"\{%.*?%\}|\{#.*?#\}", "", text, flags=re.DOTALL))
    return found + [tag for tag in re.findall(r"<[a-zA-Z][^<>]*>", quoted) if "{{" in tag]


def test_no_python_writes_markup() -> None:
    tags = {module.name.removeprefix(f"{PACKAGE}."): [*tag_faults(module)] for module in package_modules()}
    assert {name: faults for name, faults in tags.items() if faults and name not in NO_MARKUP} == {}
    assert [name for name in NO_MARKUP if not tags[name]] == [], "there is nothing left to allow"
    assert [fault for module in package_modules() for fault in unescaped_faults(module)] == []


def test_templates_escape_each_text_and_need_no_network() -> None:
    templates = sorted((ROOT / PACKAGE).rglob("*.j2"))
    pages = [*templates, *(ROOT / PACKAGE).rglob("*.css")]
    faults = {}
    for path in pages:
        rules = [NETWORK] * (not path.is_relative_to(SERVER_PAGES)) + [OF_SERVER] * (not path.is_relative_to(REPORT))
        faults[str(path)] = [each for rule in rules for each in template_faults(path.read_text(encoding="utf-8"), rule)]
    assert templates and {path: found for path, found in faults.items() if found} == {}


def style_faults(script: str) -> list[str]:
    """Styles of a script that the policy refuses: as text of an attribute or an element. ``each.style`` is allowed."""
    return STYLE_TEXT.findall(script)


def test_no_script_writes_styles_as_text() -> None:
    scripts = [path for path in (ROOT / PACKAGE).rglob("*.js") if "vendored" not in path.parts]
    faults = {path.name: style_faults(path.read_text(encoding="utf-8")) for path in scripts}
    assert scripts and {name: found for name, found in faults.items() if found} == {}
    for text in ('a.setAttribute("style", b)', "a.innerHTML = '<p style=\"b\">'", "document.createElement('style')"):
        assert style_faults(text)
    assert not style_faults("a.style.width = `${b}px`;")


def test_swapped_fragments_copy_no_styles_and_empty_no_elements() -> None:
    """htmx copies styles to new elements while they settle, and empties elements that scripts have filled."""
    templates = {path: path.read_text(encoding="utf-8") for path in (ROOT / PACKAGE).rglob("*.j2")}
    (base,) = (text for path, text in templates.items() if path.name == "base.html.j2")
    found = re.search(r"name=\"htmx-config\" content='([^']+)'", base)
    assert found is not None
    config = json.loads(found[1])
    assert config["defaultSettleDelay"] == 0
    skipped = config["morphSkipChildren"].split(", ")
    filled = {name for text in templates.values() for name in re.findall(r"<(\w+-\w+)\b[^<>]*></\1>", text)}
    assert "copy-button" in filled and filled <= {*skipped} and "[hx-morph-skip-children]" in skipped


@pytest.mark.parametrize(
    ("text", "is_fault"),
    [
        ('<script src="https://x.y/a.js"></script>', True),
        ("<script>a</script>", True),
        ('<button onclick="a()">', True),
        ('<p style="color: red">', True),
        ('<button hx-on:click="a()">', True),
        ('<a href="https://x.y">', True),
        ('<a href="//x.y">', True),
        ('<form action="http://x.y">', True),
        ('<a href="{{ link }}">', True),
        ('<script src="/static/page.js" type="module"></script>', False),
        ('<a href="{{ url("/runs/view", dir=name) }}">', False),
        ('<form method="post" action="/machine/folders">', False),
    ],
)
def test_what_a_page_of_the_server_may_not_have_is_noticed(text: str, is_fault: bool) -> None:
    assert bool(template_faults(text, OF_SERVER)) is is_fault


@pytest.mark.parametrize(
    "source",
    [
        "x = '<b>' + name + '</b>'",
        "x = f'<h3>{title}</h3>'",
        "x = f'<img src=\"{path}\">'",
        "x = f'<p{attribute}>{text}'",
        "x = '<{0}>{1}</{0}>'.format(a, b)",
        "x = '<td class=' + kind",
        "x = f'<{name}>'",
        "x = '</pre>'",
    ],
)
def test_markup_is_noticed(source: str) -> None:
    assert list(tag_faults(Module(f"{PACKAGE}.commands.status", source)))


@pytest.mark.parametrize(
    "source",
    [
        "x = '<|im_end|>'",
        "x = re.compile(r'(?P<name>a)')",
        "x = 'at most < 3'",
        "x = f'{a} < {b}, {c} > {d}'",
        "x = '<f'",
        "'''Writes <b>.'''",
    ],
)
def test_other_texts_are_no_markup(source: str) -> None:
    assert not list(tag_faults(Module(f"{PACKAGE}.commands.status", source)))


@pytest.mark.parametrize(
    ("source", "is_fault"),
    [
        ("x = Markup(name)", True),
        ("x = markupsafe.Markup(name)", True),
        ("def __html__(self): return self.text", True),
        ("import jinja2\nx = jinja2.Environment(loader=a)", True),
        ("import jinja2\nx = jinja2.Environment(autoescape=wanted)", True),
        ("import jinja2\nx = jinja2.Environment(autoescape=True)", False),
        ("x = escape(name)", False),
    ],
)
def test_a_text_that_is_taken_for_markup_is_noticed(source: str, is_fault: bool) -> None:
    assert bool(list(unescaped_faults(Module(f"{PACKAGE}.report.report", source)))) is is_fault


@pytest.mark.parametrize(
    ("text", "is_fault"),
    [
        ("<p>{{ text | safe }}</p>", True),
        ("{% autoescape false %}{{ text }}{% endautoescape %}", True),
        ("<p class={{ tone }}>", True),
        ('<p onclick="{{ x }}">', True),
        ('<img src="{{ path }}">', True),
        ("<script>a</script>", True),
        ('<p class="{{ tone }}">{{ text }}</p>', False),
    ],
)
def test_a_template_that_does_not_escape_is_noticed(text: str, is_fault: bool) -> None:
    assert bool(template_faults(text)) is is_fault
