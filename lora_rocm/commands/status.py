"""Status of a run, from its files."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from lora_rocm.foundation.units import number_text, rate_text, size_text, time_text, times_text
from lora_rocm.model_files.readers import readers_line
from lora_rocm.recipe.saved_recipe import recipe_fault
from lora_rocm.report.smoothing import Smoothed
from lora_rocm.rundir.events import current_steps, read_events, unread_text
from lora_rocm.rundir.incidents import last_word, trouble_of
from lora_rocm.rundir.layout import SUPERVISOR, RunDir
from lora_rocm.rundir.made_from import stale_exports
from lora_rocm.rundir.results import faults_of_finished, lost_loras_text, result_files, written_loras
from lora_rocm.rundir.whole_files import WholeCheckpoint, fault_of_lora, newest_checkpoint, remedy
from lora_rocm.supervisor.lock import is_running
from lora_rocm.telemetry.numbers import long_text

RATE_STEPS = 50


def status(run_dir: RunDir) -> dict[str, Any]:
    """Return state and figures of a run, ready for JSON.

    state: running, finished, stopped (on request), failed (with an error, or ended because it hung), died (without an
    error), or prepared. rate_per_s and eta_s are None unless the run is running. restarts: how often the worker was
    restarted. changes: names of the mitigations applied after failures (``rules.mitigations``), one per application.
    readers: path of a LoRA file -> which programs read it, if known. files, last_checkpoint: none that is damaged or of
    an earlier step. remarks: about those and missing files. telemetry: last readings of each GPU. alarms: newest last.
    """
    # read the events
    events = read_events(run_dir.events())
    trouble = trouble_of(run_dir, events)
    hung = last_word(events, trouble)
    steps = current_steps(events)
    last = {event["type"]: event for event in events}
    state = _state(run_dir, events, hung)
    # derive the figures
    updates = max(_updates_at_start(events), steps[-1]["updates"] if steps else 0)
    total = last["data"]["max_train_steps"] if "data" in last else None
    recent = [step["step_s"] for step in steps[-RATE_STEPS:]]
    step_s = sum(recent) / len(recent) if recent and state == "running" else 0.0
    stale = {each.path: each.sentence for each in stale_exports(run_dir).values()}
    files = [path for path in result_files(run_dir) if path not in stale]
    faults = {path: fault for path in files if path != run_dir.report and (fault := fault_of_lora(path))}
    checkpoint, passed_over = newest_checkpoint(run_dir)
    latest_s = max((float(event["time"]) for event in (*events[-1:], *trouble[-1:])), default=None)
    remarks = faults_of_finished(run_dir) if state == "finished" else []
    remarks += [fault for fault in [recipe_fault(run_dir)] if fault]
    remarks += [f"{path}: {fault} {remedy(run_dir, path)}" for path, fault in faults.items()]
    remarks += stale.values()
    remarks += lost_loras_text(run_dir, written_loras(events))
    remarks += _remarks_on_files(run_dir, checkpoint, passed_over)
    if latest_s is None and (checkpoint or passed_over or _has_bytes(run_dir)):
        remarks.append("its events are gone or damaged: steps, loss and rate are not known")
    readers = {
        str(run_dir.path / event["path"]): readers_line(event.get("can_read", ()), event["cannot_read"])
        for event in events
        if event["type"] == "export"
    }
    error = {**hung, "fix": ""} if hung else last.get("error")
    return {
        "path": str(run_dir.path),
        "state": state,
        "updates": updates,
        "max_train_steps": total,
        "loss": _smoothed_loss(steps),
        "rate_per_s": 1 / step_s if step_s else None,
        "eta_s": step_s * (total - updates) if step_s and total else None,
        "last_event_s_ago": round(time.time() - latest_s, 1) if latest_s is not None else None,
        "incidents": sum(event["type"] == "incident" for event in events),
        "restarts": sum(event["type"] == "restart" for event in trouble),
        "changes": [event["id"] for event in trouble if event["type"] == "change"],
        "last_checkpoint": str(checkpoint.path) if checkpoint else None,
        **_watched(run_dir),
        "error": {key: error[key] for key in ("code", "what", "where", "fix")} if error and state == "failed" else None,
        "files": [str(path) for path in files if path not in faults],
        "readers": {path: text for path, text in readers.items() if text},
        "remarks": remarks,
    }


def _remarks_on_files(run_dir: RunDir, newest: WholeCheckpoint | None, passed_over: dict[Path, str]) -> list[str]:
    remarks = [f"{folder} is damaged and passed over. {fault}" for folder, fault in passed_over.items()]
    if newest is not None and newest.unread_bytes:
        of = size_text(newest.unread_bytes)
        remarks.append(f"{newest.path}: the checksums of {of} were not compared here; a resume and an export do it.")
    if run_dir.names_are_wrong:
        what = f"{run_dir.names} is gone or damaged. The name {run_dir.name} was found in other files of the run;"
        remarks.append(f"{what} train --resume writes {run_dir.names.name} again.")
    remarks += [text for path in (run_dir.events(), run_dir.events(SUPERVISOR)) if (text := unread_text(path))]
    return remarks


def status_text(found: dict[str, Any]) -> str:
    """Return ``status`` as text."""
    total = found["max_train_steps"]
    lines = [
        f"{found['path']}: {found['state']}",
        f"  step {found['updates']}" + (f" of {total}" if total else ""),
        f"  loss {number_text(found['loss'])}",
    ]
    if found["rate_per_s"]:
        left = f", {time_text(found['eta_s'])} left" if found["eta_s"] is not None else ""
        lines.append(f"  {rate_text(found['rate_per_s'])}{left}")
    if found["last_event_s_ago"] is not None:
        lines.append(f"  last word {time_text(found['last_event_s_ago'])} ago")
    lines += _watched_lines(found)
    if found["incidents"]:
        lines.append(f"  {found['incidents']} incidents, see the report")
    if found["restarts"]:
        lines.append(f"  started again {times_text(found['restarts'])}, see the report")
    if found["changes"]:
        counts = Counter(found["changes"])
        names = [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]
        lines.append(f"  changed because of failures: {', '.join(names)}")
    if found["error"]:
        lines.append(f"  error: {found['error']['what']}")
    lines.append(f"  last checkpoint: {found['last_checkpoint'] or 'none yet'}")
    for path in found["files"]:
        lines.append(f"  file: {path}")
        if path in found["readers"]:
            lines.append(f"    {found['readers'][path]}")
    lines += [f"  {remark}" for remark in found["remarks"]]
    return "\n".join(lines)


def _smoothed_loss(steps: list[dict[str, Any]]) -> float | None:
    loss = Smoothed()
    for step in steps:
        if step["loss"] is not None:
            loss.add(step["loss"])
    return loss.value


def _watched(run_dir: RunDir) -> dict[str, Any]:
    """Return the last readings of each GPU, and the warnings from telemetry."""
    events = read_events(run_dir.events(SUPERVISOR), "telemetry", "alarm")
    last = {event["gpu"]: event for event in events if event["type"] == "telemetry"}
    return {
        "telemetry": [{**event, "text": long_text(event)} for event in last.values()],
        "alarms": [event["text"] for event in events if event["type"] == "alarm"],
    }


def _watched_lines(found: dict[str, Any]) -> list[str]:
    """Return the readings of a run that is going on, and its last warning."""
    readings = found["telemetry"] if found["state"] == "running" else []
    lines = [f"  GPU {event['gpu']}: {event['text']}" for event in readings]
    return lines + [f"  warning: {text}" for text in found["alarms"][-1:]]


def _has_bytes(run_dir: RunDir) -> bool:
    return run_dir.events().exists() and run_dir.events().stat().st_size > 0


def _state(run_dir: RunDir, events: list[dict[str, Any]], hung: dict[str, Any] | None) -> str:
    if is_running(run_dir):
        return "running"
    if run_dir.result.exists():
        return "finished"
    if hung is not None:
        return "failed"
    for event in reversed(events):
        if event["type"] == "end":
            return "stopped"
        if event["type"] == "error":
            return "stopped" if event["exit_code"] == 130 else "failed"
        if event["type"] == "start":
            break
    return "died" if events else "prepared"


def _updates_at_start(events: list[dict[str, Any]]) -> int:
    """Return the number of updates done before the newest start."""
    starts = [event for event in events if event["type"] == "start"]
    return (starts[-1]["resumed_from"] or 0) if starts else 0
