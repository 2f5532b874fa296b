"""Status of a run, from its files."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from lora_rocm.foundation.units import number_text, rate_text, time_text, times_text
from lora_rocm.model_files.readers import readers_line
from lora_rocm.recipe.saved_recipe import recipe_fault
from lora_rocm.report.figures import Figures
from lora_rocm.rundir.event_types import AlarmEvent, ChangeEvent, ErrorEvent, ExportEvent, IncidentEvent, RestartEvent
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_view import RunView
from lora_rocm.telemetry.numbers import long_text


def status(run_dir: RunDir) -> dict[str, Any]:
    """Return state and figures of a run, ready for JSON.

    For the keys see ``documents.StatusDocument``, for the state ``RunView``, and for the changes ``rules.mitigations``.
    files and last_checkpoint omit damaged files and files of an earlier step, which remarks describe.

    Raises:
        ResumeError: an event file cannot be read.
    """
    # read the state of the run
    view = RunView.of(run_dir)
    files, problem, latest_s = view.files, view.problem, view.latest_s
    step_s = (view.seconds_per_step or 0.0) if view.is_running else 0.0
    total = view.max_train_steps
    readers = {
        str(run_dir.path / event.path): readers_line(event.can_read, event.cannot_read)
        for event in view.all(ExportEvent)
    }
    error = None
    if problem is not None and not view.is_running:
        error = {"code": problem.code, "what": problem.what, "where": problem.where}
        error["fix"] = problem.fix if isinstance(problem, ErrorEvent) else ""
    # collect the figures
    return {
        "path": str(run_dir.path),
        "state": view.state,
        "updates": view.updates,
        "max_train_steps": total,
        "loss": Figures.of(view).loss.value,
        "rate_per_s": 1 / step_s if step_s else None,
        "eta_s": step_s * (total - view.updates) if step_s and total else None,
        "last_event_s_ago": round(time.time() - latest_s, 1) if latest_s is not None else None,
        "incidents": len(view.all(IncidentEvent)),
        "restarts": sum(isinstance(event, RestartEvent) for event in view.trouble),
        "changes": [event.id for event in view.trouble if isinstance(event, ChangeEvent)],
        "last_checkpoint": str(files.checkpoint.path) if files.checkpoint else None,
        "telemetry": [{**reading.to_json(), "text": long_text(reading)} for reading in view.readings],
        "alarms": [event.text for event in view.supervisor.all(AlarmEvent)],
        "error": error,
        "files": [str(path) for path in files.whole],
        "readers": {path: text for path, text in readers.items() if text},
        "remarks": [*([fault] if (fault := recipe_fault(run_dir)) else ()), *view.remarks],
    }


def status_text(found: dict[str, Any]) -> str:
    """Return ``status`` as text."""
    # progress
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
        lines.append(f"  last event {time_text(found['last_event_s_ago'])} ago")
    lines += _watched_lines(found)
    # failures
    if found["incidents"]:
        lines.append(f"  {found['incidents']} incidents, see the report")
    if found["restarts"]:
        lines.append(f"  restarted {times_text(found['restarts'])}, see the report")
    if found["changes"]:
        counts = Counter(found["changes"])
        names = [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]
        lines.append(f"  changed because of failures: {', '.join(names)}")
    if found["error"]:
        lines.append(f"  error: {found['error']['what']}")
    # files
    lines.append(f"  last checkpoint: {found['last_checkpoint'] or 'none yet'}")
    for path in found["files"]:
        lines.append(f"  file: {path}")
        if path in found["readers"]:
            lines.append(f"    {found['readers'][path]}")
    lines += [f"  {remark}" for remark in found["remarks"]]
    return "\n".join(lines)


def _watched_lines(found: dict[str, Any]) -> list[str]:
    """Return the GPU readings of a running run, and its last warning."""
    readings = found["telemetry"] if found["state"] == "running" else []
    lines = [f"  GPU {reading['gpu']}: {reading['text']}" for reading in readings]
    return lines + [f"  warning: {text}" for text in found["alarms"][-1:]]
