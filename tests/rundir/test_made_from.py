"""Exported files of an earlier step are distinguished from exports of the run's present state, in every format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_rocm.commands.start_run import results_of
from lora_rocm.commands.status import status, status_text
from lora_rocm.foundation.files import write_json
from lora_rocm.report.report import write_report
from lora_rocm.rundir.checkpoint_record import Position
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.made_from import (
    Made,
    keep_made,
    made_from,
    newest_lora,
    record_export,
    stale_exports,
    state_now,
)
from lora_rocm.rundir.recipe_file import accept
from lora_rocm.rundir.results import FORMS, LORA_FORMS, result_files
from lora_rocm.train.checkpoint import Checkpoint
from tests.supervisor.fake_run import safetensors_bytes, write_checkpoint, write_whole_run
from tests.wording import says, says_if


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A finished run of 40 steps."""
    made = RunDir(tmp_path / "run")
    write_whole_run(made)
    made.lora.unlink()
    write_json(made.result, {"updates": 40, "exports": []})
    return made


def put(run_dir: RunDir, form: str, steps: int = 0) -> Path:
    """A file or folder of a format. steps: in its metadata."""
    place = run_dir.export_of(form)
    header = json.dumps({"__metadata__": {"ss_steps": str(steps)}} if steps else {}).encode()
    content = len(header).to_bytes(8, "little") + header
    if form in ("peft", "merged"):
        folder = place / "unet" if form == "peft" else place
        folder.mkdir(parents=True)
        (folder / ("adapter_config.json" if form == "peft" else "config.json")).write_text("{}", encoding="utf-8")
        (folder / ("adapter_model.safetensors" if form == "peft" else "model.safetensors")).write_bytes(content)
    else:
        place.write_bytes(b"GGUF" if form == "gguf" else content)
    return place


def told(run_dir: RunDir, path: Path) -> list[bool]:
    """Whether status, report and the end of ``train`` report that a file is of step 20 while the run is at 40."""
    words = "made at step 20, the run is at 40"
    found = status(run_dir)
    assert (path in found.files) == (words not in status_text(found)), "it is a result, or it is explained"
    html = write_report(run_dir).read_text(encoding="utf-8")
    assert path.name in html, "the report names every file"
    return [words in text for text in (status_text(found), html, _shown(run_dir))]


def _shown(run_dir: RunDir) -> str:
    """Of a finished run, at the end of ``train``."""
    files, remarks = results_of(run_dir)
    return "\n".join([*map(str, files), *remarks])


@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_an_earlier_step_is_no_result(run_dir: RunDir, form: str) -> None:
    path = put(run_dir, form)
    record_export(run_dir, form, Made(20, "a"))
    assert told(run_dir, path) == [True] * 3
    (stale,) = stale_exports(run_dir).values()
    assert f"lora-rocm export {run_dir.path} --format {form}" in stale.sentence
    assert says_if(form == "merged", stale.sentence, "rundir/remove-the-folder"), (
        "an export into a full folder is refused"
    )
    record_export(run_dir, form, Made(40))
    assert told(run_dir, path) == [False] * 3, "the control"
    assert str(path) in status_text(status(run_dir)) and str(path) in _shown(run_dir)


@pytest.mark.parametrize("form", FORMS)
def test_it_is_known_while_the_run_goes_on_and_after_its_end(run_dir: RunDir, form: str) -> None:
    """The end of the run replaces ``result.json``, which has no word about files that it did not write."""
    put(run_dir, form)
    record_export(run_dir, form, Made(40, state_now(run_dir).checkpoint))  # type: ignore[union-attr]
    assert stale_exports(run_dir) == {}
    write_checkpoint(run_dir, 60)
    accept(run_dir)
    assert not run_dir.result.exists() and stale_exports(run_dir)[form].made.updates == 40  # type: ignore[union-attr]
    write_json(run_dir.result, {"updates": 60, "exports": []})
    assert says(status_text(status(run_dir)), "rundir/made-at-step-40-the-run-is")
    kept = {"updates": 60, "exports": [{"format": "kohya", "path": "lora.safetensors"}]}
    write_json(run_dir.result, kept)
    assert ("kohya" in stale_exports(run_dir)) is False, "the end wrote it again"


def test_what_a_run_of_an_earlier_version_wrote_is_of_its_end(run_dir: RunDir) -> None:
    for form in LORA_FORMS:
        put(run_dir, form)
    write_json(run_dir.result, {"updates": 40, "exports": [{"format": form} for form in LORA_FORMS]})
    assert stale_exports(run_dir) == {}
    keep_made(run_dir)
    run_dir.result.unlink()
    assert made_from(run_dir) == dict.fromkeys(LORA_FORMS, Made(40))


def test_a_step_that_was_trained_again_is_another(run_dir: RunDir) -> None:
    put(run_dir, "merged")
    record_export(run_dir, "merged", Made(40, "other"))
    assert "trained again" in stale_exports(run_dir)["merged"].reason
    now = state_now(run_dir)
    assert now is not None and now.checkpoint
    record_export(run_dir, "merged", now)
    assert stale_exports(run_dir) == {}, "the control"


@pytest.mark.parametrize("form", FORMS)
def test_without_a_record_a_lora_file_tells_its_step_itself(run_dir: RunDir, form: str) -> None:
    put(run_dir, form, steps=20)
    made = stale_exports(run_dir)[form].made
    assert made == (Made(20) if form in LORA_FORMS else None)


def test_the_identity_is_the_digest_of_the_checkpoint(run_dir: RunDir) -> None:
    state = json.loads((run_dir.checkpoint(40) / "state.json").read_text(encoding="utf-8"))
    position = Position(updates=40, iteration=40, attempt=0)
    checkpoint = Checkpoint(run_dir.checkpoint(40), position, {}, state["sha256"])
    assert state_now(run_dir) == Made(40, checkpoint.digest)


def test_a_lora_of_an_earlier_step_is_not_drawn_with(run_dir: RunDir) -> None:
    put(run_dir, "kohya")
    record_export(run_dir, "kohya", Made(20))
    assert newest_lora(run_dir) == run_dir.checkpoint_lora(40)
    record_export(run_dir, "kohya", Made(40))
    assert newest_lora(run_dir) == run_dir.lora, "the control"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "3", '{"merged": 3}', '{"merged": {"updates": "20"}}', '{"merged": {"updates": -1}}', "[" * 9999],
)
def test_a_record_that_this_program_did_not_write_says_nothing(run_dir: RunDir, content: str) -> None:
    path = put(run_dir, "merged")
    run_dir.exports.write_text(content, encoding="utf-8")
    assert says(stale_exports(run_dir)["merged"].reason, "rundir/step-that-is-not-known")
    assert path in result_files(run_dir) and "unknown step" in status_text(status(run_dir))


@pytest.mark.parametrize("form", ["merged", "gguf"])
def test_a_damaged_model_is_no_file(run_dir: RunDir, form: str) -> None:
    path = put(run_dir, form)
    record_export(run_dir, form, Made(40))
    assert path in status(run_dir).files, "the control"
    (path / "model.safetensors" if form == "merged" else path).write_bytes(safetensors_bytes(99)[:20])
    assert path not in status(run_dir).files
