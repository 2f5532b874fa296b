"""report.html: whole, partial, escaped, bounded."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from lora_rocm.errors import StorageError
from lora_rocm.foundation.files import write_json
from lora_rocm.page_parts.inlined import inlined_files
from lora_rocm.report import incident_texts, report
from lora_rocm.report.report import write_report
from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.layout import RunDir
from lora_rocm.telemetry.reader import reading
from tests.hardware.situations import facts_of
from tests.supervisor.fake_run import (
    change_fields,
    data_fields,
    event,
    failure_fields,
    restart_fields,
    save_recipe,
    start_fields,
    step_fields,
    write_whole_run,
)
from tests.telemetry.trees import read_as
from tests.wording import saying, says, says_if, worded

VOID = {"meta", "img", "line", "circle", "polyline", "br"}


class Checker(HTMLParser):
    """Tags have to match; gathers titles, sources and tag names."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.sources: list[str] = []
        self.headings: list[str] = []
        self.own: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.own.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if self.open and self.open[-1] == "script":
            self.own[-1] += data


def checked(path: Path) -> tuple[str, Checker]:
    html = path.read_text(encoding="utf-8")
    checker, own = Checker(), inlined_files()
    checker.feed(html)
    assert checker.open == []
    assert "link" not in checker.tags and checker.own in ([], [own.library, own.module]), "only the program's scripts"
    assert all(source.startswith("data:image/") for source in checker.sources)
    return html, checker


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()


def test_a_whole_run(run_dir: RunDir) -> None:
    write_whole_run(run_dir)
    html, checker = checked(write_report(run_dir))
    assert checker.headings == [
        worded("report/files-and-how-to-use-them"),
        "Has it learned the concept?",
        worded("report/before-and-after"),
        "Curves",
        worded("report/steps-that-stand-out"),
        worded("report/previews-over-time"),
        "Guard",
        "Events",
        "Cache",
        worded("report/exports-loaded-back"),
        "Data",
        "Timings",
        "Recipe",
        "Environment",
    ]
    assert html.count("<still-chart ") == 3 and html.count("<img") == 1 + 9
    for words in ("Finished: 40 steps", "0.97", "control 0.51", "200 transfers were checked, none failed", "1.5e-06",
                  "were checked 2 times: always correct",
                  "reader &lt;x&gt;", "pics/&lt;bad&gt;.png", "96x160", "a &amp; b", "5.00 it/s", "trigger word",
                  "&lt;latents&gt; differ", "not installed", "because",
                  "never trained on: 1 of image", "pics/&lt;c&gt;.png"):  # fmt: skip
        assert words in html, words
    assert "<b>zibu" not in html and "alert(1)</script>" not in html.replace("&lt;/script&gt;", "")


@pytest.mark.parametrize(("cannot_read", "in_diffusers"), [([], True), (["diffusers (reads nothing of it)"], False)])
def test_a_program_that_cannot_read_the_file_is_not_recommended(
    run_dir: RunDir, cannot_read: list[str], in_diffusers: bool
) -> None:
    write_whole_run(run_dir)
    event = {"type": "export", "format": "kohya", "path": "lora.safetensors", "max_difference": 0.0, "can_read": ["A"]}
    with run_dir.events().open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": 9e9, "session": 1, **event, "cannot_read": cannot_read}) + "\n")
    html, _ = checked(write_report(run_dir))
    assert ("load_lora_weights" in html) is in_diffusers
    assert says_if(not in_diffusers, html, "report/not-or-not-exactly-by-diffusers")


def test_what_an_optimizer_tells_of_itself_is_drawn(run_dir: RunDir) -> None:
    writer = EventWriter(run_dir.events())
    for updates in range(1, 9):
        writer.write(event("step", **step_fields(updates, optimizer={"prodigy_d": 1e-6 * updates})))
    writer.close()
    html, _ = checked(write_report(run_dir))
    assert html.count("<still-chart ") == 3 and "<h3>prodigy d</h3>" in html


def test_losses_that_are_watched_and_measures_of_held_out_samples_are_drawn(run_dir: RunDir) -> None:
    writer = EventWriter(run_dir.events())
    for updates in (0, 5, 10):
        writer.write(event("watched", updates=updates, loss=1.0 + updates))
        writer.write(event("step", **step_fields(updates + 41, measures={"reward margin": 0.1 * updates})))
        writer.write(event("validation", updates=updates, loss=0.6, measures={"accuracy": 0.5 + updates / 20}))
    writer.close()
    html, _ = checked(write_report(run_dir))
    for title in ("Held-out loss", "Watched loss", "Held-out accuracy", "Reward margin"):
        assert f"<h3>{title}</h3>" in html
    assert "perplexity" not in html, "no recipe says that these are texts"


def test_an_empty_directory(run_dir: RunDir) -> None:
    _, checker = checked(write_report(run_dir))
    assert checker.headings == []


@pytest.mark.parametrize(
    "missing",
    ["recipe.yaml", "environment.json", "result.json", "events.jsonl", "samples", "lora.safetensors", "checkpoints"],
)
def test_without_any_one_part(run_dir: RunDir, missing: str) -> None:
    write_whole_run(run_dir)
    path = run_dir.path / missing
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    checked(write_report(run_dir))


@pytest.mark.parametrize("home", ["/home/alice", "C:\\Users\\alice", "own"])
def test_a_report_has_no_home_folder(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    if home == "own":
        home = str(tmp_path / "homes" / "alice")
        monkeypatch.setenv("HOME" if os.name != "nt" else "USERPROFILE", home)
    write_whole_run(run_dir)
    place = "\\".join((home, "pictures")) if home.startswith("C:") else f"{home}/pictures"
    recipe = run_dir.recipe.read_text(encoding="utf-8")
    run_dir.recipe.write_text(recipe + f"# {place}\n", encoding="utf-8")
    variables = {"MIOPEN_USER_DB_PATH": place, "LD_LIBRARY_PATH": f"/opt/rocm/lib:{place}:/data/alice/lib"}
    rows = [{"variable": name, "value": value, "why": place} for name, value in variables.items()]
    write_json(run_dir.environment, {"variables": rows, "machine": {"variables": variables, "app_dir": place}})
    writer = EventWriter(run_dir.events())
    where = [{"where": place, "what": place, "fix": place}]
    writer.write(event("data", **data_fields(set_aside=where, notices=[f"In {place} is nothing."])))
    writer.write(event("error", code="c", what=f"No {place}.", where=place, fix=place, exit_code=3))
    writer.close()
    html, _ = checked(write_report(run_dir))
    assert "alice" not in html and html.count("&lt;home&gt;") > 8 and "MIOPEN_USER_DB_PATH" in html
    assert "/opt/rocm/lib" in html and "a zibu" in html


def test_damaged_parts(run_dir: RunDir) -> None:
    write_whole_run(run_dir)
    for path in (run_dir.recipe, run_dir.environment, run_dir.result, run_dir.samples_at(20) / "01.png"):
        path.write_bytes(b"\xff{")
    with run_dir.events().open("ab") as file:
        file.write(b'{"type": "step", "upda')
    html, _ = checked(write_report(run_dir))
    assert "Finished: 40 steps" in html and says(html, "report/result-json-cannot-be-read") and html.count("<img") == 9


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "too large", "link to a plain file"])
def test_a_recipe_that_is_no_plain_file_is_neither_waited_for_nor_read_without_end(run_dir: RunDir, kind: str) -> None:
    write_whole_run(run_dir)
    text = run_dir.recipe.read_bytes()
    run_dir.recipe.unlink()
    if kind == "pipe":
        if not hasattr(os, "mkfifo"):
            pytest.skip("this system has no pipes with names")
        os.mkfifo(run_dir.recipe)
    elif kind == "too large":
        run_dir.recipe.write_bytes(text + b"#" * report.MAX_RECIPE_BYTES)
    else:
        (run_dir.path / "elsewhere").write_bytes(text)
        try:
            run_dir.recipe.symlink_to(run_dir.path / "elsewhere")
        except OSError:
            pytest.skip("no links may be made here")
    _, checker = checked(write_report(run_dir))
    assert ("Recipe" in checker.headings) == (kind == worded("report/link-to-a-plain-file")) and says(
        checker.headings, "report/exports-loaded-back"
    )


def test_a_report_is_not_replaced_by_one_without_events(run_dir: RunDir) -> None:
    write_whole_run(run_dir)
    before = write_report(run_dir).read_bytes()
    whole = run_dir.events().read_bytes()
    run_dir.events().write_bytes(b"garbage\n")
    with pytest.raises(StorageError, check=saying("report/gone-or-damaged")):
        write_report(run_dir)
    assert run_dir.report.read_bytes() == before
    run_dir.events().write_bytes(whole)
    assert write_report(run_dir).read_bytes() == before


def test_an_error_is_the_headline(run_dir: RunDir) -> None:
    save_recipe(run_dir)
    writer = EventWriter(run_dir.events(), session=1)
    writer.write(event("start", **start_fields()))
    writer.write(event("data", **data_fields(set_aside=[], notices=[])))
    writer.write(event("step", **step_fields(1, loss=float("nan"), step_s=0.0)))
    writer.write(event("error", code="c", what="The disk is full.", where="/x", fix="Free it.", exit_code=3))
    writer.close()
    html, checker = checked(write_report(run_dir))
    assert says(html, "report/ended-at-step-1-of-40-the") and "Free it." in html
    assert html.count("<still-chart ") == 1  # the loss was never finite, so it has no plot


def test_sizes_are_bounded(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = Image.effect_noise((700, 700), 90).convert("RGB")
    for updates in range(30):
        run_dir.samples_at(updates).mkdir(parents=True)
        noise.resize((64, 64)).save(run_dir.samples_at(updates) / "00.png")
    noise.save(run_dir.samples_at(29) / "00.png")
    for number in range(1, 12):
        shutil.copy(run_dir.samples_at(29) / "00.png", run_dir.samples_at(29) / f"{number:02d}.png")
    html, _ = checked(write_report(run_dir))
    assert len(re.findall("<tr><th scope=.row.>(?:before|step)", html)) == report.MAX_ROUNDS
    assert html.count("<img") == report.MAX_ROUNDS - 1 + report.MAX_PROMPTS
    assert len(html) < 3_000_000


def test_a_canary_that_failed_is_told(run_dir: RunDir) -> None:
    writer = EventWriter(run_dir.events(), session=1)
    writer.write(event("step", **step_fields(1)))
    writer.write(event("canary", updates=0, passed=True, checks=["sums"], detail="", seconds=0.01))
    writer.write(event("canary", updates=9, passed=False, checks=["sums"], detail="sums: <3> is wrong", seconds=0.01))
    writer.close()
    html, _ = checked(write_report(run_dir))
    assert says(html, "report/looked-at-2-times-1-of-them")


def test_guard_counts_add_up_over_sessions(run_dir: RunDir) -> None:
    for session, (checks, failures) in enumerate([(10, 1), (4, 0)], start=1):
        writer = EventWriter(run_dir.events(), session=session)
        writer.write(event("start", **start_fields(resumed_from=session - 1)))
        writer.write(event("step", **step_fields(session, transfer_checks=checks, transfer_failures=failures)))
        writer.close()
    html, _ = checked(write_report(run_dir))
    assert says(html, "report/14-transfers-were-checked-1-failed-and")
    assert says(html, "report/started-2-times")


def failures(run_dir: RunDir, effect: str = "exact", attempt: int = 0) -> None:
    """Of a supervisor: a hang, a change, a restart; then a worker that changes something itself."""
    worker = EventWriter(run_dir.events(), session=1)
    worker.write(event("start", **start_fields()))
    supervisor = EventWriter(run_dir.events("supervisor"), session=1)
    ended = failure_fields(what="Killed.\nThe end of its log:\n    <i>last</i> words", kernel_log=[])
    supervisor.write(event("failure", **ended))
    log = ["[ 12.5] amdgpu: <ring> gfx_0.0.0 timeout & reset"]
    supervisor.write(
        event(
            "failure",
            **failure_fields(seen="hang", silent_s=312.0, limit_s=300.0, stacks="<b>stacks</b>-1.txt", kernel_log=log),
        )
    )
    supervisor.write(event("change", **change_fields(effect=effect)))
    supervisor.write(event("restart", **restart_fields(attempt=attempt)))
    time.sleep(0.005)  # events have milliseconds
    worker.write(
        event("change", **change_fields(id="checkpointing", seen="out-of-memory", text="<i>again</i>", effect=effect))
    )
    worker.close()
    supervisor.close()


@pytest.mark.parametrize(
    ("effect", "attempt", "words", "others"),
    [
        ("exact", 0, incident_texts.EXACT, (incident_texts.ROUNDING, incident_texts.OTHER_NOISE)),
        ("rounding", 0, incident_texts.ROUNDING, (incident_texts.EXACT, incident_texts.OTHER_NOISE)),
        ("rounding", 1, incident_texts.OTHER_NOISE, (incident_texts.EXACT, incident_texts.ROUNDING)),
    ],
)
def test_restarts_and_changes_are_told_with_the_promise_that_holds(
    run_dir: RunDir, effect: str, attempt: int, words: str, others: tuple[str, ...]
) -> None:
    failures(run_dir, effect, attempt)
    html, checker = checked(write_report(run_dir))
    assert "Events" in checker.headings
    shown = unescape(html)
    assert words in shown and not [other for other in others if other in shown]
    assert says(html, "report/was-started-again-once") and "&lt;ring&gt; gfx_0.0.0 timeout &amp; reset" in html
    assert "after step 12: Killed.</p>" in html and "&lt;i&gt;last&lt;/i&gt; words</pre>" in html
    assert "&lt;b&gt;stacks&lt;/b&gt;-1.txt" in html and "&lt;i&gt;again&lt;/i&gt;" in html
    rows = re.findall('badge-(failure|change|restart)">', html)
    assert rows == ["change", "restart", "change", "failure", "failure"], "the newest first, from both files"


@pytest.mark.parametrize("missing", ["events.jsonl", "events.supervisor.jsonl"])
def test_each_event_file_is_told_without_the_other(run_dir: RunDir, missing: str) -> None:
    failures(run_dir)
    (run_dir.path / missing).unlink()
    html, checker = checked(write_report(run_dir))
    assert "Events" in checker.headings
    assert ("again</i>" in html.replace("&lt;", "<").replace("&gt;", ">")) is (missing != "events.jsonl")


def test_restarts_alone_change_nothing(run_dir: RunDir) -> None:
    supervisor = EventWriter(run_dir.events("supervisor"), session=1)
    supervisor.write(event("restart", **restart_fields()))
    supervisor.close()
    html, _ = checked(write_report(run_dir))
    shown = unescape(html)
    assert incident_texts.UNCHANGED in shown and incident_texts.EXACT not in shown


def test_a_run_without_trouble_has_no_such_part(run_dir: RunDir) -> None:
    write_whole_run(run_dir)
    html, _ = checked(write_report(run_dir))
    assert not re.findall('badge-(failure|change|restart)">', html) and 'class="notice"' not in html


def test_a_hang_without_a_last_word_is_the_headline(run_dir: RunDir) -> None:
    failures(run_dir)
    html, _ = checked(write_report(run_dir))
    assert says(html, "report/ended-at-step-0-of-the-training")
    time.sleep(0.005)  # events have milliseconds
    writer = EventWriter(run_dir.events(), session=2)
    writer.write(event("start", **start_fields(resumed_from=2)))
    writer.close()
    html, _ = checked(write_report(run_dir))
    assert "Not finished" in html and "Ended at" not in html


def test_an_error_that_was_got_over_is_no_headline(run_dir: RunDir) -> None:
    writer = EventWriter(run_dir.events(), session=1)
    writer.write(event("start", **start_fields()))
    writer.write(event("error", code="c", what="The copies failed.", where="", fix="", exit_code=3))
    assert says(checked(write_report(run_dir))[0], "report/ended-at-step-0-of-the-copies")
    writer.write(event("start", **start_fields(resumed_from=2)))
    writer.close()
    html, _ = checked(write_report(run_dir))
    assert "The copies failed." not in html and "Not finished" in html


def test_a_spike_is_in_the_table(run_dir: RunDir) -> None:
    writer = EventWriter(run_dir.events(), session=1)
    for updates in range(1, 40):
        writer.write(event("step", **step_fields(updates, loss=7.5 if updates == 30 else 0.1)))
    writer.close()
    html, _ = checked(write_report(run_dir))
    assert "<td>30</td><td>7.5</td><td>0.1</td>" in html


def test_memory_that_spilled_is_told(run_dir: RunDir) -> None:
    facts = facts_of("windows-rx9070xt")
    write_json(run_dir.environment, {"machine": facts.to_json()})
    writer = EventWriter(run_dir.events(), session=1)
    for updates in range(1, 60):
        writer.write(event("step", **step_fields(updates, step_s=0.2 if updates < 30 else 0.9, memory_bytes=2**34)))
    writer.close()
    html, _ = checked(write_report(run_dir))
    assert "times slower" in html and says(html, "report/memory-is-full")
    write_json(run_dir.environment, {"machine": facts_of("linux-rx7900xtx").to_json()})
    assert "times slower" not in checked(write_report(run_dir))[0]


HEADLINE = "Has it learned the concept?"
BELOW = "Are the previews nearer to the training images?"


def with_score(run_dir: RunDir, **fields: object) -> Checker:
    """The report of a run with these fields in its newest concept score."""
    write_whole_run(run_dir)
    score = {"score": 0.9, "control": None, "detail": {}, **fields}
    with run_dir.events().open("a", encoding="utf-8") as file:
        file.write(json.dumps({"type": "concept", "time": 1.0, "session": 0, **score}) + "\n")
    return checked(write_report(run_dir))[1]


@pytest.mark.parametrize(
    ("fields", "heading"),
    [
        ({"previews": 8, "demo": False}, HEADLINE),
        ({"previews": 7, "demo": False}, BELOW),
        ({"previews": 3, "demo": True}, BELOW),
        ({}, BELOW),  # of an earlier version
    ],
)
def test_a_score_of_few_previews_is_no_headline(run_dir: RunDir, fields: dict[str, int], heading: str) -> None:
    headings = with_score(run_dir, **fields).headings
    assert [title for title in headings if title in (HEADLINE, BELOW)] == [heading]
    assert (heading in headings[:2]) == (heading == HEADLINE), "it is at the top only as a headline"
    html = run_dir.report.read_text(encoding="utf-8")
    assert ("rough" in html) == (not fields.get("demo"))
    assert ("sample.images_per_prompt" in html) == (heading == BELOW and not fields.get("demo"))


def test_previews_that_are_not_shown_are_counted(run_dir: RunDir) -> None:
    folder = run_dir.samples_at(5)
    folder.mkdir(parents=True)
    for number in range(12):
        (folder / f"{number:02d}.txt").write_text(f"answer {number}", encoding="utf-8")
    html, _ = checked(write_report(run_dir))
    assert says(html, "report/8-of-12-prompts") and "answer 7" in html and "answer 8" not in html
    run_dir.report.unlink()
    for number in range(8, 12):
        (folder / f"{number:02d}.txt").unlink()
    assert "8 of" not in checked(write_report(run_dir))[0], "the control: all are shown"
    run_dir.report.unlink()
    for updates in range(20):
        run_dir.samples_at(updates).mkdir(parents=True, exist_ok=True)
        (run_dir.samples_at(updates) / "00.txt").write_text("a", encoding="utf-8")
    assert says(checked(write_report(run_dir))[0], "report/12-of-20-rounds")


def test_a_run_of_a_language_model_says_how_its_files_are_used(run_dir: RunDir) -> None:
    texts = "{family: causal-lm, name_or_path: 'builtin:tiny-llama'}"
    recipe = f"model: {texts}\ndata: {{path: x}}\ntrain: {{max_train_steps: 1}}\n"
    run_dir.recipe.write_text(recipe, encoding="utf-8")
    folder = run_dir.peft_dir / "model"
    folder.mkdir(parents=True)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (folder / name).write_bytes(b"{}")
    html, _ = checked(write_report(run_dir))
    assert f"lora-rocm chat {run_dir.path.name}" in html and "<td>peft/model</td>" in html
    run_dir.report.unlink()
    run_dir.recipe.write_text("data: {path: x}\ntrain: {max_train_steps: 1}\n", encoding="utf-8")
    assert "lora-rocm chat" not in checked(write_report(run_dir))[0], "the control: a run of images"


def test_values_of_the_environment_are_for_people(run_dir: RunDir) -> None:
    machine = {"cpu": "x", "gpus": [], "windows": None, "linux": {"wsl": False, "groups": ["render", "video"]}}
    write_json(run_dir.environment, {"machine": machine, "settings": [], "origin": None, "cpu_count": 2})
    html, _ = checked(write_report(run_dir))
    assert "cpu: x; linux: (groups: (render, video); wsl: no)" in html
    assert all(python not in html for python in ("None", "[]", "False", "{&#39;", "windows"))
    assert "<td>settings</td><td>none</td>" in html and "<td>origin</td><td>none</td>" in html


def test_texts_have_no_score(run_dir: RunDir) -> None:
    assert BELOW in with_score(run_dir).headings, "the control"
    texts = "{family: causal-lm, name_or_path: 'builtin:tiny-llama'}"
    recipe = f"model: {texts}\ndata: {{path: x}}\ntrain: {{max_train_steps: 1}}\n"
    run_dir.recipe.write_text(recipe, encoding="utf-8")
    assert not {HEADLINE, BELOW} & set(checked(write_report(run_dir))[1].headings)


def test_readings_of_gpus_and_warnings_from_them(run_dir: RunDir) -> None:
    write_whole_run(run_dir)
    html, checker = checked(write_report(run_dir))
    assert "GPU" not in checker.headings
    supervisor = EventWriter(run_dir.events("supervisor"), session=1)
    for number in range(4):
        time.sleep(0.002)
        supervisor.write(read_as(power_w=100.0 + 50 * number, slowed_by=["<i>heat</i>"]))
        supervisor.write(reading("<b>1", 1, {"power": "<u>forbidden</u>"}))
    for number in range(30):
        supervisor.write(event("alarm", kind="hot", gpu="g", updates=number, text="It is <i>hot</i>."))
    supervisor.close()
    html, checker = checked(write_report(run_dir))
    assert "GPU" in checker.headings
    assert "<td>100 W</td><td>175 W</td><td>250 W</td>" in html and "<td>80 °C</td>" in html
    assert "&lt;b&gt;1, 4 readings" in html and "Not read: power (&lt;u&gt;forbidden" in html
    assert html.count("It is &lt;i&gt;hot&lt;/i&gt;.") == 20 and "... and 10 more warnings" in html


@pytest.mark.parametrize("what", ["text", "folder", "recipe", "picture", "environment", "inside"])
def test_a_link_out_of_the_run_is_not_read(run_dir: RunDir, tmp_path: Path, what: str) -> None:
    """Somebody who shares the report of a run of another would give away the file that it links to."""
    outside, folder = tmp_path / "private", run_dir.samples_at(40)
    outside.mkdir()
    (outside / "00.txt").write_text("my secret word", encoding="utf-8")
    folder.parent.mkdir(exist_ok=True)
    if what == "text":
        folder.mkdir()
        (folder / "00.txt").symlink_to(outside / "00.txt")
    elif what == "folder":
        folder.symlink_to(outside)
    elif what == "recipe":
        run_dir.recipe.unlink(missing_ok=True)
        run_dir.recipe.symlink_to(outside / "00.txt")
    elif what == "environment":
        run_dir.environment.unlink(missing_ok=True)
        (outside / "auth.json").write_text('{"token": "my secret word"}', encoding="utf-8")
        run_dir.environment.symlink_to(outside / "auth.json")
    elif what == "picture":
        run_dir.before_after.symlink_to(outside / "00.txt")
    else:
        (run_dir.path / "kept.txt").write_text("my secret word", encoding="utf-8")
        folder.mkdir()
        (folder / "00.txt").symlink_to(run_dir.path / "kept.txt")
    text, _ = checked(write_report(run_dir))
    assert ("my secret word" in text) is (what == "inside")
    assert says_if(what in ("text", "folder", "recipe"), text, "report/outside-of-the-run")
