"""The contents of a run's page, except for its curves."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.json_text import parse_json
from lora_rocm.report.figures import RunProgress, progress_of
from lora_rocm.report.stories import ShownProblem, problem_of
from lora_rocm.rundir.event_types import DataEvent, TelemetryEvent
from lora_rocm.rundir.heartbeat import read_heartbeat
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.recipe_family import family_in
from lora_rocm.rundir.run_view import RunView
from lora_rocm.telemetry.numbers import long_text
from lora_rocm.ui.launch import Launched
from lora_rocm.ui.run_phases import ShownPhase, activity_of, phases_of

TEXT = "text"
"""The preview of a language model."""
SILENT_S = 60.0
"""Time without an event after which the page names it."""
MAX_LOG_BYTES = 1 << 16
MAX_PROMPT_BYTES = 1 << 16


@dataclass(frozen=True)
class ShownDetails:
    """The state of a run.

    Attributes:
        view: the run.
        progress: its position and speed.
        phases: the phases of its newest start.
        activity: its present phase, or None.
        is_starting: whether a process that was started here has not recorded anything yet, and the run is not running.
        is_stopping: whether it was asked to stop and still runs.
        silent_s: seconds since its last event, or since it was made if it has none, if it runs and they are many;
            otherwise None.
        readings: the newest readings of each GPU as text.
        launch_output: the output of a process that was started here and ended before the run recorded why.
        can_resume: whether there is something to continue.
    """

    view: RunView
    progress: RunProgress
    phases: Sequence[ShownPhase]
    activity: str | None
    is_starting: bool
    is_stopping: bool
    silent_s: float | None
    readings: Sequence[str]
    launch_output: str
    can_resume: bool

    @property
    def share(self) -> float | None:
        """The part of its steps that is done, from 0 to 1; None if the number of steps is not known."""
        total = self.progress.max_train_steps
        return min(1.0, self.progress.updates / total) if total else None

    @property
    def kind(self) -> str:
        """The kind of its results, which chooses the words of its page: text or image."""
        return kind_of(self.view.run_dir)

    @property
    def data(self) -> DataEvent | None:
        """The samples and steps that the run counted, or None if it has not yet."""
        return self.view.last(DataEvent)

    @property
    def problem(self) -> ShownProblem | None:
        """The error with which it failed, if it does not run."""
        event = None if self.view.is_running else self.view.problem
        return None if event is None else problem_of(event)


def details_of(view: RunView, launched: Launched | None) -> ShownDetails:
    """Return the state of a run. ``launched``: the process that this server started for it, or None."""
    running, latest_s = view.is_running, view.latest_s
    beat = read_heartbeat(view.run_dir.heartbeat()) if running else None
    # A start that has not recorded an event yet: speed, phases and readings are of the session before it
    is_new = launched is not None and (latest_s is None or latest_s < launched.began_s)
    exit_code = launched.exit_code if launched is not None else None
    starting = is_new and not running and exit_code is None
    since_s = launched.began_s if launched is not None and is_new else latest_s or _made_s(view.run_dir)
    silent_s = time.time() - since_s if running else None
    progress, activity = progress_of(view), activity_of(view) or (beat.activity if beat else "imports")
    return ShownDetails(
        view,
        dataclasses.replace(progress, rate_per_s=None, eta_s=None) if is_new else progress,
        [] if is_new else phases_of(view),
        ("imports" if is_new else activity) if running else None,
        starting,
        running and _is_asked_to_stop(view.run_dir, launched),
        silent_s if silent_s is not None and silent_s > SILENT_S else None,
        [long_text(reading) for reading in view.readings if isinstance(reading, TelemetryEvent)] if running else [],
        launched.end_of_output if is_new and not running and exit_code and launched is not None else "",
        not running and not starting and view.state != "finished" and view.run_dir.recipe.is_file(),
    )


def kind_of(run_dir: RunDir) -> str:
    """Return the kind of a run's results: text or image. An unknown family counts as one of images."""
    from lora_rocm.families.registry import FAMILIES

    family = family_in(run_dir.recipe)
    return TEXT if family in FAMILIES and FAMILIES[str(family)].preview == TEXT else "image"


def _made_s(run_dir: RunDir) -> float:
    """Return when a run was made, in seconds since the epoch; now if its recipe is gone."""
    try:
        return run_dir.recipe.stat().st_mtime
    except OSError:
        return time.time()


@dataclass(frozen=True)
class PreviewRound:
    """The previews of one step, each with its prompt. files: paths relative to the run. texts: of language models."""

    updates: int
    files: Sequence[tuple[str, str]]
    texts: Sequence[tuple[str, str]]


def previews_of(run_dir: RunDir) -> list[PreviewRound]:
    """Return all rounds of previews, the newest first."""
    found = []
    for updates, folder in reversed(run_dir.list_samples()):
        prompts = _prompts(folder)
        images = sorted(path for path in folder.glob("*.png") if path.is_file() and run_dir.holds(path))
        files = [
            (path.relative_to(run_dir.path).as_posix(), prompts[number] if number < len(prompts) else "")
            for number, path in enumerate(images)
        ]
        texts = list(_texts(run_dir, folder, prompts))
        if files or texts:
            found.append(PreviewRound(updates, files, texts))
    return found


def _prompts(folder: Path) -> list[str]:
    """Return the prompts of a round; an empty list if they are not recorded or cannot be read."""
    try:
        requests = parse_json(read_plain(folder / "requests.json", MAX_PROMPT_BYTES * 16))
    except (OSError, ValueError, RecursionError):
        return []
    rows = requests if isinstance(requests, list) else []
    return [str(row["prompt"]) if isinstance(row, dict) and "prompt" in row else "" for row in rows]


def _texts(run_dir: RunDir, folder: Path, prompts: Sequence[str]) -> Iterator[tuple[str, str]]:
    for number, path in enumerate(sorted(folder.glob("*.txt"))):
        try:
            if run_dir.holds(path):
                text = read_plain(path, MAX_PROMPT_BYTES).decode("utf-8", "replace")
                yield text, prompts[number] if number < len(prompts) else ""
        except OSError:
            continue


def logs_of(run_dir: RunDir) -> list[tuple[int, str]]:
    """Return the ends of the workers' logs, each with its rank. A run on one GPU has one worker."""
    ranks = sorted({0, *(rank for rank, _ in run_dir.worker_locks())})
    return [(rank, text) for rank in ranks if (text := log_end(run_dir, rank))]


def log_end(run_dir: RunDir, rank: int = 0) -> str:
    """Return the end of a worker's log; empty if there is none."""
    path = run_dir.log_of(rank)
    try:
        if not (path.is_file() and run_dir.holds(path)):
            return ""
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MAX_LOG_BYTES))
            text = file.read(MAX_LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    return text if size <= MAX_LOG_BYTES else text.partition("\n")[2]


def _is_asked_to_stop(run_dir: RunDir, launched: Launched | None) -> bool:
    """Whether the run was asked to stop. A request from before its newest start counts no longer."""
    try:
        asked_s = run_dir.stop.stat().st_mtime
    except OSError:
        return False
    return launched is None or asked_s >= launched.began_s
