"""The part Try without a browser: pictures with and without the LoRA, their history, and wrong values."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from lora_rocm.commands import tries
from lora_rocm.commands.sample_export import SampleResult
from lora_rocm.commands.tries import tries_of
from lora_rocm.errors import StoppedError
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.lock import locked
from lora_rocm.ui.background import Work, key_of
from tests.ui.drawn_grid import with_files
from tests.ui.site import ADDRESS, Site, code_of

RUN = {"dir": "runs/a-run"}
VALUES = {
    "prompt": "a <b>zibu</b>, größe",
    "negative": "blurred",
    "strength": "0.8",
    "seed": "7",
    "steps": "4",
    "sampler": "euler",
    "file": "0",
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """The calls of ``sample``. Its pictures have the strength as their red."""
    calls = list[SimpleNamespace]()

    def sample(source: Path, *, output: Path, require_wanted: Callable[[], None], **options: Any) -> SampleResult:
        calls.append(SimpleNamespace(source=source, **options))
        require_wanted()
        path = output / "seed7.png"
        Image.new("RGB", (8, 8), (int(options["strength"] * 100), 0, 0)).save(path)
        return SampleResult((path,))

    monkeypatch.setattr(tries, "sample", sample)
    return calls


@pytest.mark.parametrize(
    ("sender", "location"),
    [
        (f"{ADDRESS}/try/run?dir=runs%2Fa-run", "/try/run?dir=runs%2Fa-run"),
        ("https://elsewhere.example/try/run", "/"),
        (f"{ADDRESS}//elsewhere.example/x", "/elsewhere.example/x"),
        ("", "/"),
    ],
)
def test_a_form_that_no_script_sends_gets_its_page_again(
    site: Site, drawn: list[SimpleNamespace], sender: str, location: str
) -> None:
    site.run()
    csrf = site.client.headers.pop("X-CSRF")
    fields = VALUES | {"csrf": csrf}
    headers = {"referer": sender, "origin": ADDRESS}
    answer = site.client.post("/try/draw", params=RUN, data=fields, headers=headers, follow_redirects=False)
    assert (answer.status_code, answer.headers.get("location")) == (303, location)
    work = site.context.background.of(key_of("try", "runs/a-run"))
    assert work is not None and work._ended.wait(10) and drawn


def drawing(site: Site, **changes: str) -> Work:
    """Draw, and return the ended work."""
    answer = site.client.post("/try/draw", params=RUN, data=VALUES | changes)
    assert answer.status_code == 200, answer.text
    work = site.context.background.of(key_of("try", "runs/a-run"))
    assert work is not None and work._ended.wait(10)
    return work


def test_both_sides_are_drawn_and_the_base_only_once(site: Site, drawn: list[SimpleNamespace]) -> None:
    run_dir = with_files(site.run())
    assert drawing(site).error is None
    assert [(call.strength, call.seed, call.steps, call.sampler) for call in drawn] == [
        (0.8, 7, 4, "euler"),
        (0.0, 7, 4, "euler"),
    ]
    assert drawn[0].source == run_dir.path and drawn[0].negative_prompt == "blurred"
    assert drawing(site, strength="1,2", file="20").error is None
    assert len(drawn) == 3 and drawn[-1].strength == 1.2 and drawn[-1].source == run_dir.checkpoint_lora(20)
    assert drawing(site, seed="8").error is None
    assert [call.strength for call in drawn[3:]] == [0.8, 0.0]
    found = tries_of(run_dir, 20)
    assert [each.values.strength for each in found] == [0.8, 1.2, 0.8] and found[1].base == found[2].base
    text = site.get("/try/history", **RUN)
    assert text.count("<figure>") == 6 and "&lt;b&gt;zibu" in text and "<b>zibu" not in text
    assert "strength=1.2" in text and "file=20" in text
    form = site.get("/try/run", **RUN, strength="1.2", prompt='"><script>', file="20")
    assert 'value="1.2"' in form and '<option value="20" selected' in form and "<script>" not in form.split("<main")[1]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"prompt": " "}, "field-missing"),
        ({"prompt": "x --w 64"}, "prompt-options"),
        ({"strength": "x"}, "number-wrong"),
        ({"strength": "inf"}, "number-wrong"),
        ({"strength": "101"}, "try-value"),
        ({"seed": "-1"}, "try-value"),
        ({"seed": "1.5"}, "number-wrong"),
        ({"seed": "1e12"}, "try-value"),
        ({"steps": "0"}, "try-value"),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, str], code: str, site: Site, drawn: list[SimpleNamespace]) -> None:
    run_dir = with_files(site.run())
    answer = site.client.post("/try/draw", params=RUN, data=VALUES | changes)
    assert code_of(answer.text) == code and not drawn and not run_dir.tries.exists()


def test_a_file_that_does_not_exist_is_named(site: Site, drawn: list[SimpleNamespace]) -> None:
    with_files(site.run())
    error = drawing(site, file="30").error
    assert error is not None and error.code == "no-such-step" and not drawn
    assert "no-such-step" in site.get("/try/drawing", **RUN)


def test_a_cancelled_try_leaves_no_record(
    site: Site, drawn: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, begun, go_on = with_files(site.run()), threading.Event(), threading.Event()
    before = tries.sample

    def waiting(*given: Any, **options: Any) -> SampleResult:
        begun.set()
        assert go_on.wait(10)
        return before(*given, **options)

    monkeypatch.setattr(tries, "sample", waiting)
    site.client.post("/try/draw", params=RUN, data=VALUES)
    assert begun.wait(10)
    assert code_of(site.client.post("/try/draw", params=RUN, data=VALUES).text) == "work-runs-already"
    site.client.post("/try/cancel", params=RUN)
    go_on.set()
    work = site.context.background.of(key_of("try", "runs/a-run"))
    assert work is not None and work._ended.wait(10) and isinstance(work.error, StoppedError)
    assert tries_of(run_dir, 20) == [] and list(run_dir.tries.iterdir()) == []


def test_a_run_that_trains_is_not_disturbed(
    site: Site, drawn: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lora_rocm.commands import plan

    full = SimpleNamespace(room=SimpleNamespace(num_bytes=24), chosen=SimpleNamespace(needed_bytes=20))
    monkeypatch.setattr(plan, "plan", lambda recipe: full)
    run_dir = with_files(site.run())
    run_dir.result.unlink()
    with locked(run_dir):
        error = drawing(site).error
        assert error is not None and error.code == "no-room-while-training" and not drawn
    assert drawing(site).error is None  # the negative control: it has ended


def test_records_that_are_wrong_are_left_out(site: Site, drawn: list[SimpleNamespace], tmp_path: Path) -> None:
    run_dir: RunDir = with_files(site.run())
    drawing(site)
    (record,) = run_dir.tries.glob("*.json")
    good = json.loads(record.read_bytes())
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    wrong: list[Any] = [[], {}, good | {"seed": "x"}, good | {"strength": float("nan")}, good | {"picture": "gone.png"}]
    wrong += [good | {"picture": str(tmp_path / "secret.png")}, good | {"prompt": "\ud800"}]
    for number, value in enumerate(wrong):
        (run_dir.tries / f"9{number}.json").write_text(json.dumps(value), encoding="utf-8")
    (run_dir.tries / "95.json").write_bytes(b"\xff{")
    assert len(tries_of(run_dir, 20)) == 1
    record.unlink()
    assert tries_of(run_dir, 20) == [] and "<figure>" not in site.get("/try/history", **RUN)
