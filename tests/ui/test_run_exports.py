"""Exports that the page of a run begins: formats, places, progress, cancel, errors and downloads."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands import sample_export
from lora_rocm.commands.sample_export import SCRIPT
from lora_rocm.errors import StoppedError, UserError
from lora_rocm.page_parts.texts import t
from lora_rocm.processes.jobs import ExportJob
from lora_rocm.recipe.load import dump_recipe, load_recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui.pages import run_exports
from tests.supervisor.fake_run import event, safetensors_bytes, write_checkpoint
from tests.ui.site import Site, code_of

RUN = {"dir": "runs/a-run"}
TEXT_RECIPE = (
    'model: {family: causal-lm, name_or_path: "builtin:tiny-llama"}\n'
    "data: {sources: [{dataset: chats.jsonl}]}\ntrain: {max_train_steps: 1}\n"
)


class FakeChild:
    """Writes what the child of ``export`` would, with a notice before."""

    def __init__(self) -> None:
        self.jobs = list[ExportJob]()
        self.wait: Callable[[], None] = lambda: None

    def __call__(self, job: ExportJob, listen: Any, notify: Any, require_wanted: Callable[[], None]) -> None:
        self.jobs.append(job)
        notify("a <notice>")
        self.wait()
        require_wanted()
        path = job.output or RunDir(job.source).export_of(job.format)
        for each in [path / "unet" / "adapter_model.safetensors"] if job.format == "peft" else [path]:
            each.parent.mkdir(parents=True, exist_ok=True)
            each.write_bytes(safetensors_bytes(1000))
        fields = {"max_difference": 0.0, "can_read": ["reader <x>"], "cannot_read": []}
        updates = job.updates
        listen(event("export", format=job.format, path=str(path), updates=updates, checkpoint="", **fields))


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> FakeChild:
    made = FakeChild()
    monkeypatch.setattr(sample_export, "run_model_tool", made)
    return made


def begin(site: Site, file_format: str, step: str = "40", **fields: str) -> str:
    posted = {"format": file_format, "step": step, **fields}
    return site.client.post("/runs/exports/begin", params=RUN, data=posted).text


def ended(site: Site) -> str:
    work = site.context.background.of("export-runs-a-run")
    assert work is not None
    work.wait(10)
    return site.get("/runs/exports", **RUN)


def of_text(site: Site, run_dir: RunDir) -> None:
    path = site.folder / "text.yaml"
    path.write_text(TEXT_RECIPE, encoding="utf-8")
    run_dir.recipe.write_text(dump_recipe(load_recipe(path).recipe), encoding="utf-8")


def links(html: str) -> list[str]:
    return [each.replace("&amp;", "&") for each in re.findall(r'href="(/runs/download[^"]+)"', html)]


def test_each_format_that_the_command_writes_has_a_button(site: Site) -> None:
    run_dir = site.run()
    image_formats = ["kohya", "sd-scripts", "comfyui", "diffusers", "peft"]
    for file_formats in (image_formats, ["peft", "merged", "gguf"]):
        assert re.findall(r'name="format" value="([^"]+)"', site.get("/runs/exports", **RUN)) == file_formats
        of_text(site, run_dir)
    assert "/runs/exports?dir=" in site.get("/choose/run", **RUN) and 'id="exports"' in site.get("/runs/view", **RUN)
    recipe = run_dir.recipe.read_text(encoding="utf-8")
    run_dir.recipe.write_text("model: {family: ", encoding="utf-8")
    assert code_of(site.client.get("/runs/exports", params=RUN).text)
    os.rename(run_dir.checkpoint(40), run_dir.path / "elsewhere")  # a run may have neither: nothing is wrong with it
    assert t("export.no_checkpoint") in site.get("/runs/exports", **RUN)
    run_dir.recipe.write_text(recipe, encoding="utf-8")
    assert t("export.no_checkpoint") in site.get("/runs/exports", **RUN)


@pytest.mark.parametrize("file_format", ["diffusers", "peft"])
def test_a_file_is_written_shown_and_saved(file_format: str, site: Site, child: FakeChild) -> None:
    run_dir = site.run()
    site.get("/runs/files", **RUN)  # what was read before is not shown again
    begin(site, file_format)
    shown = ended(site)
    assert "badge-done" in shown and "reader &lt;x&gt;" in shown and str(run_dir.export_of(file_format)) in shown
    (job,) = child.jobs
    assert job.output is None and job.updates == 40
    (link,) = links(shown)
    answer = site.client.get(link)
    assert answer.content == safetensors_bytes(1000) and "attachment" in answer.headers["content-disposition"]
    assert link in links(site.get("/runs/files", **RUN))


def test_an_earlier_step_has_its_own_folder_that_belongs_to_the_run(site: Site, child: FakeChild) -> None:
    """The command refuses to write it among the results of a finished run."""
    run_dir = site.run()
    write_checkpoint(run_dir, 20)
    for file_format in ("diffusers", "peft"):
        begin(site, file_format, "20")
        (link,) = links(ended(site))
        assert "earlier-exports%2Fstep-00000020%2F" in link and link in links(site.get("/runs/files", **RUN))
    assert {job.output for job in child.jobs} == {
        run_dir.earlier_exports(20) / "pytorch_lora_weights.safetensors",
        run_dir.earlier_exports(20) / "peft",
    }
    assert not run_dir.export_of("diffusers").exists()
    site.client.post("/runs/delete", params=RUN)
    assert not run_dir.path.exists()


def test_an_export_is_cancelled_and_runs_once_at_a_time(site: Site, child: FakeChild) -> None:
    site.run()
    go = threading.Event()
    child.wait = lambda: bool(go.wait(10))  # type: ignore[assignment]
    assert "/runs/exports/cancel" in begin(site, "peft")
    assert code_of(begin(site, "kohya")) == "work-runs-already"
    threading.Timer(0.2, go.set).start()
    shown = site.client.post("/runs/exports/cancel", params=RUN).text
    work = site.context.background.of("export-runs-a-run")
    assert work is not None and isinstance(work.error, StoppedError) and len(child.jobs) == 1
    assert 'value="peft"' in shown and "badge-cancelled" in shown  # it may be begun again


@pytest.mark.parametrize("file_format", ["diffusers", "peft"])
@pytest.mark.parametrize("step", ["20", "40"])
@pytest.mark.parametrize("end", ["cancelled", "failed", "cancelled while writing", "done"])
def test_an_export_that_is_cancelled_leaves_nothing(
    file_format: str, step: str, end: str, site: Site, child: FakeChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = site.run()
    write_checkpoint(run_dir, 20)
    before = sorted(run_dir.path.rglob("*"))

    def stopped(job: ExportJob, *arguments: Any) -> None:
        if end == "cancelled while writing":
            child(job, *arguments)
        error = UserError("x", "It failed.") if end == "failed" else StoppedError("cancelled", "Stopped.")
        raise error

    if end != "done":
        monkeypatch.setattr(sample_export, "run_model_tool", stopped)
    begin(site, file_format, step)
    ended(site)
    after = sorted(run_dir.path.rglob("*"))
    assert (after == before) == (end != "done"), "the control: a finished export is there"
    if end != "done":  # a file that was there before is kept
        monkeypatch.setattr(sample_export, "run_model_tool", child)
        begin(site, file_format, step)
        ended(site)
        whole = sorted(run_dir.path.rglob("*"))
        monkeypatch.setattr(sample_export, "run_model_tool", stopped)
        begin(site, file_format, step)
        ended(site)
        assert sorted(run_dir.path.rglob("*")) == whole


@pytest.mark.parametrize(
    ("file_format", "step", "code"),
    [("gguf", "40", "export-form"), ("../../x", "40", "export-form"), ("peft", "30", "no-such-step")],
)
def test_errors_are_those_of_the_command(file_format: str, step: str, code: str, site: Site, child: FakeChild) -> None:
    run_dir = site.run()
    begin(site, file_format, step)
    assert code_of(ended(site)) == code and child.jobs == []
    assert code_of(begin(site, "peft", "x")) == "number-wrong"
    assert code_of(begin(site, "peft", "20.7")) == "number-wrong", "it would have been taken as step 20"
    assert not run_dir.earlier_exports(0).parent.exists()
    assert site.get("/runs/exports", **RUN, step="9" * 5000).count("selected") == 1


def test_a_missing_converter_is_named_before_the_export(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, run_dir = 'class="converter-missing"', site.run()
    assert mark not in site.get("/runs/exports", **RUN), "no format of an image model needs it"
    of_text(site, run_dir)
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    assert mark in site.get("/runs/exports", **RUN)
    (site.folder / SCRIPT).touch()
    monkeypatch.setenv("LLAMA_CPP", str(site.folder))
    assert mark not in site.get("/runs/exports", **RUN)


def test_the_converter_is_in_a_named_folder(site: Site, child: FakeChild, tmp_path: Path) -> None:
    of_text(site, site.run())
    begin(site, "gguf")
    assert code_of(ended(site)) == "gguf-converter-missing"
    inside, outside = site.folder / "llama.cpp", tmp_path / "elsewhere"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / SCRIPT).touch()
    assert code_of(begin(site, "gguf", llama_cpp=str(outside))) == "outside-folders"
    assert code_of(begin(site, "gguf", llama_cpp="nothing")) == "no-folder" and child.jobs == []
    begin(site, "gguf", llama_cpp="llama.cpp")
    assert "badge-done" in ended(site) and child.jobs[0].converter == (inside / SCRIPT).resolve()


def test_room_is_asked_for_only_if_a_model_is_loaded(
    site: Site, child: FakeChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule of pictures: there has to be room. A conversion loads no model."""
    run_dir = site.run()
    of_text(site, run_dir)
    asked = list[object]()
    monkeypatch.setattr(run_exports, "require_room", lambda folders, wanted: asked.append(wanted))
    for file_format in ("merged", "peft"):
        begin(site, file_format)
        assert "badge-done" in ended(site)
        assert asked == ([run_dir] if file_format == "peft" else [])


def test_a_folder_that_leads_out_of_the_run_is_not_listed(site: Site, tmp_path: Path) -> None:
    run_dir = site.run()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "adapter_model.safetensors").write_bytes(safetensors_bytes(1000))
    whole = run_dir.earlier_exports(20)
    whole.mkdir(parents=True)
    os.symlink(outside, whole / "peft")
    os.symlink(outside / "adapter_model.safetensors", whole / "lora.safetensors")
    assert "earlier-exports" not in site.get("/runs/files", **RUN)
    file = "earlier-exports/step-00000020/peft/adapter_model.safetensors"
    assert code_of(site.client.get("/runs/download", params={**RUN, "file": file}).text) == "outside-folders"
    (whole / "lora.gguf").write_bytes(b"x")
    assert "lora.gguf" in site.get("/runs/files", **RUN)  # the control
