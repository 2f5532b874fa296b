"""Lines and bars from events."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lora_rocm.report import progress_bar
from lora_rocm.report.concept_text import concept_line
from lora_rocm.report.progress_bar import MIN_BAR, BarView, LineView, ProgressDisplay, make_progress
from lora_rocm.rundir.event_types import RUN_EVENTS, ConceptEvent
from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.layout import RunDir
from tests.supervisor.fake_run import (
    change_fields,
    data_fields,
    event,
    failure_fields,
    heard,
    restart_fields,
    start_fields,
    step_fields,
)
from tests.telemetry.trees import read_as
from tests.wording import says, worded

EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("start", start_fields(resumed_from=7)),
    ("phase", {"phase": "cache", "state": "begin", "seconds": 0.0}),
    ("cache", {"what": "images", "done": 3, "total": 18, "per_second": 1.5}),
    ("cache", {"what": "images", "done": 18, "total": 18, "per_second": 1.5}),
    ("phase", {"phase": "compile", "state": "begin", "seconds": 0.0}),
    ("compile", {"size": "1024x768", "done": 2, "total": 5}),
    ("compile", {"size": "", "done": 5, "total": 5}),
    ("kernels", {"kernel": "GEGLU of 3x53x2560", "done": 3, "total": 9}),
    ("kernels", {"kernel": "", "done": 9, "total": 9}),
    ("kernels", {"kernel": "", "done": 0, "total": 0}),
    ("repaired", {"kind": "image", "item": "a.png", "reason": "cut short"}),
    ("data", data_fields()),
    ("step", step_fields(1, loss=0.5)),
    ("telemetry", {name: value for name, value in read_as().to_json().items() if name != "type"}),
    ("alarm", {"kind": "hot", "gpu": "0000:03:00.0", "updates": 1, "text": "The GPU is [b]hot[/b]."}),
    ("step", step_fields(2, loss=float("nan"), step_s=0.5)),
    ("step", step_fields(3, loss=None)),
    ("incident", {"kind": "transfer", "iteration": 3, "samples": [], "detail": "d[/red]", "action": "again"}),
    ("canary", {"updates": 3, "passed": True, "checks": ["sums"], "detail": "", "seconds": 0.01}),
    ("validation", {"updates": 3, "loss": 0.25, "measures": {"accuracy": 0.75}}),
    ("watched", {"updates": 0, "loss": 2.5}),
    ("checkpoint", {"updates": 3, "path": "checkpoints/step-00000003", "lora": "l.safetensors"}),
    ("preview", {"updates": 3, "images": ["a.png"]}),
    (
        "export",
        {
            "format": "kohya",
            "path": "l.safetensors",
            "max_difference": 0.5,
            "cannot_read": ["B (c)"],
            "can_read": ["A"],
        },
    ),
    ("export", {"format": "peft", "path": "peft", "max_difference": 1e-6, "cannot_read": ["D"], "can_read": ["A"]}),
    ("concept", {"score": 0.9, "control": None, "detail": {}}),
    ("notice", {"text": "[bold]as it is[/bold]"}),
    ("change", change_fields()),
    ("failure", failure_fields(what="[b]boom[/b]")),
    ("restart", restart_fields()),
    ("error", {"code": "c", "what": "w", "where": "", "fix": "", "exit_code": 3}),
    ("end", {"reason": "done", "updates": 3, "exit_code": 0}),
]


def test_every_event_type_is_covered_here() -> None:
    assert {event_type for event_type, _ in EVENTS} == {kind.type for kind in RUN_EVENTS}


def drawn(view_of: Any) -> str:
    stream = io.StringIO()
    display = ProgressDisplay(view_of(stream))
    for event_type, fields in EVENTS:
        display.on_event(heard({"type": event_type, "time": 0.0, "session": 1, **fields}))
    display.on_event(event("checks", names=[]))  # of no run
    display.view.end()
    return stream.getvalue()


def test_nothing_is_said_about_who_reads_a_file_that_all_read() -> None:
    stream = io.StringIO()
    display = ProgressDisplay(LineView(stream))
    for path, cannot_read in (("a", []), ("b", ["D"])):
        display.on_event(event("export", format="f", path=path, max_difference=0.0, cannot_read=cannot_read))
    assert len(stream.getvalue().splitlines()) == 2 and "by D" not in stream.getvalue()
    display.on_event(heard({"type": "start", "time": 0.0, "session": 2, **start_fields()}))  # of a new attempt
    display.on_event(event("export", format="f", path="b", max_difference=0.0, cannot_read=["D"]))
    assert says(stream.getvalue(), "report/not-or-not-exactly-by-d")


def test_plain_lines() -> None:
    text = drawn(lambda stream: LineView(stream, every_s=0.0))
    assert says(text, "report/going-on-from-step-7")
    assert "Caching images 18/18  1.5/s" in text
    wrote = (
        "(kohya), loaded back, largest difference 0.5\nRead by A; not, or not exactly, by B (c)\nWrote peft (peft), "
    )
    assert wrote in text and "by D" not in text, "who reads them is said of the first file"
    assert says(text, "report/compiling-the-model") and "Compiling 2/5  1024x768\nCompiling 5/5\n" in text
    checking = "Compiling and checking kernels"
    assert f"{checking} 3/9  GEGLU of 3x53x2560\n{checking} 9/9\n" in text and f"{checking} 0/0" not in text
    assert "skipped: pics/<bad>.png: broken" in text
    assert "Training 1/40  loss 0.5  5.00 it/s  0:08 left  1.0 GiB  checks 5, failed 0" in text
    assert re.search(r"^Training 2/40 .* failed 0  80 °C, 200 W$", text, re.MULTILINE)
    assert says(text, "report/warning-the-gpu-is-b-hot-b")
    assert "Training 2/40  loss 0.5 " in text and "nan" not in text  # the average passes over what is not finite
    assert "[bold]as it is[/bold]" in text and "d[/red]" in text
    assert "\x1b" not in text


def test_lines_are_rare_but_the_last_one_comes() -> None:
    text = drawn(lambda stream: LineView(stream, every_s=3600.0))
    assert says(text, "report/caching-images-3-18") and says(text, "report/caching-images-18-18")
    assert "Training 1/40" in text and "Training 2/40" not in text


def test_bars_on_a_terminal() -> None:
    text = drawn(lambda stream: BarView(Console(file=stream, force_terminal=True, width=160, _environ={})))
    assert "Training" in text and "3/40" in text and says(text, "report/checks-15-failed-0")
    assert "[bold]as it is[/bold]" in text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_a_narrow_bar_leaves_whole_details_out(width: int) -> None:
    stream = io.StringIO()
    display = ProgressDisplay(BarView(Console(file=stream, force_terminal=True, width=width, _environ={})))
    fields = step_fields(3, measures={"accuracy": 0.5}, transfer_checks=123456)
    display.on_event(event("step", session=1, **fields))
    display.view.end()
    line = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).split("\r")[-1].strip()
    whole = "loss 0.3305  accuracy 0.5  5.00 it/s  0:07 left  1.0 GiB  checks 123456, failed 0"
    shown = line.partition(" 3/40 ")[2]
    assert line.startswith("Training ") and len(line) <= width
    assert shown and f"{whole}  ".startswith(f"{shown}  "), "each is whole"
    assert (shown == whole) is (width == 160)
    left_out = whole.removeprefix(shown).strip().split("  ")[0]
    assert shown == whole or len(f"Training 3/40 {shown}  {left_out}") + MIN_BAR + 1 > width, "no more would fit"


def test_the_stream_decides(monkeypatch: Any) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with make_progress(Terminal()) as display:
        assert isinstance(display.view, BarView)
    stream = io.StringIO()
    monkeypatch.setattr(progress_bar.sys, "stdout", stream)
    with make_progress() as display:
        assert isinstance(display.view, LineView)
        display.notify("hello")
    assert stream.getvalue() == "hello\n"


def said(*events: tuple[str, dict[str, Any]], spill_bytes: int | None = None) -> list[str]:
    stream = io.StringIO()
    display = ProgressDisplay(LineView(stream, every_s=3600.0), spill_bytes)
    for event_type, fields in events:
        display.on_event(event(event_type, **fields))
    return stream.getvalue().splitlines()


def test_a_failure_a_change_and_a_restart_are_one_line_each() -> None:
    hang = failure_fields(seen="hang", silent_s=312.4, limit_s=300.0, activity="wait", stacks="stacks-1.txt")
    lines = said(("failure", hang), ("change", change_fields()), ("restart", restart_fields(attempt=0)))
    assert lines == [
        worded("report/the-training-process-was-silent-for-312"),
        worded("report/changed-because-of-hang-copies-are-made"),
        worded("report/restart-1-going-on-from-step-10"),
    ]
    (line,) = said(("failure", failure_fields(what="It ended without a word.\nThe end of its log:\n    words")))
    assert line == worded("report/the-training-process-failed-in-the-phase")
    (stuck,) = said(("failure", failure_fields(code="worker-unkillable", silent_s=9.0)))
    assert says(stuck, "report/could-not-be-ended") and "was killed" not in stuck and "was killed" in lines[0]
    (other,) = said(("restart", restart_fields(attempt=2)))
    assert says(other, "report/other-noise-attempt-2")
    (rounding,) = said(("change", change_fields(effect="rounding", seen="remembered")))
    assert says(rounding, "report/changed-because-of-an-earlier-run-on") and "rounded" in rounding


def test_measures_of_steps_are_shown_smoothed() -> None:
    (first,) = said(("step", step_fields(1, measures={"accuracy": 0.5})))
    assert "loss 0.5328  accuracy 0.5  " in first
    (plain,) = said(("step", step_fields(1)))
    assert "accuracy" not in plain
    display = ProgressDisplay(LineView(stream := io.StringIO(), every_s=0.0))
    for n, accuracy in ((1, 0.0), (2, 1.0)):
        display.on_event(event("step", session=1, **step_fields(n, measures={"accuracy": accuracy})))
    assert 0.5 < float(stream.getvalue().splitlines()[-1].partition("accuracy ")[2].split()[0]) < 0.52


def test_a_resume_goes_on_with_the_checks_of_the_run(tmp_path: Path) -> None:
    """The counters of a worker begin at 0; the display shows the sum over all sessions, as the report does."""
    path = tmp_path / "events.jsonl"
    for session, resumed in ((1, None), (2, 1)):
        writer = EventWriter(path, session=session)
        writer.write(event("start", **start_fields(resumed_from=resumed)))
        for updates in (1, 2):
            counts = {"transfer_checks": 100 * updates, "transfer_failures": session}
            writer.write(event("step", **step_fields(updates + (resumed or 0), **counts)))
        writer.close()
    stream = io.StringIO()
    with make_progress(stream, run_dir=RunDir(tmp_path)) as display:
        display.on_event(heard({"type": "start", "time": 0.0, "session": 3, **start_fields(resumed_from=3)}))
        for updates in (4, 40):
            fields = step_fields(updates, transfer_checks=updates, transfer_failures=0)
            display.on_event(event("step", session=3, **fields))
    shown = [line.partition("checks ")[2] for line in stream.getvalue().splitlines() if "checks " in line]
    assert shown == ["404, failed 3", "440, failed 3"]


def test_a_resume_goes_on_with_the_loss_of_the_run(tmp_path: Path) -> None:
    """As if it had never stopped; repeated steps count once."""
    losses = {1: 0.9, 2: 0.7, 3: 0.5}
    steps = {
        n: {"type": "step", **step_fields(n, loss=loss, measures={"accuracy": loss})} for n, loss in losses.items()
    }
    path = tmp_path / "events.jsonl"
    starts = [{"type": "start", **start_fields(resumed_from=resumed)} for resumed in (None, 2)]
    written = [starts[0], steps[1], steps[2], {**steps[3], "loss": 5.0}, starts[1], steps[3]]
    path.write_text("".join(f"{json.dumps({**each, 'time': 0.0, 'session': 1})}\n" for each in written), "utf-8")

    def shown(run_dir: RunDir | None, *events: dict[str, Any]) -> str:
        with make_progress(stream := io.StringIO(), run_dir=run_dir) as display:
            for each in events:
                display.on_event(heard({"session": 1, **each}))
        (line,) = [line for line in stream.getvalue().splitlines() if line.startswith("Training 3/")]
        return line.partition("loss ")[2].partition("it/s")[0]

    display = ProgressDisplay(LineView(io.StringIO()))
    for n in (1, 2, 3):
        display.on_event(heard({"session": 1, **steps[n]}))
    expected = f"{display.figures.loss.value:.4g}"
    run_dir = RunDir(tmp_path)
    assert shown(run_dir, starts[1], steps[3]).startswith(f"{expected}  accuracy {expected}  ")
    assert not shown(None, starts[1], steps[3]).startswith(expected), "the control: the losses before it count"
    path.unlink()
    path.mkdir()
    assert shown(run_dir, starts[1], steps[3]) == shown(None, starts[1], steps[3]), "no file of events stops no run"


def test_memory_that_spills_is_said_once() -> None:
    steps = [("step", step_fields(n, step_s=0.2 if n < 30 else 0.9, memory_bytes=2**30)) for n in range(1, 34)]
    warnings = [line for line in said(*steps, spill_bytes=2**30) if line.startswith("Warning: ")]
    assert len(warnings) == 0, "four slow steps of ten are no rule"
    steps += [("step", step_fields(n, step_s=0.9, memory_bytes=2**30)) for n in range(34, 41)]
    assert len([line for line in said(*steps, spill_bytes=2**30) if line.startswith("Warning: ")]) == 1
    assert [line for line in said(*steps) if line.startswith("Warning: ")] == []


def test_a_concept_score_says_how_much_it_is_worth() -> None:
    def line(**fields: Any) -> str:
        return concept_line(ConceptEvent(**{"score": 0.9, "control": 0.5, "detail": {}, **fields}))

    assert "rough, from 3 previews" in line(previews=3, demo=False) and "images_per_prompt" in line(
        previews=3, demo=False
    )
    assert "images_per_prompt" not in line(previews=8, demo=False) and "rough" in line(previews=8, demo=False)
    assert "rough" not in line(previews=3, demo=True) and "from 3 previews" in line(previews=3, demo=True)
