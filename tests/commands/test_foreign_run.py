"""Commands on a run from somebody else: names in its recipe do not decide where they write."""

from __future__ import annotations

import ast
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from ruamel.yaml import YAML

from lora_rocm.cache_store.maintenance import holds_cache
from lora_rocm.commands import chat_session
from lora_rocm.families.registry import FAMILIES
from lora_rocm.recipe.load import load_recipe
from lora_rocm.recipe.paths import with_default_outputs
from lora_rocm.recipe.sections import path_rule
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.run_recipe import recipe_of_run
from tests.commands.test_chat import fake
from tests.markers import markers, unmarked
from tests.program import RECIPE, Program, images, snapshot
from tests.supervisor.fake_run import write_whole_run
from tests.test_architecture import PACKAGE, Module, package_modules
from tests.tiny_llm import write_tiny_llm
from tests.tiny_models import SHALLOW, write_tiny_sdxl

TEXTS = """\
model: {family: causal-lm, name_or_path: model}
data: {sources: [{dataset: texts.jsonl}], max_length: 64, validation_split: 0.4}
lora: {rank: 2}
train: {max_train_steps: 1, mixed_precision: "no"}
runtime: {device: cpu}
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with monkeypatch.context() as patch:
        yield Program(patch)


def spoil(run_dir: Path, place: Path) -> None:
    """Edit the recipe, as somebody might have, so that it names other folders for all output."""
    yaml = YAML()
    data = yaml.load((run_dir / "recipe.yaml").read_text(encoding="utf-8"))
    data["cache"]["dir"], data["output"]["dir"] = str(place / "cache"), str(place / "runs")
    with (run_dir / "recipe.yaml").open("w", encoding="utf-8") as file:
        yaml.dump(data, file)
    os.rename("cache", "moved-cache")


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path, with size and time of change of files."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        found[path.relative_to(folder).as_posix()] = (status.st_size, status.st_mtime_ns) if path.is_file() else (0, 0)
    return found


@contextmanager
def nothing_written_but(folder: Path, *allowed: str) -> Iterator[None]:
    before = tree(folder)
    yield
    after = tree(folder)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert [path for path in sorted(changed) if path.split("/")[0] not in allowed] == []


def test_of_a_run_of_images(program: Program, tmp_path: Path) -> None:
    write_tiny_sdxl(tmp_path / "model", **SHALLOW)
    images(tmp_path / "pics", 5)
    (tmp_path / "r.yaml").write_text(RECIPE, encoding="utf-8")
    assert program.train("run", "train.max_train_steps=1", "data.validation_split=0.4", "sample.steps=1").code == 0
    spoil(tmp_path / "run", tmp_path / "place")
    with nothing_written_but(tmp_path, "run", "asked", "out.safetensors"):
        for command in (
            ("compare", "run"),
            ("compare", "run", "--prompt", "a cat"),
            ("sample", "run", "--prompt", "a cat", "--steps", 1),
            ("sample", "run/lora.safetensors", "--prompt", "a cat", "--steps", 1, "--output", "asked"),
            ("export", "run", "--format", "diffusers"),
            ("export", "run", "--format", "kohya", "--output", "out.safetensors"),
            ("status", "run"),
            ("report", "run"),
        ):
            said = program(*command)
            assert said.code == 0, said.text
    assert (tmp_path / "out.safetensors").is_file() and (tmp_path / "asked").is_dir()


def test_a_cache_of_ours_that_a_foreign_recipe_names_only_grows(program: Program, tmp_path: Path) -> None:
    """By entries of the cache's own names: nothing in it is deleted or changed, not even what is damaged."""
    write_tiny_sdxl(tmp_path / "model", **SHALLOW)
    images(tmp_path / "pics", 5)
    (tmp_path / "r.yaml").write_text(RECIPE, encoding="utf-8")
    assert program.train("run", "train.max_train_steps=1", "data.validation_split=0.4", "sample.steps=1").code == 0
    spoil(tmp_path / "run", tmp_path / "place")
    ours = tmp_path / "place" / "cache"
    ours.parent.mkdir()
    os.rename("moved-cache", ours)
    entries = sorted(ours.rglob("*.safetensors"))
    assert entries and holds_cache(ours)
    entries[0].write_bytes(entries[0].read_bytes()[:-1])
    (ours / "notes.txt").write_bytes(b"mine")
    before = snapshot(ours)
    for command in (
        ("compare", "run", "--prompt", "a cat"),
        ("sample", "run", "--prompt", "a cat", "--steps", 1),
        ("export", "run", "--format", "diffusers"),
        ("status", "run"),
        ("report", "run"),
    ):
        said = program(*command)
        assert said.code == 0, said.text
    after = snapshot(ours)
    for name, content in before.items():
        grown = after[name].startswith(content) if name.endswith(".jsonl") else after[name] == content
        assert grown, name
    assert holds_cache(ours) and not [name for name in after.keys() - before.keys() if name.endswith(".tmp")]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_of_a_run_of_texts(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_llm(tmp_path / "model")
    rows = [json.dumps({"prompt": f"What is {number}?", "completion": f"It is {number}."}) for number in range(5)]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "r.yaml").write_text(TEXTS, encoding="utf-8")
    said = program.train("run")
    assert said.code == 0, said.text
    spoil(tmp_path / "run", tmp_path / "place")
    monkeypatch.setattr(chat_session, "started", fake)
    with nothing_written_but(tmp_path, "run", "merged"):
        for command in (
            ("export", "run", "--format", "merged", "--output", "merged"),
            ("export", "run", "--format", "merged"),
            ("compare", "run"),
            ("chat", "run", "--prompt", "a", "--max-tokens", 1),
        ):
            said = program(*command)
            assert said.code == 0, said.text
    assert (tmp_path / "merged/config.json").is_file()


def sections_of(section: BaseModel) -> Iterator[BaseModel]:
    yield section
    for name in type(section).model_fields:
        value = getattr(section, name)
        for inside in value if isinstance(value, tuple) else (value,):
            if isinstance(inside, BaseModel):
                yield from sections_of(inside)


def test_each_folder_for_output_is_the_default_of_the_current_folder(tmp_path: Path) -> None:
    """Of every key that the schema knows as such; the other paths are only read, and stay as they are."""
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    recipe = load_recipe(run_dir.recipe).recipe
    hostile, outputs, inputs = recipe, 0, 0
    update: dict[str, Any] = {}
    for name in type(recipe).model_fields:
        section = getattr(recipe, name)
        keys = {key: path_rule(info) for key, info in type(section).model_fields.items()}
        texts = [key for key, rule in keys.items() if rule is not None and isinstance(getattr(section, key), str)]
        update[name] = section.model_copy(update=dict.fromkeys(texts, str(tmp_path / "place")))
    hostile = recipe.model_copy(update=update)
    for section in sections_of(with_default_outputs(hostile)):
        for key, info in type(section).model_fields.items():
            rule, value = path_rule(info), getattr(section, key)
            if rule is not None and rule.is_output:
                outputs += 1
                assert value == os.path.abspath(info.default), key
            elif rule is not None and isinstance(value, str):
                inputs += 1
                assert value == str(tmp_path / "place"), key
    assert outputs >= 2 and inputs >= 2


@pytest.mark.parametrize("kind", ["cache", "missing", "empty", "foreign", "linked", "linked inside"])
def test_the_cache_of_the_recipe_is_used_only_if_it_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_whole_run(RunDir(tmp_path / "run"))
    place, spare, recipe = tmp_path / "place", tmp_path / "spare", tmp_path / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text(encoding="utf-8").replace(str(tmp_path / "cache"), str(place)), encoding="utf-8")
    if kind != "missing":
        place.mkdir()
    if kind == "foreign":
        (place / "id_rsa").write_bytes(b"x")
    if kind not in ("missing", "empty", "foreign"):
        (place / "weights.jsonl").write_bytes(b"")
    try:
        if kind == "linked":
            place.rename(tmp_path / "elsewhere")
            place.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
        if kind == "linked inside":
            (place / "rows").mkdir()
            (place / "rows" / "0f").symlink_to(tmp_path, target_is_directory=True)
    except OSError:
        pytest.skip("no links may be made here")
    assert holds_cache(place) is (kind == "cache")
    assert recipe_of_run(recipe, FAMILIES, spare).cache.dir == str(place if kind == "cache" else spare)
    assert recipe_of_run(recipe, FAMILIES).cache.dir == str(tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "hashes.jsonl").write_bytes(b"")
    assert recipe_of_run(recipe, FAMILIES, spare).cache.dir == str(place if kind == "cache" else tmp_path / "cache")


def unexplained(module: Module) -> list[str]:
    """Imports of ``load_recipe`` without a reason.

    ``recipe_of_run`` reads the recipe of a run, and removes its folders. A module that reads a recipe as it is gets one
    that the user names, or writes nothing that the recipe decides; a comment at the import has the reason.
    """
    places = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in module.nodes
        if isinstance(node, ast.ImportFrom)
        and node.module == f"{PACKAGE}.recipe.load"
        and any(alias.name == "load_recipe" for alias in node.names)
    ]
    return list(unmarked(module.name, module.source, "recipe", places))


def test_commands_on_a_run_read_its_recipe_by_the_function_that_takes_its_folders_away() -> None:
    assert [fault for module in package_modules() for fault in unexplained(module)] == []
    assert sum(len(markers(module.source, "recipe")) for module in package_modules()) > 10  # they are read


def test_a_recipe_that_is_read_as_it_is_without_a_reason_is_noticed() -> None:
    line = f"from {PACKAGE}.recipe.load import load_recipe"
    wrong = (line, f"def f():\n    {line} as read", f"{line}  # recipe: ok", "x = 1  # recipe: the user names it")
    for source in wrong:
        assert unexplained(Module(f"{PACKAGE}.commands.share", source)), source
    assert unexplained(Module(f"{PACKAGE}.commands.share", f"{line}  # recipe: the user names it")) == []
