"""Set-up of every test: one CPU thread, no network, and an environment that is restored."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

# Before any test module imports torch or a hub client: they read these once.
# The user's OMP_NUM_THREADS is for the user's programs; scripts/other_cpus.py asks for threads under a name of our own.
os.environ.update(
    OMP_NUM_THREADS=os.environ.get("LORA_ROCM_TEST_THREADS", "1"),
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)

import pytest
from hypothesis import settings

NEXT_LINE_IN_REPR = r"\x85"

gc.disable()  # until all modules are imported: their objects live to the end, and scanning them takes a third

# A shared machine is slow now and then: examples have no deadline, the test as a whole has (pyproject.toml).
settings.register_profile("quick", deadline=None, max_examples=50)
settings.load_profile("quick")


def pytest_collection_finish() -> None:
    """Imported objects are never garbage; the tests themselves run with the collector, as the program does."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 50)  # models come and go: Python's thresholds would spend a tenth of the time on scans
    gc.enable()


# Triton 3.9 complains at the end of everything that is not collected. pytest collects before that, five times.
atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True, scope="session")
def program_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program's folder of all tests: nothing is kept in the user's, and nothing kept there counts."""
    folder = tmp_path_factory.mktemp("home")
    os.environ["LORA_ROCM_HOME"] = str(folder)
    return folder


READERS_OF_YAML = ("recipe.foreign", "recipe.load", "recipe.recipe_fields", "recipe.value_edit")
"""Modules of the program that parse the same recipes again and again."""


@pytest.fixture(autouse=True, scope="session")
def recipes_parsed_once() -> Iterator[None]:
    """A recipe's text gives the same tree each time, and takes a tenth of a tiny run; a run reads its recipe twice."""
    from lora_rocm.recipe import load, yaml_tree

    parse = lru_cache(maxsize=1024)(yaml_tree.parse_yaml)
    with pytest.MonkeyPatch.context() as patch:
        for name in READERS_OF_YAML:
            patch.setattr(f"lora_rocm.{name}.parse_yaml", lambda text: _copied(parse(text)))
        patch.setattr(load, "YAML", _yaml_that_remembers())
        yield


def _copied(tree: Any) -> Any:
    """A tree that its reader may change; keys, numbers and texts in it are the same objects."""
    maps = {name: dict(getattr(tree, name)) for name in ("lines", "texts", "spans")}
    return replace(tree, value=_copied_value(tree.value), problems=[*tree.problems], **maps)


def _copied_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied_value(each) for key, each in value.items()}
    return [_copied_value(each) for each in value] if isinstance(value, list) else value


def _yaml_that_remembers() -> type:
    """A writer that writes equal values once: the runs of the tests have the same few recipes."""
    from ruamel.yaml import YAML

    written: dict[str, str] = {}

    class Remembering(YAML):  # type: ignore[misc]
        def dump(self, data: Any, stream: Any) -> None:
            key = f"{self.width} {data!r}"
            if NEXT_LINE_IN_REPR in key:  # quoted by its type, which is not in its representation
                super().dump(data, stream)
                return
            if key not in written:
                text = StringIO()
                super().dump(data, text)
                written[key] = text.getvalue()
            stream.write(written[key])

    return Remembering


@pytest.fixture(autouse=True, scope="session")
def templates_compiled_once() -> Iterator[None]:
    """A template's text gives the same code each time. Pages and tokenizers of tests have the same few templates."""
    from jinja2 import Environment

    compiled: dict[tuple[Any, ...], Any] = {}
    plain: Callable[..., Any] = Environment.compile

    def once(self: Environment, source: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(source, str):
            return plain(self, source, *args, **options)
        settings = [getattr(self, name) for name in ("trim_blocks", "lstrip_blocks", "autoescape", "optimized")]
        finalize = getattr(self.finalize, "__code__", self.finalize)
        key = (type(self), *settings, finalize, *self.extensions, source, args, *sorted(options.items()))
        if key not in compiled:
            compiled[key] = plain(self, source, *args, **options)
        return compiled[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Environment, "compile", once)
        yield


@pytest.fixture(autouse=True, scope="session")
def versions_read_once() -> Iterator[None]:
    """Installed packages stay as they are. Each run writes some versions down, and reads them from long texts."""
    from lora_rocm.foundation import packages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packages, "version", lru_cache(maxsize=None)(packages.version))
        yield


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_collect() -> None:
    """The program collects garbage between its phases; with all that the suite has loaded each time takes a second."""
    gc.freeze()


@pytest.fixture(autouse=True)
def restore_environment(program_folder: Path) -> Iterator[None]:
    """No test leaves a variable, or facts that its runs learned about this machine, for the next one."""
    before = os.environ.copy()
    yield
    for path in program_folder.glob("changes-*.json"):
        path.unlink()
    after = os.environ.copy()
    for name in after.keys() - before.keys():
        del os.environ[name]
    for name, value in before.items():
        if after.get(name) != value and name != "PYTEST_CURRENT_TEST":  # pytest's own: another in each phase
            os.environ[name] = value
