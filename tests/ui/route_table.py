"""All routes of the page, read from the application itself, and a folder in which each has something to show."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import ImmutableMultiDict
from starlette.routing import Mount, Route

from lora_rocm.model_files.peft_folder import PEFT_WEIGHTS
from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui.access import Access
from lora_rocm.ui.application import create_app
from lora_rocm.ui.context import UiContext
from lora_rocm.ui.folders import Folders
from tests.markers import markers
from tests.report.measured_run import write_measured_run
from tests.supervisor.fake_run import RECIPE, safetensors_bytes
from tests.ui.drawn_grid import with_grid
from tests.ui.image_folders import write_folder
from tests.ui.site import PORT, Site

SAFE = ("GET", "HEAD")
READERS = ("get", "getlist", "query_of", "text_of", "_field", "_number", "_numbers", "_integer")
"""Functions that take the name of a field of a request."""


@dataclass(frozen=True)
class Entry:
    """A route with one method."""

    method: str
    path: str
    endpoint: Any

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def entries() -> list[Entry]:
    """Every route of the application but the folder of static files and the live stream, with each of its methods.

    A route of another kind is an error, so none can be added that these tests do not see.
    """
    app: Any = create_app(UiContext(Folders(Path(), Path("runs")), Access(PORT))).app
    found = []
    for route in app.routes:
        if isinstance(route, Mount) and route.path == "/static":
            continue
        assert isinstance(route, Route) and route.methods, route
        if route.path != "/live":
            found += [Entry(method, route.path, route.endpoint) for method in sorted(route.methods - {"HEAD"})]
    return found


@cache
def named_in(module: Any) -> frozenset[str]:
    """Names of fields that a module of handlers reads, as far as its text shows them."""
    found = set[str]()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        places: list[ast.expr] = []
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            places = [*node.args] if name in READERS else []
        elif isinstance(node, ast.Subscript):
            places = [node.slice]
        found |= {each.value for each in places if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return frozenset(name for name in found if name.isidentifier())


@cache
def fields_outside(endpoint: Any) -> frozenset[str]:
    """Fields that a handler reads at a comment ``# outside: REASON``: the user names a folder anywhere."""
    source = textwrap.dedent(inspect.getsource(endpoint))
    known = markers(source, "outside")
    lines = {line for line in known} | {line + 1 for line, is_alone in known.items() if is_alone}
    constants = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return frozenset(
        node.value
        for node in constants
        if node.lineno in lines and isinstance(node.value, str) and node.value.isidentifier()
    )


def recorded_names(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of fields that handlers ask for from now on."""
    asked, get, get_list = set[str](), ImmutableMultiDict.__getitem__, ImmutableMultiDict.getlist

    def recorded(self: Any, key: Any) -> Any:
        asked.add(str(key))
        return get(self, key)

    def recorded_list(self: Any, key: Any) -> Any:
        asked.add(str(key))
        return get_list(self, key)

    monkeypatch.setattr(ImmutableMultiDict, "__getitem__", recorded)
    monkeypatch.setattr(ImmutableMultiDict, "getlist", recorded_list)
    return asked


def with_peft(run_dir: RunDir) -> None:
    """Give a run the PEFT folder that an export writes."""
    weights = run_dir.earlier_exports(20) / "peft" / "unet" / PEFT_WEIGHTS
    weights.parent.mkdir(parents=True, exist_ok=True)
    weights.write_bytes(safetensors_bytes(1000))


def fill(site: Site) -> None:
    """Give the page's folder a run with pictures, a measured run, images, a recipe and a queue."""
    run_dir = site.run()
    with_grid(run_dir)
    with_peft(run_dir)
    write_measured_run(site.run_dir("measured"))
    write_folder(site.folder / "pictures")
    (site.folder / "cat.yaml").write_text(RECIPE, encoding="utf-8")
    site.client.post("/queue/add", data={"recipe": "cat.yaml"})


def usual_fields(site: Site, path: str) -> dict[str, str]:
    """Fields with which a route of a filled site has something to do."""
    part = path.split("/")[1]
    queued = [each.name for each in (site.folder / "queue").glob("*.yaml")]
    run = {"dir": "runs/a-run", "file": "samples/step-00000020/00.png", "step": "40", "field": "loss", "side": "first"}
    if path == "/runs/speed":
        return {"dir": "runs/measured"}
    values = {"prompt": "a zibu", "seed": "1", "steps": "2", "strength": "1", "format": "gguf"}
    if part == "images":
        text = {"recipe": "cat.yaml"} if path.startswith("/images/texts") else {}
        return {"dir": "pictures", "file": "image 0.png", "name": "image 0.png", "purpose": "alike", **text}
    if part == "recipe":
        model = {"key": "name_or_path", "words": "a", "repo": "nobody/nothing"}
        return {"file": "cat.yaml", "text": RECIPE, "version": "x", "name": "new-name", "dir": "runs/a-run", **model}
    if part == "queue":
        return {"file": (queued or ["none"])[0], "text": RECIPE, "version": "x", "recipe": "cat.yaml", "to": "0"}
    result = {"/runs/download": "lora.safetensors", "/runs/zip": "earlier-exports/step-00000020/peft"}
    return {**run, **values, "name": "new-name"} | ({"file": result[path]} if path in result else {})


OUTSIDE: list[Path] = []
"""The folder that no request may reach, while it is watched."""
REACHED: list[tuple[str, str]] = []


def _watch(event: str, values: tuple[Any, ...]) -> None:
    if not OUTSIDE or event.startswith(("compile", "import", "exec", "object", "sys.", "marshal")):
        return
    for value in values:
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, (str, bytes, os.PathLike)):
                text = os.path.realpath(os.fsdecode(each)) if b"\0" not in os.fsencode(each) else ""
                if Path(text).is_relative_to(OUTSIDE[0]):
                    REACHED.append((event, text))


@contextmanager
def watched(outside: Path) -> Iterator[list[tuple[str, str]]]:
    """Record each file or folder in a folder that any thread opens, lists, changes, or gives to a child process."""
    if not getattr(watched, "is_installed", False):
        import sys

        sys.addaudithook(_watch)  # stays for the life of the process; without OUTSIDE it returns at once
        watched.is_installed = True  # type: ignore[attr-defined]
    OUTSIDE.append(outside.resolve())
    REACHED.clear()
    try:
        yield REACHED
    finally:
        OUTSIDE.clear()
