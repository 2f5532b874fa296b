"""A run's files have the name ``output.name``, which every system can write; runs begun before keep ``lora``."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.errors import RecipeError
from lora_rocm.foundation.files import write_json
from lora_rocm.foundation.names import MAX_STEM_BYTES, name_key, stem_fault, usable_stem
from lora_rocm.model_files.header import read_header
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.load import dump_recipe, load_recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.results import read_result, result_files
from lora_rocm.rundir.run_name import DEFAULT_NAME, output_name_fault
from tests.crash.lab import TARGETS
from tests.program import RECIPE, SAMPLE, Program, write_inputs
from tests.wording import says

SETS = (f"lora.targets=['{TARGETS}']", "output.formats=[kohya, sd-scripts]")
NAMED = {"model": {"name_or_path": "x"}, "data": {"path": "."}, "train": {"max_train_steps": 1}}
REFUSED = ("con", "NUL", "Com1.v2", "a/b", "a\\b", "a:b", 'a"b', "a<b", "a|b", "what?", "a*", "x.", "x ", " x", ".x")
ALSO_REFUSED = ("", "..", "ü" * 100, "peft", "Pytorch_LoRA_weights", "a\tb")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``runs/named``: a finished run with ``output.name: zibu v1.2``, and ``runs/plain``, one without."""
    root = tmp_path_factory.mktemp("names")
    write_inputs(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        program = Program(patch)
        assert program.train("runs/named", *SETS, "output.name=zibu v1.2").code == 0
        assert program.train("runs/plain", *SETS).code == 0
    return root


@pytest.fixture
def program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    monkeypatch.chdir(folder)
    yield Program(monkeypatch)


@pytest.fixture
def copied(folder: Path) -> Iterator[Path]:
    place = folder / "runs" / "copy"
    yield place
    shutil.rmtree(place, ignore_errors=True)


def files_in(run: Path) -> set[str]:
    return {path.relative_to(run).as_posix() for path in run.rglob("*.safetensors") if "step-" not in path.parent.name}


def test_the_files_have_the_name_and_the_title(folder: Path) -> None:
    named, plain = folder / "runs" / "named", folder / "runs" / "plain"
    steps = {"checkpoints/{}-step00000001.safetensors", "checkpoints/{}-step00000002.safetensors"}
    wanted = {"{}.safetensors", "{}-sd-scripts.safetensors", *steps}
    assert files_in(named) == {name.format("zibu v1.2") for name in wanted}
    assert files_in(plain) == {name.format("lora") for name in wanted}, "the control"
    assert not RunDir(plain).names.exists(), "a run of the usual name is as it was"
    assert read_header(RunDir(named).lora).metadata["modelspec.title"] == "zibu v1.2"


def test_every_command_knows_the_name(program: Program, folder: Path) -> None:
    run = RunDir(folder / "runs" / "named")
    said = program("status", run.path)
    assert str(run.lora) in said.out and "not there" not in said.out
    assert program("export", run.path, "--format", "diffusers").code == 0
    assert program("sample", run.path, *SAMPLE).code == 0
    assert says(program("compare", run.path, "--prompt", "x").out, "output_name/step-2-3-of-3")
    assert program("report", run.path).code == 0 and run.lora.name in run.report.read_text(encoding="utf-8")
    assert program.train(run.path, *SETS, "output.name=zibu v1.2", resume="latest").code == 0
    run.lora.unlink()
    said = program.train(run.path, *SETS, "output.name=zibu v1.2", resume="latest")
    assert said.code == 0 and run.lora.exists(), "it is made again"


def test_two_runs_go_into_one_folder(folder: Path, tmp_path: Path) -> None:
    for name in ("named", "plain"):
        shutil.copy(RunDir(folder / "runs" / name).lora, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_run_begun_before_keeps_its_names(program: Program, folder: Path, copied: Path) -> None:
    """Its recipe has a title that names no file, and one that no file could have."""
    shutil.copytree(folder / "runs" / "plain", copied)
    run = RunDir(copied)
    text = run.recipe.read_text(encoding="utf-8")
    assert "name: lora\n" in text
    run.recipe.write_text(text.replace("name: lora\n", "name: 'Zibu: v1/2'\n"), encoding="utf-8")
    before = files_in(copied)
    assert str(run.lora) in program("status", copied).out and run.lora.name == "lora.safetensors"
    assert program("export", copied, "--format", "kohya").code == 0
    assert program("report", copied).code == 0
    said = program.train(copied, *SETS, "output.name='Zibu: v1/2'", "train.max_train_steps=3", resume="latest")
    assert said.code == 0, said.text
    assert "output.name" in said.out and "lora.safetensors" in said.out, "it says that the files keep their names"
    assert files_in(copied) == before | {"checkpoints/lora-step00000003.safetensors"}


def test_a_resumed_run_keeps_its_names(program: Program, folder: Path, copied: Path) -> None:
    shutil.copytree(folder / "runs" / "named", copied)
    more = ("train.max_train_steps=3", "output.name=other")
    assert program.train(copied, *SETS, *more, resume="latest").code == 0
    assert "checkpoints/zibu v1.2-step00000003.safetensors" in files_in(copied)
    paths = {export["path"] for export in read_result(RunDir(copied))["exports"]}
    assert paths == {"zibu v1.2.safetensors", "zibu v1.2-sd-scripts.safetensors"}


@pytest.mark.parametrize("name", [*REFUSED, *ALSO_REFUSED])
def test_check_refuses_what_a_system_refuses(program: Program, folder: Path, name: str) -> None:
    (folder / "n.yaml").write_text(RECIPE.replace("output: {", f"output: {{name: {json.dumps(name)}, "), "utf-8")
    error = program("check", "n.yaml").refused(2, "n.yaml:6 output.name")
    assert program("check", "n.yaml", "--schema-only").code == 2
    better = error.rpartition("such as ")[2].partition(". output.description")[0]
    (folder / "n.yaml").write_text(RECIPE.replace("output: {", f"output: {{name: {json.dumps(better)}, "), "utf-8")
    assert program("check", "n.yaml", "--schema-only").code == 0, "the remedy is right"


@pytest.mark.parametrize("name", [*REFUSED, *ALSO_REFUSED, "zibu"])
@pytest.mark.parametrize(
    ("fault", "at"),
    [
        ("foo: 3", "foo"),
        ("train: {epochs: 0}", "train.epochs"),
        ("train: {epochs: 1, max_train_steps: 1}", "train.max_train_steps"),
    ],
)
def test_a_name_is_refused_together_with_other_faults(tmp_path: Path, fault: str, at: str, name: str) -> None:
    """An unknown key, a wrong value and a broken rule do not hide it; an allowed name is the control."""
    path = tmp_path / "recipe.yaml"
    path.write_text(f"output: {{name: {json.dumps(name)}}}\n{fault}\n", "utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    places = [problem.where for problem in caught.value.problems]
    assert any(place.endswith(f" {at}") for place in places)
    assert sum(place.endswith(" output.name") for place in places) == (name != "zibu")


def test_a_new_run_is_refused_like_its_check(program: Program, folder: Path) -> None:
    program.train("runs/new", "output.name=con").refused(2, "output.name")
    assert not (folder / "runs" / "new").exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"name": 3}', '{"name": "../x"}', '{"name": "peft"}', "[" * 10_000])
def test_a_foreign_name_is_no_path(tmp_path: Path, content: str) -> None:
    (tmp_path / "names.json").write_text(content, encoding="utf-8")
    assert RunDir(tmp_path).lora == tmp_path / "lora.safetensors"
    (tmp_path / "names.json").write_text('{"name": "zibu"}', encoding="utf-8")
    assert RunDir(tmp_path).lora == tmp_path / "zibu.safetensors", "the control"


HOSTILE = (
    *(None, "", '{"na', "[]", "3", '{"nam": "x"}', '{"name": 3}', '{"name": null}', '{"name": ["a"]}'),
    *(
        json.dumps({"name": name})
        for name in ("", "a/b", "a\\b", "/etc/x", "C:x", "../x", "..", "CON", "peft", "other")
    ),
    *('{"name": "\\ud800"}', " " * 10_000_000, "[" * 4000),
)
"""Contents of ``names.json``; None: the file is gone."""


def harm(run: RunDir, content: str | None) -> None:
    run.names.unlink() if content is None else run.names.write_text(content, encoding="utf-8")


@pytest.mark.parametrize("content", HOSTILE, ids=lambda content: repr(content)[:20])
def test_the_name_is_not_lost_with_its_file(folder: Path, copied: Path, content: str | None) -> None:
    shutil.copytree(folder / "runs" / "named", copied)
    run = RunDir(copied)
    assert run.name == "zibu v1.2" and not run.names_are_wrong, "the control"
    harm(run, content)
    assert run.name == "zibu v1.2" and run.names_are_wrong
    assert {run.lora, run.export_of("sd-scripts")} <= {*result_files(run)}
    run.keep_name()
    assert json.loads(run.names.read_text(encoding="utf-8")) == {"name": "zibu v1.2"} and not run.names_are_wrong


@pytest.mark.parametrize("left", ["loras", "result", "recipe", "nothing"])
def test_each_other_file_tells_the_name(folder: Path, copied: Path, left: str) -> None:
    shutil.copytree(folder / "runs" / "named", copied)
    run = RunDir(copied)
    harm(run, '{"name"')
    if left != "loras":
        for _, path in run.checkpoint_loras():
            path.unlink()
    for name in ("result", "recipe"):
        if name != left:
            getattr(run, name).unlink()
    assert run.name == ("lora" if left == "nothing" else "zibu v1.2")


@pytest.mark.parametrize("place", ["loras", "result", "recipe"])
def test_no_file_tells_a_name_that_is_a_path(tmp_path: Path, place: str) -> None:
    run = RunDir(tmp_path)
    for name, expected in (("../x", "lora"), ("CON", "lora"), ("zibu", "zibu")):
        if place == "recipe":
            run.recipe.write_text(f"output:\n  name: {name}\n", encoding="utf-8")
        elif place == "result":
            write_json(run.result, {"exports": [{"format": "kohya", "path": f"{name}.safetensors"}]})
        elif "/" not in name:
            run.checkpoints.mkdir(exist_ok=True)
            (run.checkpoints / f"{name}-step00000001.safetensors").touch()
        assert run.name == expected


def test_every_command_does_without_the_file_of_the_name(program: Program, folder: Path, copied: Path) -> None:
    shutil.copytree(folder / "runs" / "named", copied)
    run = RunDir(copied)
    harm(run, "{")
    said = program("status", copied)
    assert str(run.lora) in said.out and str(run.names) in said.out and run.lora.name == "zibu v1.2.safetensors"
    assert run.lora.name in program("inspect", copied).out
    assert program("sample", copied, *SAMPLE).code == 0
    assert says(program("compare", copied, "--prompt", "x").out, "output_name/step-2-3-of-3")
    assert program("report", copied).code == 0 and run.lora.name in run.report.read_text(encoding="utf-8")
    assert program("export", copied, "--format", "kohya").code == 0
    assert program.train(copied, *SETS, "train.max_train_steps=3", resume="latest").code == 0
    assert json.loads(run.names.read_text(encoding="utf-8")) == {"name": "zibu v1.2"}
    assert not [name for name in files_in(copied) if Path(name).name.startswith("lora")], "no file has another name"
    assert str(run.names) not in program("status", copied).out


def test_a_run_that_has_lost_the_file_before_its_end_goes_on(program: Program, folder: Path, copied: Path) -> None:
    """Also one with a recipe that was renamed since."""
    shutil.copytree(folder / "runs" / "named", copied)
    run = RunDir(copied)
    for path in (run.result, run.names, run.lora):
        path.unlink()
    said = program.train(copied, *SETS, "output.name=other", resume="latest")
    assert said.code == 0 and run.lora.name == "zibu v1.2.safetensors" and run.lora.is_file()


@given(st.text(max_size=40))
def test_the_name_in_a_saved_recipe_is_found(text: str) -> None:
    name = usable_stem(name_key(text))
    recipe = recipe_from({**NAMED, "output": {"name": name, "description": "output:\n  name: x"}})
    with tempfile.TemporaryDirectory() as place:
        run = RunDir(Path(place))
        run.recipe.write_text(dump_recipe(recipe), encoding="utf-8")
        assert run.name == (DEFAULT_NAME if output_name_fault(name) else name)


@given(st.text(max_size=40))
def test_a_usable_name_is_usable(text: str) -> None:
    assert not stem_fault(usable_stem(name_key(text)))
    assert bool(output_name_fault(text)) >= bool(stem_fault(text))


def test_the_longest_name_has_room_for_its_endings() -> None:
    longest = "x" * MAX_STEM_BYTES
    lora = RunDir(Path("run")).path / f"{longest}-step00000001.safetensors"
    assert not stem_fault(longest) and len(f".{lora.name}.4194304.0123abcd.tmp") < 255
