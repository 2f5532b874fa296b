"""Jobs of heavy children: written jobs are read back, and a job that does not fit is refused by name."""

from __future__ import annotations

import ast
import importlib
import io
import json
import math
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_rocm.errors import MachineError
from lora_rocm.foundation.files import json_bytes
from lora_rocm.processes.job_file import MisfitError, from_json, job_text, read_job_file, to_json, write_job_file
from lora_rocm.processes.jobs import (
    CHILDREN,
    ExportJob,
    RowsJob,
    StopRequest,
    TuneAttentionJob,
    argument_of,
    chat_request,
    compile_answer,
    compile_request,
    count_request,
    job_of,
    name_of,
    request_line,
    step_launches,
)
from lora_rocm.processes.tool import ask, write_job
from lora_rocm.rundir.event_types import ErrorEvent, Event
from tests.test_architecture import PACKAGE, Module, imports_of, package_modules
from tests.wording import saying

TEXTS = st.text(st.characters(exclude_characters="\0"), max_size=8)
PATHS = st.lists(st.text("ab \u00fc\udce9.", min_size=1, max_size=5), min_size=1, max_size=3).map(
    lambda parts: Path(*parts)
)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXTS,
    int: st.integers(-(2**53), 2**53),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    Path: PATHS,
    Any: st.dictionaries(TEXTS, st.integers() | TEXTS | st.none() | st.booleans(), max_size=2),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation."""
    origin, of = get_origin(kind), get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if origin is UnionType:
        return st.none() | st.one_of([values_of(one) for one in of if one is not NoneType])
    if origin is list or (origin is tuple and of[-1] is ...):
        return st.lists(values_of(of[0]), max_size=2).map(origin)
    if origin is tuple:
        return st.tuples(*map(values_of, of))
    if origin is dict:
        return st.dictionaries(values_of(of[0]), values_of(of[1]), max_size=2)
    assert is_dataclass(kind), kind
    hints = get_type_hints(kind)
    return st.builds(kind, **{each.name: values_of(hints[each.name]) for each in fields(kind)})


SENT = [
    kind
    for child in CHILDREN.values()
    for kind in (child.job, *child.answers, *child.requests)
    if not issubclass(kind, Event)
]


@pytest.mark.parametrize("kind", SENT, ids=lambda kind: kind.__name__)
def test_what_is_written_is_read_back(kind: type[Any], tmp_path: Path) -> None:
    write_job_file(tmp_path / "job.json", "x", _some(kind))
    assert read_job_file(tmp_path / "job.json", {"x": kind}) == _some(kind)

    @given(values_of(kind))
    @settings(max_examples=30)
    def holds(value: Any) -> None:
        again = from_json(kind, json.loads(json_bytes(to_json(value)).decode("utf-8")))
        assert again == value and type(again) is kind

    holds()


@pytest.mark.parametrize("kind", SENT, ids=lambda kind: kind.__name__)
def test_each_field_is_asked_for_and_no_other_is_taken(kind: type[Any]) -> None:
    value = to_json(_some(kind))
    assert from_json(kind, value) is not None
    for name in value:
        with pytest.raises(
            MisfitError, check=saying("processes/name-name-2-is-missing", name=kind.__name__, name_2=name)
        ):
            from_json(kind, {key: each for key, each in value.items() if key != name})
    with pytest.raises(MisfitError, match="more is unknown"):
        from_json(kind, {**value, "more": 1})


def _some(kind: type[Any]) -> Any:
    """A value with the defaults of its fields, and the simplest for the others."""
    simplest: dict[Any, Any] = {str: "", int: 1, bool: True, float: 0.5, Path: Path("p")}
    hints = get_type_hints(kind)
    needed = [each for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]

    def value(hint: Any) -> Any:
        if is_dataclass(hint):
            return _some(hint)
        return simplest[hint] if hint in simplest else None if get_origin(hint) is UnionType else get_origin(hint)()

    return kind(**{each.name: value(hints[each.name]) for each in needed})


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, True),
        (int, 1.0),
        (int, "1"),
        (bool, 1),
        (str, 1),
        (str, None),
        (float, "1"),
        (float, True),
        (Path, 1),
        (Path, None),
        (list[int], {}),
        (list[int], [1, "2"]),
        (tuple[int, str], [1]),
        (tuple[int, str], [1, 2]),
        (dict[str, int], []),
        (dict[str, int], {"a": "1"}),
        (dict[int, int], {"a": 1}),
        (int | None, "1"),
        (RowsJob, []),
    ],
)
def test_a_value_of_another_type_is_refused(kind: Any, value: object) -> None:
    from lora_rocm.processes.job_file import _read

    with pytest.raises(MisfitError):
        _read(kind, value, "here")


def test_a_whole_number_is_a_number() -> None:
    """Negative control."""
    found = from_json(TuneAttentionJob, {"start": 0, "recipe": {}, "ways": ["a"], "limit_s": 2})
    assert found == TuneAttentionJob(recipe={}, ways=("a",), limit_s=2.0) and type(found.limit_s) is float
    assert math.isinf(from_json(TuneAttentionJob, {**to_json(found), "limit_s": math.inf}).limit_s)


def test_the_folder_for_caches_lies_beside_the_job(tmp_path: Path) -> None:
    job = ExportJob(source=tmp_path, format="peft")
    read = read_job_file(write_job(tmp_path, job), {"export": ExportJob})
    assert read == replace(job, spare_cache=tmp_path / "cache")


@pytest.mark.parametrize("name", CHILDREN)
def test_a_job_can_be_an_argument_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = _some(CHILDREN[name].job)
    text = argument_of(job)
    assert text.isascii() and "\n" not in text
    write_job_file(tmp_path / "job.json", name, job)
    for last in (text, str(tmp_path / "job.json")):
        monkeypatch.setattr(sys, "argv", ["x", last])
        assert job_of(type(job)) == job
        with pytest.raises(MachineError) as caught:
            job_of(next(child.job for child in CHILDREN.values() if child.job is not type(job)))
        assert caught.value.code == "job-unreadable"


@pytest.mark.parametrize("kind", CHILDREN["chat"].requests, ids=lambda kind: kind.__name__)
def test_a_request_is_one_line_that_is_read_back(kind: type[Any]) -> None:
    line = request_line(_some(kind))
    assert line.endswith(b"\n") and line.count(b"\n") == 1 and line.isascii()
    assert chat_request(line) == _some(kind) and type(chat_request(line)) is kind


@pytest.mark.parametrize(
    ("child", "request_of", "answer_of"),
    [("compile", compile_request, compile_answer), ("count", count_request, step_launches)],
)
def test_requests_to_a_helper_of_a_start_and_its_answers_are_lines(
    child: str, request_of: Callable[[bytes], object], answer_of: Callable[[bytes], object]
) -> None:
    for kind in CHILDREN[child].requests:
        assert request_of(request_line(_some(kind))) == _some(kind)
    for kind in CHILDREN[child].answers:
        assert answer_of(request_line(_some(kind))) == _some(kind)
    others = [_some(kind) for kind in CHILDREN["chat"].requests]
    for line in (b"", b"{}\n", *map(request_line, others)):
        with pytest.raises(MachineError) as caught:
            request_of(line)
        assert caught.value.code == "job-unreadable"


@pytest.mark.parametrize("line", [b"\xff\n", b"{}\n", b'{"stop": true}\n', job_text("export", StopRequest()).encode()])
def test_a_line_that_is_no_request_is_an_error(line: bytes) -> None:
    with pytest.raises(MachineError) as caught:
        chat_request(line)
    assert caught.value.code == "job-unreadable"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"child": 3}', '{"child": ["export"]}', "\xff"])
def test_a_file_that_is_no_job_is_an_error(content: str, tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(MachineError) as caught:
        read_job_file(file, {"export": ExportJob})
    assert caught.value.code == "job-unreadable" and caught.value.where == str(file)


@pytest.mark.parametrize("name", CHILDREN)
def test_a_child_refuses_the_job_of_another(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that shares its module refuses the jobs of other modules."""
    child = CHILDREN[name]
    other = next(each for each in CHILDREN.values() if each.module != child.module)
    module = importlib.import_module(child.module)
    monkeypatch.setattr(sys, "argv", [child.module, str(write_job(tmp_path, _some(other.job)))])
    with redirect_stdout(io.StringIO()) as out:
        assert module.main() == MachineError.exit_code
    (line,) = out.getvalue().splitlines()
    event = json.loads(line)
    assert (event["type"], event["code"]) == ("error", "job-unreadable") and name_of(_some(other.job)) in event["what"]


def test_an_answer_of_another_form_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for child in CHILDREN.values():
        if child.answers and not child.requests and not issubclass(child.answers[0], Event):
            monkeypatch.setattr("lora_rocm.processes.tool.run_for_json", lambda *start: {"odd": 1})
            with pytest.raises(MachineError) as caught:
                ask(_some(child.job), child.answers[0], {})
            assert caught.value.code == "answer-unreadable"


def events_of(modules: list[Module]) -> set[str]:
    return {found.name for m in modules for found in imports_of(m) if found.target == f"{PACKAGE}.rundir.event_types"}


def test_each_child_emits_the_events_of_the_table() -> None:
    helpers = {
        "model_child": ("chat", "compare", "conversions"),
        "bench.device_child": ("bench.copies", "measuring"),
        "bench.loader_child": ("measuring",),
        "tune.attention": ("tune.job", "measuring"),
        "tune.products": ("tune.job", "measuring"),
    }
    handed_on = {f"{PACKAGE}.children.tracking": {"StepEvent", "TelemetryEvent", "ValidationEvent", "WatchedEvent"}}
    for module in {child.module for child in CHILDREN.values()}:
        own = module.removeprefix(f"{PACKAGE}.children.")
        names = {module, *(f"{PACKAGE}.children.{each}" for each in helpers.get(own, ())), f"{PACKAGE}.checks.timing"}
        emitted = events_of([each for each in package_modules() if each.name in names]) - {"Event", "Emit"}
        emitted -= handed_on.get(module, set())
        known = {each.__name__ for child in CHILDREN.values() if child.module == module for each in child.answers}
        if "tune" not in own and "loader" not in own and not known & {"BeginEvent"}:
            emitted -= {"BeginEvent", "RowEvent"}
        assert emitted - {ErrorEvent.__name__, "NoticeEvent", "MachineEvent"} <= known, module


def keyed(module: Module) -> list[str]:
    """Jobs that are read by the names of their fields as texts."""
    return [
        f"{module.name}:{node.lineno}"
        for node in module.nodes
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "job"
    ]


def test_no_job_is_read_by_texts() -> None:
    assert [line for module in package_modules() for line in keyed(module)] == []
    assert keyed(Module("x", "y = job['recipe']")) == ["x:1"], "the control"
