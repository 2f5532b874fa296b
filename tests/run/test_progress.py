"""Lines and bars from events."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from lora_rocm.run import progress
from lora_rocm.run.events import EVENT_FIELDS
from lora_rocm.run.progress import BarView, LineView, ProgressDisplay, make_progress
from tests.run.fake_run import data_fields, start_fields, step_fields

EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("start", start_fields(resumed_from=7)),
    ("phase", {"phase": "cache", "state": "begin", "seconds": 0.0}),
    ("cache", {"what": "images", "done": 3, "total": 18, "per_second": 1.5}),
    ("cache", {"what": "images", "done": 18, "total": 18, "per_second": 1.5}),
    ("repaired", {"kind": "image", "item": "a.png", "reason": "cut short"}),
    ("data", data_fields()),
    ("step", step_fields(1, loss=0.5)),
    ("step", step_fields(2, loss=float("nan"), step_s=0.5)),
    ("step", step_fields(3, loss=None)),
    ("incident", {"kind": "transfer", "iteration": 3, "samples": [], "detail": "d[/red]", "action": "again"}),
    ("canary", {"updates": 3, "passed": True, "checks": ["sums"], "detail": "", "seconds": 0.01}),
    ("validation", {"updates": 3, "loss": 0.25}),
    ("checkpoint", {"updates": 3, "path": "checkpoints/step-00000003", "lora": "l.safetensors"}),
    ("preview", {"updates": 3, "pictures": ["a.png"]}),
    ("export", {"format": "kohya", "path": "lora.safetensors", "max_difference": 1e-6, "cannot_read": []}),
    ("concept", {"score": 0.9, "control": None, "detail": {}}),
    ("notice", {"text": "[bold]as it is[/bold]"}),
    ("error", {"code": "c", "what": "w", "where": "", "fix": "", "exit_code": 3}),
    ("end", {"reason": "done", "updates": 3, "exit_code": 0}),
]


def test_every_event_type_is_covered_here() -> None:
    assert {event_type for event_type, _ in EVENTS} == set(EVENT_FIELDS)


def drawn(view_of: Any) -> str:
    stream = io.StringIO()
    display = ProgressDisplay(view_of(stream))
    for event_type, fields in EVENTS:
        display.on_event({"type": event_type, "time": 0.0, "session": 1, **fields})
    display.on_event({"type": "from the future"})
    display.view.end()
    return stream.getvalue()


def test_plain_lines() -> None:
    text = drawn(lambda stream: LineView(stream, every_s=0.0))
    assert "Going on from step 7" in text
    assert "Caching images 18/18  1.5/s" in text
    assert "set aside: pics/<bad>.png: broken" in text
    assert "Training 1/40  loss 0.5  5.00 it/s  0:08 left  1.0 GiB  checks 5, failed 0" in text
    assert "Training 2/40  loss 0.5 " in text and "nan" not in text  # the average passes over what is not finite
    assert "[bold]as it is[/bold]" in text and "d[/red]" in text
    assert "\x1b" not in text


def test_lines_are_rare_but_the_last_one_comes() -> None:
    text = drawn(lambda stream: LineView(stream, every_s=3600.0))
    assert "Caching images 3/18" in text and "Caching images 18/18" in text
    assert "Training 1/40" in text and "Training 2/40" not in text


def test_bars_on_a_terminal() -> None:
    text = drawn(lambda stream: BarView(Console(file=stream, force_terminal=True, width=160, _environ={})))
    assert "Training" in text and "3/40" in text and "checks 15, failed 0" in text
    assert "[bold]as it is[/bold]" in text


def test_the_stream_decides(monkeypatch: Any) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with make_progress(Terminal()) as display:
        assert isinstance(display.view, BarView)
    stream = io.StringIO()
    monkeypatch.setattr(progress.sys, "stdout", stream)
    with make_progress() as display:
        assert isinstance(display.view, LineView)
        display.say("hello")
    assert stream.getvalue() == "hello\n"
