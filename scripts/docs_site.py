"""Hooks of mkdocs for the site in ``docs/``: the navigation, and pages for notebooks and files outside ``docs/``.

Links in the documentation use the repository's paths, so they also work without the site:
``../../recipes/sdxl.yaml``. The site gets a page for each of these files, and the links are changed to lead there.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = {
    "Start": "start",
    "How to": "how-to",
    "Reference": "reference",
    "Explanation": "explanation",
    "Laboratory": "lab",
}
OF_SECTION = {"choosing.md": "Start"}
"""Pages directly in docs/ -> the section that ends with them."""
READ_IN_ORDER = ("index.md", "install.md", "image-lora.md", "language-model.md")
"""Pages that come first in their section, in this order."""
LISTS = "-index.md"
"""End of the name of a page that lists others: the pages with the same beginning follow it."""
NOTEBOOKS = "*.ipynb"
PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md")
LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s#:]+)(?P<anchor>#[^()\s]*)?\)")


def pages_outside() -> dict[str, str]:
    """Path in the repository -> path of its page in the site."""
    outside = {name: f"project/{name}" for name in PROJECT if (ROOT / name).is_file()}
    outside |= {f"recipes/{path.name}": f"recipes/{path.stem}.md" for path in sorted((ROOT / "recipes").glob("*.yaml"))}
    return {"recipes": "recipes/index.md", **outside, "README.md": "index.md"}


def section(folder: Path, docs: Path) -> list[Any]:
    """The pages of a folder, in the order and the groups (headings of level 2) of its index.md; then the others."""
    pages = {page.name: page.relative_to(docs).as_posix() for page in sorted(folder.glob("*.md"))}
    pages |= {path.name: page_of_notebook(path.relative_to(docs).as_posix()) for path in sorted(folder.glob(NOTEBOOKS))}
    nav: list[Any] = [pages.pop(name) for name in READ_IN_ORDER if name in pages]
    index, group = folder / "index.md", nav
    for line in index.read_text(encoding="utf-8").splitlines() if index.is_file() else ():
        if line.startswith("## "):
            group = []
            nav.append({line.removeprefix("## "): group})
        for name in (link["target"] for link in LINK.finditer(line) if link["target"] in pages):
            group.append(pages.pop(name))
            if name.endswith(LISTS):
                group.extend(pages.pop(each) for each in [*pages] if each.startswith(name.removesuffix(LISTS)))
    nav = [entry for entry in nav if isinstance(entry, str) or any(entry.values())]  # headings above no page
    below = (sub for sub in sorted(folder.iterdir()) if sub.is_dir() and any(sub.rglob("*.md")))
    return [*nav, *pages.values(), *({sub.name.capitalize(): section(sub, docs)} for sub in below)]


def navigation(docs: Path) -> list[Any]:
    """Every page of docs/, by section, and the pages of the project's own files."""
    sections = [{title: section(docs / folder, docs)} for title, folder in SECTIONS.items() if (docs / folder).is_dir()]
    for page, title in OF_SECTION.items():
        next(entry[title] for entry in sections if title in entry).append(page)
    outside = pages_outside()
    recipes = [page for name, page in outside.items() if name.startswith("recipes")]
    project = [page for name, page in outside.items() if name in PROJECT]
    return [{"Home": "index.md"}, *sections, {"Recipes": recipes}, {"Project": project}]


def page_of_notebook(source: str) -> str:
    """The path of a notebook's page in the site. ``source``: path of the notebook below docs/."""
    return posixpath.splitext(source)[0] + ".md"


def notebook_page(path: Path) -> str:
    """A notebook as a page: its texts, its code, and a link to the file."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join([parts[0], f"[Download the notebook]({path.name})", *parts[1:]]) + "\n"


def moved_links(text: str, source: str, page: str) -> str:
    """The text, where links to files outside docs/ lead to their pages.

    A link to a file without a page becomes plain text.

    Args:
        text: Markdown.
        source: path of its file in the repository.
        page: path of its page in the site.
    """
    outside = pages_outside()

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match["target"]))
        there = outside.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if there is not None and there.endswith(".ipynb"):
            there = page_of_notebook(there)
        if there is not None:
            link = posixpath.relpath(there, posixpath.dirname(page) or ".")
            return f"[{match['text']}]({link}{match['anchor'] or ''})"
        return match["text"] if (ROOT / target).exists() else match[0]  # strict mode refuses a link to nothing

    return LINK.sub(moved, text)


def recipe_page(path: Path) -> str:
    """A recipe as a page."""
    return f"# {path.name}\n\n```yaml\n{path.read_text(encoding='utf-8')}```\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation."""
    config.nav = navigation(Path(config.docs_dir))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of files outside docs/."""
    outside = pages_outside()
    for name, page in outside.items():
        path = ROOT / name
        if name == "recipes":
            names = [Path(recipe).name for recipe in outside if recipe.startswith("recipes/")]
            text = "# Recipes\n\n" + "".join(f"- [{each}]({Path(each).stem}.md)\n" for each in names)
        elif path.suffix == ".yaml":
            text = recipe_page(path)
        elif page == "index.md":
            continue
        else:
            text = moved_links(path.read_text(encoding="utf-8"), name, page)
        files.append(File.generated(config, page, content=text))
    for path in sorted(Path(config.docs_dir).rglob(NOTEBOOKS)):
        page = page_of_notebook(path.relative_to(config.docs_dir).as_posix())
        files.append(File.generated(config, page, content=notebook_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to the pages of files outside docs/."""
    if page.file.generated_by is not None:
        return markdown
    return moved_links(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)
