"""Run directories that somebody else made to harm who opens them, and damaged ones."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from lora_rocm.rundir.layout import RunDir
from tests.supervisor.fake_run import write_whole_run

SCRIPT = "<script>document.title='harmed'</script>"
IMAGE = "\"><img src=x onerror=document.title='harmed'>"
TURNED = "safe\u202egnp.exe"
"""A name that is shown backwards from its middle on."""
TEXTS = (SCRIPT, IMAGE, TURNED, "{{ 7 * 7 }}", "'; alert(1) //", "javascript:alert(1)", "\x1b[2J\x07", "a\nb", "\ud800")


def _event(run_dir: RunDir, **fields: object) -> None:
    with run_dir.events().open("ab") as file:
        file.write(json.dumps({"time": 1.0, "session": 1, **fields}).encode("ascii") + b"\n")


def with_hostile_texts(run_dir: RunDir) -> None:
    """Texts with markup, templates, control characters and half letters in each place that a page shows."""
    write_whole_run(run_dir)
    for text in TEXTS:
        _event(run_dir, type="notice", text=text)
        _event(run_dir, type="phase", phase=text, state="begin", seconds=0.0)
        _event(run_dir, type="preview", updates=40, images=[text, f"samples/{text}", "../../../../etc/passwd"])
        incident = {"kind": text, "iteration": 1, "samples": [text], "detail": text, "action": text}
        _event(run_dir, type="incident", **incident)
    run_dir.worker_log.write_text("\n".join(TEXTS[:-1]), encoding="utf-8")
    run_dir.result.unlink(missing_ok=True)
    _event(run_dir, type="error", code=SCRIPT, what=IMAGE, where=SCRIPT, fix=SCRIPT, exit_code=3)


def with_damaged_events(run_dir: RunDir) -> None:
    """Lines that are not events, are torn, nested without end, or have numbers that are not finite."""
    write_whole_run(run_dir)
    lines = [
        b"\x00" * 1000,
        b"{",
        b"[" * 100_000,
        b'{"type": "step"}',
        b'{"type": "step", "updates": 1e999}',
        b"\xff\xfe",
    ]
    with run_dir.events().open("ab") as file:
        file.write(b"\n".join(lines) + b'\n{"type": "st')


def with_huge_log(run_dir: RunDir) -> None:
    """A log of half a gigabyte that takes no room on the disk."""
    write_whole_run(run_dir)
    with run_dir.worker_log.open("wb") as file:
        file.truncate(1 << 29)


def with_empty_files(run_dir: RunDir) -> None:
    """Every file is empty, as after a power failure."""
    write_whole_run(run_dir)
    for path in run_dir.path.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")


def with_folders_as_files(run_dir: RunDir) -> None:
    """Folders in place of files."""
    write_whole_run(run_dir)
    for path in (run_dir.worker_log, run_dir.environment, run_dir.report):
        if path.is_file():
            path.unlink()
        path.mkdir(exist_ok=True)


def with_links_out(run_dir: RunDir, secret: Path) -> None:
    """Links to a file outside in each place that a page reads."""
    write_whole_run(run_dir)
    for path in (run_dir.worker_log, run_dir.samples / "step-00000020" / "00.png", run_dir.report):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.symlink(secret, path)


def without_events(run_dir: RunDir) -> None:
    """A recipe alone."""
    write_whole_run(run_dir)
    run_dir.events().unlink()
    shutil.rmtree(run_dir.checkpoints)


HOSTILE = (
    with_hostile_texts,
    with_damaged_events,
    with_huge_log,
    with_empty_files,
    with_folders_as_files,
    without_events,
)
