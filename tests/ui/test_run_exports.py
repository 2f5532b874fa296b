"""Exports that the page of a run begins: formats, places, progress, cancel, errors and downloads."""

from __future__ import annotations

import io
import os
import re
import threading
import zipfile
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
from lora_rocm.ui.background import key_of
from lora_rocm.ui.folder_zip import PIECE_BYTES, zip_name
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
    work = site.context.background.of(key_of("export", "runs/a-run"))
    assert work is not None
    work.wait(10)
    return site.get("/runs/exports", **RUN)


def of_text(site: Site, run_dir: RunDir) -> None:
    path = site.folder / "text.yaml"
    path.write_text(TEXT_RECIPE, encoding="utf-8")
    run_dir.recipe.write_text(dump_recipe(load_recipe(path).recipe), encoding="utf-8")


def links(html: str) -> list[str]:
    return [each.replace("&amp;", "&") for each in re.findall(r'href="(/runs/(?:download|zip)[^"]+)"', html)]


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
    assert "attachment" in answer.headers["content-disposition"]
    if file_format == "peft":
        assert unpacked(answer.content) == {"a-run-peft/unet/adapter_model.safetensors": safetensors_bytes(1000)}
    else:
        assert answer.content == safetensors_bytes(1000)
    assert link in links(site.get("/runs/files", **RUN))


def unpacked(content: bytes) -> dict[str, bytes]:
    """The files of a ZIP file, which are not compressed and have their checksums."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        assert {each.compress_type for each in archive.infolist()} == {zipfile.ZIP_STORED}
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_folder_is_saved_as_one_zip_file_for_each_step(site: Site, child: FakeChild) -> None:
    run_dir = site.run()
    of_text(site, run_dir)
    write_checkpoint(run_dir, 20)
    run_dir.checkpoint_lora(20).write_bytes(safetensors_bytes(1000))
    for step, whole in ((20, run_dir.earlier_exports(20) / "peft"), (40, run_dir.peft_dir)):
        begin(site, "peft", str(step))
        ended(site)
        (whole / "unet" / "adapter_config.json").write_text(f'{{"step": {step}}}', encoding="utf-8")
    weights = run_dir.peft_dir / "unet" / "adapter_model.safetensors"
    weights.write_bytes(large := safetensors_bytes(3 * PIECE_BYTES + 7))
    offered = links(site.get("/choose/take", **RUN))
    assert [re.findall(r"step-0*(\d+)", each) for each in offered] == [["20"], []]
    assert set(offered) <= set(links(site.get("/runs/files", **RUN)))
    for link, top, step, size in (
        (offered[0], "a-run-step-00000020-peft", 20, safetensors_bytes(1000)),
        (offered[1], "a-run-peft", 40, large),
    ):
        answer = site.client.get(link)
        assert f'filename="{top}.zip"' in answer.headers["content-disposition"]
        assert unpacked(answer.content) == {
            f"{top}/unet/adapter_config.json": f'{{"step": {step}}}'.encode(),
            f"{top}/unet/adapter_model.safetensors": size,
        }
    # Only results are packed, and no name leads out of the folder in which a user unpacks
    refused = {"checkpoints": "file-unknown", "peft/unet": "file-unknown", "../..": "outside-folders"}
    for file, code in refused.items():
        assert code_of(site.client.get("/runs/zip", params={**RUN, "file": file}).text) == code
    for name in ("a\\..\\x", ".hidden", "more/deep"):  # the page does not list the last two
        odd = run_dir.peft_dir / "unet" / name
        odd.parent.mkdir(exist_ok=True)
        odd.touch()
        assert code_of(site.client.get(offered[1]).text) == "folder-not-zipped", name
        odd.unlink()
    assert site.client.get(offered[1]).status_code == 200


def test_a_zip_file_has_a_name_that_is_safe_everywhere(tmp_path: Path) -> None:
    for name, safe in (("..\\x", "x-peft"), ("a:b c", "a-b-c-peft"), ("zibú", "zibú-peft"), ("...", "peft")):
        assert zip_name(RunDir(tmp_path / name), tmp_path / name / "peft") == safe


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
    work = site.context.background.of(key_of("export", "runs/a-run"))
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


def test_enter_in_a_field_begins_no_export(site: Site) -> None:
    """Enter presses the first submit button around the field, unless it is disabled."""
    of_text(site, site.run())
    form = site.get("/runs/exports", **RUN).partition("<form")[2].partition("</form>")[0]
    buttons = [each for each in re.findall(r"<button[^>]*>", form) if 'type="button"' not in each]
    assert "disabled" in buttons[0] and not any(" disabled" in each for each in buttons[1:]) and len(buttons) > 2
    assert 'type="text"' in form


def test_what_was_chosen_for_an_export_stays_chosen_after_it(site: Site, child: FakeChild) -> None:
    """Otherwise the next format would silently be of another step."""
    run_dir = site.run()
    of_text(site, run_dir)
    write_checkpoint(run_dir, 20)
    go = threading.Event()
    child.wait = lambda: bool(go.wait(10))  # type: ignore[assignment]
    assert re.findall(r'<option value="(\d+)" selected', site.get("/runs/exports", **RUN)) == ["40"]
    running = begin(site, "peft", "20", llama_cpp="my llama")
    kept = dict(re.findall(r'<input type="hidden" id="[^"]*" name="(\w+)" value="([^"]*)">', running))
    go.set()
    ended(site)
    shown = site.get("/runs/exports", **RUN, **kept)
    assert re.findall(r'<option value="(\d+)" selected', shown) == ["20"] and 'value="my llama"' in shown
    for page in ("/runs/view", "/choose/run"):  # each question of this box has the fields
        assert re.search(r'id="exports"[^>]*hx-include="#export-step, #field-llama_cpp"', site.get(page, **RUN)), page


def test_without_a_converter_the_button_of_gguf_is_disabled_with_the_reason(
    site: Site, child: FakeChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disabled(**query: str) -> list[str]:
        """The disabled buttons. Each is described by the element with the reason, and posts nothing."""
        shown = site.get("/runs/exports", **RUN, **query)
        found = re.findall(r'<button id="export-(\w+)" type="button" aria-disabled="true"', shown)
        assert found == re.findall(
            r'aria-describedby="export-(\w+)-what">[^<]*</button> <span[^>]*>[^<]*<b class', shown
        )
        return found

    run_dir = site.run()
    assert disabled() == [], "no format of an image model needs it"
    of_text(site, run_dir)
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    assert disabled() == ["gguf"]
    # The server refuses at the same place
    assert code_of(begin(site, "gguf")) == "gguf-converter-missing"
    assert site.context.background.of(key_of("export", "runs/a-run")) is None
    # A folder in the field counts before it is posted, and only with the script in it
    (site.folder / "llama.cpp").mkdir()
    assert disabled(llama_cpp="llama.cpp") == ["gguf"] == disabled(llama_cpp="nothing") == disabled(llama_cpp="/")
    (site.folder / "llama.cpp" / SCRIPT).touch()
    assert disabled(llama_cpp="llama.cpp") == [] and disabled() == ["gguf"]
    monkeypatch.setenv("LLAMA_CPP", str(site.folder / "llama.cpp"))
    assert disabled() == []


def test_the_converter_is_in_a_named_folder(site: Site, child: FakeChild, tmp_path: Path) -> None:
    of_text(site, site.run())
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
