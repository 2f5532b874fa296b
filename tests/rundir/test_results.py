"""Digests of what leaves a run; what somebody else may have written into ``result.json`` names no other file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.rundir import results
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.made_from import Made, record_export
from lora_rocm.rundir.results import FileDigest
from tests.wording import says, worded

FORMS = ("kohya", "peft")


def finished(path: Path) -> RunDir:
    run_dir = RunDir(path).create()
    files = {
        "kohya": ["lora.safetensors"],
        "peft": [f"peft/unet/adapter_{name}" for name in ("model.safetensors", "config.json")],
    }
    exports = []
    for form, names in files.items():
        for name in names:
            (run_dir.path / name).parent.mkdir(parents=True, exist_ok=True)
            (run_dir.path / name).write_bytes(name.encode())
        digests = [FileDigest.of(name, name.encode()).to_json() for name in names]
        exports.append({"format": form, "path": run_dir.export_of(form).name, "files": digests})
    put(run_dir, {"updates": 7, "exports": exports})
    return run_dir


def put(run_dir: RunDir, result: Any) -> None:
    run_dir.result.write_text(json.dumps(result), encoding="utf-8")


def test_what_is_gone_or_changed_is_named(tmp_path: Path) -> None:
    run_dir = finished(tmp_path / "run")
    assert results.wrong_exports(run_dir, FORMS) == {} and results.updates_of(run_dir) == 7
    run_dir.lora.write_bytes(b"lora.safetensorS")  # as long as before
    (run_dir.peft_dir / "unet" / "adapter_model.safetensors").unlink()
    wrong = results.wrong_exports(run_dir, FORMS)
    assert says(wrong["kohya"], "rundir/lora-safetensors-is-not-what-was-written")
    assert wrong["peft"] == worded("rundir/peft-unet-adapter-model-safetensors-is-not")
    assert results.wrong_exports(run_dir, ()) == {}  # only what is asked for


def test_a_form_that_was_never_exported_is_wanted(tmp_path: Path) -> None:
    run_dir = finished(tmp_path / "run")
    assert list(results.wrong_exports(run_dir, ["kohya", "diffusers"])) == ["diffusers"]
    run_dir.diffusers_lora.write_bytes(b"by lora-rocm export")
    assert results.wrong_exports(run_dir, ["kohya", "diffusers"]) == {}


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "recipe.yaml", "peft/../../secret", "checkpoints/x"])
def test_a_path_that_is_none_of_a_run_is_not_looked_at(tmp_path: Path, path: str) -> None:
    run_dir = finished(tmp_path / "run")
    other = [{"path": path, "bytes": 1, "sha256": "0"}]
    put(run_dir, {"exports": [{"format": "kohya", "files": other}], "checkpoint_loras": other})
    assert results.wrong_exports(run_dir, FORMS) == {} and results.wrong_checkpoint_loras(run_dir) == []
    (said,) = results.faults_of_finished(run_dir)
    assert said.count(path) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda result: result["exports"][1].update(path="../secret"),
        lambda result: result["exports"][1].update(path="/etc"),
        lambda result: result["exports"][1].update(format="other"),
        lambda result: result["exports"][1]["files"][0].update(path="../secret/unet/adapter_model.safetensors"),
        lambda result: result["exports"][1]["files"][0].update(path="peft/\u202egone/../x"),
        lambda result: result["exports"][1]["files"][0].update(path="peft/gone/adapter_model.safetensors"),
        lambda result: result.update(checkpoint_loras=[{"path": "../lora.safetensors", "bytes": 1, "sha256": ""}]),
    ],
)
def test_a_path_that_leads_elsewhere_or_to_nothing_is_said(tmp_path: Path, change: Callable[[Any], None]) -> None:
    run_dir = finished(tmp_path / "run")
    assert results.faults_of_finished(run_dir) == []
    result = results.read_result(run_dir)
    change(result)
    put(run_dir, result)
    (said,) = results.faults_of_finished(run_dir)
    assert "\u202e" not in said and any(name in said for name in ("secret", "/etc", "peft", "../lora"))


@pytest.mark.parametrize(
    "result",
    [
        None,
        [],
        {"exports": 3, "checkpoint_loras": 3, "updates": "7"},
        {"exports": [3, {"format": []}, {"format": "kohya", "files": {}}], "updates": True},
        {"exports": [{"format": "kohya", "files": [3, {}, {"path": 3, "bytes": 1, "sha256": ""}]}], "updates": -1},
        {"exports": {"kohya": {}}},
        {"files": 5, "state": [1], "step": "x"},
        {"updates": 2, "exports": [{"format": "kohya", "path": ["lora.safetensors"]}]},
        {"updates": 2, "exports": [{"format": "kohya", "updates": "2"}]},
        {"updates": 2, "checkpoint_loras": [{"path": "checkpoints/lora-step00000002.safetensors"}]},
    ],
)
def test_a_result_that_this_program_did_not_write_is_none(tmp_path: Path, result: Any) -> None:
    run_dir = finished(tmp_path / "run")
    assert results.faults_of_finished(run_dir) == []
    run_dir.result.write_bytes(b"{")
    said_of_broken_json = results.faults_of_finished(run_dir)
    put(run_dir, result)
    assert results.faults_of_finished(run_dir) == said_of_broken_json != []
    assert results.wrong_exports(run_dir, FORMS) == {} and results.wrong_checkpoint_loras(run_dir) == []
    assert results.updates_of(run_dir) == 0
    record_export(run_dir, "kohya", Made(7))
    assert json.loads(run_dir.result.read_text(encoding="utf-8")) == result, "it is left as it is"


def test_a_peft_folder_without_weights_is_no_result(tmp_path: Path) -> None:
    run_dir = finished(tmp_path / "run")
    for component in ("unet", "text_encoder"):
        (run_dir.peft_dir / component).mkdir(exist_ok=True)
        (run_dir.peft_dir / component / "adapter_config.json").write_text("{}", encoding="utf-8")
        (run_dir.peft_dir / component / "adapter_model.safetensors").touch()
    assert results.final_files(run_dir) == [run_dir.lora, run_dir.peft_dir]
    (run_dir.peft_dir / "text_encoder" / "adapter_model.safetensors").unlink()
    assert results.final_files(run_dir) == [run_dir.lora]
    assert "peft" in results.wrong_exports(run_dir, ["peft"])


def test_an_export_after_the_end_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    run_dir = finished(tmp_path / "run")
    run_dir.lora.write_bytes(b"in another number format")
    assert results.wrong_exports(run_dir, FORMS)
    record_export(run_dir, "kohya", Made(7))
    assert results.wrong_exports(run_dir, FORMS) == {}
    formats = [entry["format"] for entry in results.read_result(run_dir)["exports"]]
    assert sorted(formats) == ["kohya", "peft"] and results.updates_of(run_dir) == 7
    run_dir.result.unlink()
    record_export(run_dir, "kohya", Made(7))  # a resumed run has no result yet
    assert not run_dir.result.exists()
