"""A run directory from somebody else: no text in it becomes markup on a page."""

from __future__ import annotations

import json
import os
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from ruamel.yaml import YAML

from lora_rocm.foundation.files import write_json
from lora_rocm.report.comparison import Compared, comparison_page
from lora_rocm.report.report import write_report
from lora_rocm.rundir.event_types import RUN_EVENTS, TYPES, Event
from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.layout import RunDir
from tests.report.test_html import EVIL, Structure
from tests.supervisor.fake_run import safetensors_bytes, save_recipe

OF_FILES = EVIL.replace("/", "")
"""A name of a file has no slash."""


def filled(annotation: Any, word: str, number: float | None = 1) -> Any:
    """A value of this type, in which each text is the word. number: None for nullable values, and 0 elsewhere."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return filled(arguments[0], word, number)
    if origin in (typing.Union, types.UnionType):
        if number is None:
            return None
        return filled(arguments[0], word, number)
    if origin is dict:
        return {filled(arguments[0], word, number): filled(arguments[1], word, number)}
    if origin is list:
        return [filled(arguments[0], word, number)]
    if annotation is Any:
        return {word: word}
    if annotation is int:
        return int(min(max(number or 0, -(2**62)), 2**62))
    return {str: word, bool: False, float: float(number or 0)}[annotation]


def event_of(kind: type[Event], word: str, number: float | None = 1, **fields: Any) -> Event:
    named = {
        name: filled(field.annotation, word, number)
        for name, field in kind.model_fields.items()
        if name not in ("time", "session")
    }
    if "set_aside" in named:
        named["set_aside"] = [{"where": word, "what": word, "fix": word}]
    if kind.model_config.get("extra") == "allow":
        named |= {word: word}
    return kind(**{**named, **fields})


def write_run(run_dir: RunDir, word: str, file_word: str) -> None:
    run_dir.create()
    save_recipe(run_dir)
    yaml = YAML()
    recipe = yaml.load(run_dir.recipe.read_text(encoding="utf-8"))
    recipe["output"]["name"] = recipe["output"]["description"] = recipe["data"]["trigger_word"] = word
    recipe["model"]["name_or_path"] = word
    recipe["sample"] |= {"prompts": [word, word, word], "control_prompts": [word]}
    with run_dir.recipe.open("w", encoding="utf-8") as file:
        yaml.dump(recipe, file)
    writer = EventWriter(run_dir.events(), session=1)
    for kind in RUN_EVENTS:
        for number in (1, 2):
            writer.write(event_of(kind, word, number))
    writer.write(event_of(TYPES["phase"], word, state="end"))
    writer.write(event_of(TYPES["export"], word, path="lora.safetensors"))
    for step in range(3, 40):
        writer.write(event_of(TYPES["step"], word, step, loss=9.0 if step == 35 else 0.5))
    writer.close()
    supervisor = EventWriter(run_dir.events("supervisor"), session=1)
    for kind_of_trouble in ("failure", "change", "restart"):
        supervisor.write(event_of(TYPES[kind_of_trouble], word))
    log = f"{word}\n{word}"
    supervisor.write(event_of(TYPES["failure"], word, silent_s=None, what=log, kernel_log=[log]))
    supervisor.close()
    for updates in (0, 1):
        run_dir.samples_at(updates).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(run_dir.samples_at(updates) / f"0{file_word}.png")
        (run_dir.samples_at(updates) / "1.txt").write_text(word, encoding="utf-8")
        (run_dir.samples_at(updates) / f"2{file_word}.png").write_bytes(b"no image")
    Image.new("RGB", (8, 8)).save(run_dir.before_after)
    (run_dir.path / "lora.safetensors").write_bytes(safetensors_bytes(3000))
    folder = run_dir.path / "lora-embeddings"
    folder.mkdir()
    (folder / f"{file_word}.safetensors").write_bytes(b"")
    write_json(run_dir.result, {"updates": word, "exports": [{word: word}]})
    rows = [{name: word for name in ("variable", "value", "why", word)}]
    write_json(
        run_dir.environment, {word: word, "packages": {word: word, "a": None}, "variables": rows, "machine": word}
    )


def report_of(run_dir: RunDir, word: str, file_word: str) -> Structure:
    write_run(run_dir, word, file_word)
    return Structure(write_report(run_dir).read_text(encoding="utf-8"))


def test_a_report_has_the_elements_that_it_has_for_harmless_names(tmp_path: Path) -> None:
    file_word = OF_FILES if os.name != "nt" else "word"
    harmless = report_of(RunDir(tmp_path / "word"), "word", "word")
    hostile = report_of(RunDir(tmp_path / file_word), EVIL, file_word)
    assert sorted(hostile.elements) == sorted(harmless.elements), "stories are in the order of time"
    assert [*hostile.own.values()] == [*harmless.own.values()]
    assert not [names for _, *names in hostile.elements if any(name.startswith("on") for name in names)]
    assert hostile.text.count("{{ 7*7 }}") > 50
    assert {"svg", "img", "pre", "h3", "td"} <= {element[0] for element in hostile.elements}


def test_a_comparison_has_the_elements_that_it_has_for_harmless_names(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "b.txt").write_text(EVIL, encoding="utf-8")
    images = [tmp_path / "a.png", tmp_path / "b.txt"]
    found = [
        Structure(
            comparison_page(
                word,
                [Compared(0, {word: 0.3}, images), Compared(10, {word: 0.2}, images)],
                [word, word],
                [1.0],
                [word],
                holds_out=True,
            )
        )
        for word in ("word", EVIL)
    ]
    assert found[0].elements == found[1].elements and found[1].text.count("{{ 7*7 }}") > 5


def test_each_event_with_a_text_has_the_word() -> None:
    for kind in RUN_EVENTS:
        has_text = any("str" in str(field.annotation) for field in kind.model_fields.values())
        assert ("word" in str([*event_of(kind, "word").to_json().values()])) or not has_text, kind


@pytest.mark.parametrize("number", [9e99, -9e99, 1e-300, 0, None])
def test_no_number_and_no_missing_value_stops_a_report(tmp_path: Path, number: float | None) -> None:
    run_dir = RunDir(tmp_path / "run").create()
    for writer in ("rank0", "supervisor"):
        with run_dir.events(writer).open("w", encoding="utf-8") as file:
            for kind in RUN_EVENTS * 12:
                fields = event_of(kind, "end", number).to_json()
                file.writelines(json.dumps({**fields, "time": time}) + "\n" for time in (number or 0.0, 1.0))
    assert "</html>" in write_report(run_dir).read_text(encoding="utf-8")
