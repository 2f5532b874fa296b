"""``report.html`` of a run: one file that loads no others.

If the data of a section are damaged, the others are still shown.
"""

from __future__ import annotations

import math
import os
import platform
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_rocm.errors import RecipeError, StorageError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.files import write_atomic
from lora_rocm.foundation.json_text import object_in
from lora_rocm.foundation.redact import private_of, texts_in
from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.foundation.units import count_text, number_text, rate_text, size_text, time_text, times_text
from lora_rocm.model_files.peft_folder import peft_folders
from lora_rocm.model_files.readers import PROGRAMS, readers_line
from lora_rocm.page_parts.charts import Point, Series
from lora_rocm.page_parts.texts import phase_words, t
from lora_rocm.recipe.load import MAX_RECIPE_BYTES, load_recipe  # recipe: only read, for the report
from lora_rocm.recipe.saved_recipe import recipe_fault
from lora_rocm.recipe.schema import Recipe
from lora_rocm.report.concept_text import ADVICE, concept_quality, is_headline
from lora_rocm.report.figures import GuardCounts, smoothed
from lora_rocm.report.html import (
    Badge,
    Block,
    Heading,
    Paragraph,
    PictureTable,
    Preformatted,
    ProblemBox,
    ReportBox,
    StoryList,
    page,
    picture,
    plot,
    preview,
    section,
    table,
)
from lora_rocm.report.image_hints import hinted_losses
from lora_rocm.report.image_losses import images_section
from lora_rocm.report.incident_texts import failure_text
from lora_rocm.report.outliers import spikes_section
from lora_rocm.report.stories import problem_of, stories_of
from lora_rocm.report.telemetry_section import telemetry_section
from lora_rocm.report.vram_spill import spilled
from lora_rocm.rundir.event_types import (
    AlarmEvent,
    CanaryEvent,
    ChangeEvent,
    ConceptEvent,
    DataEvent,
    ErrorEvent,
    ExportEvent,
    FailureEvent,
    IncidentEvent,
    PhaseEvent,
    RepairedEvent,
    RestartEvent,
    StartEvent,
    StepEvent,
    TelemetryEvent,
    ValidationEvent,
    WatchedEvent,
)
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.results import faults_of_finished, named_paths, read_result, result_files
from lora_rocm.rundir.run_view import RunView
from lora_rocm.rundir.sample_losses import read_losses

MAX_ROUNDS = 12
MAX_STORIES = 500
MAX_PROMPTS = 8
MAX_WRONG = 200
PREVIEW_SIDE_PX = 256
GRID_SIDE_PX = 2000
MAX_JSON_BYTES = 1 << 24
MAX_EXPONENT = 700.0  # a larger power of e overflows a float
STEP_SHARES = {
    "loading_s": "loading",
    "copy_s": "copying to the device",
    "check_s": "checking the copies",
    "wait_s": "waiting for the verdict",
}


@dataclass(frozen=True)
class ReportData:
    """The data from which the report is written."""

    view: RunView
    recipe: Recipe | None
    result: dict[str, Any]
    environment: dict[str, Any]

    @property
    def run_dir(self) -> RunDir:
        return self.view.run_dir


def write_report(run_dir: RunDir, registry: FamilyRegistry = FAMILIES) -> Path:
    """Write the report from the run's current files, and return its path.

    Raises:
        StorageError: it cannot be written, or would replace a report that has more content.
    """
    view = RunView.of(run_dir)
    if view.log.last_s is None and run_dir.report.exists():
        raise StorageError(
            "events-lost",
            "The events of this run are gone or damaged: a new report would have no curves.",
            where=str(run_dir.events()),
            fix="Restore the file from a copy. The existing report was kept.",
        )
    # Read the run; a damaged part only loses its own sections
    try:
        recipe = load_recipe(run_dir.recipe, registry=registry).recipe
    except RecipeError:
        recipe = None
    result = read_result(run_dir)
    environment = object_in(run_dir.environment, MAX_JSON_BYTES) if run_dir.holds(run_dir.environment) else {}
    facts = ReportData(view, recipe, result, environment)
    title = recipe.output.name if recipe else run_dir.path.name
    remarks = [recipe_fault(run_dir, registry), *view.remarks_on_events()]
    remarks += faults_of_finished(run_dir) if run_dir.result.exists() else []
    # Build the page
    html = page(
        f"{title}: lora-rocm report",
        title,
        [*_headline(facts), *(Paragraph(text, "bad") for text in remarks if text)],
        [
            _usage(facts),
            _concept(facts, headline=True),
            _before_after(facts),
            _curves(facts),
            spikes_section(view.steps),
            _images(facts),
            _previews(facts),
            _concept(facts, headline=False),
            _guard(facts),
            _stories(facts),
            _repaired(facts),
            _exports(facts),
            _data(facts),
            _timings(facts),
            telemetry_section(view.supervisor.all(TelemetryEvent), view.supervisor.all(AlarmEvent)),
            _recipe(facts),
            _environment(facts),
        ],
    )
    write_atomic(run_dir.report, html.encode("utf-8", "replace"), run_dir.path)
    return run_dir.report


def _headline(facts: ReportData) -> list[Block]:
    view, data = facts.view, facts.view.last(DataEvent)
    said_of_recipe = list[Block]()
    if facts.recipe:
        model, lora = facts.recipe.model, facts.recipe.lora
        about = f"{lora.title} of {lora.size}, for {model.name_or_path}"
        about += f", from {count_text(data.samples, 'sample')}" if data else ""
        said_of_recipe.append(Paragraph(about, "soft"))
    if view.forked_from is not None:
        said_of_recipe.append(Paragraph(f"Forked from {view.forked_from.text}", "soft"))
    at = f"step {view.updates} of {'?' if view.max_train_steps is None else view.max_train_steps}"
    if view.outcome == "finished":
        finished = count_text(facts.result.get("updates") or view.updates, "step")
        return [Badge("finished"), *said_of_recipe, Paragraph(f"Finished: {finished}.", "good")]
    match view.end or view.hang:
        case ErrorEvent() as error:
            box = problem_of(error)
            return [Badge("failed"), *said_of_recipe, ProblemBox(replace(box, what=f"Ended at {at}: {box.what}"))]
        case FailureEvent() as hang:
            box = replace(problem_of(hang), what=f"Ended at {at}: {failure_text(hang)}")
            return [Badge("failed"), *said_of_recipe, ProblemBox(box)]
    return [*said_of_recipe, Paragraph(f"Not finished: {at}. Continue with --resume latest.", "bad")]


def _usage(facts: ReportData) -> ReportBox | None:
    # The table of files
    stale = {path: f"{each.reason}: {each.remedy}" for path, each in facts.view.files.stale.items()}
    rows = [
        (path.relative_to(facts.run_dir.path).as_posix(), _file_size(path), stale.get(export, ""))
        for export in result_files(facts.run_dir)
        for path in named_paths([export])
        if path != facts.run_dir.report
    ]
    lost = [Paragraph(text, "bad") for text in facts.view.files.lost]
    if not rows:
        return section(t("report.files_and_how_to_use_them"), *lost) if lost else None
    # How to use the files in each program
    hints, lora = list[Block](), facts.run_dir.lora
    if lora.exists():
        exported = next((event for event in reversed(facts.view.all(ExportEvent)) if event.path == lora.name), None)
        can_read, cannot_read = (exported.can_read, exported.cannot_read) if exported else ([], [])
        hints.append(Paragraph(f"{lora.name} goes to models/loras (ComfyUI) or models/Lora (Forge, A1111)."))
        if about := readers_line(can_read, cannot_read):
            hints.append(Paragraph(f"{about}."))
        if not any(program.startswith(PROGRAMS["diffusers"]) for program in cannot_read):
            line = f'pipeline.load_lora_weights("{lora.name}")'
            hints += [Paragraph("In diffusers, from the folder with the file:"), Preformatted(line)]
    if facts.recipe is not None and facts.recipe.spec.trains_on_texts:
        hints.append(
            Paragraph(
                "To chat with the model, with and without the LoRA, run this in the parent folder of the run directory:"
            )
        )
        hints.append(Preformatted(quoted(["lora-rocm", "chat", facts.run_dir.path.name])))
    for folder in peft_folders(facts.run_dir.peft_dir).values():
        read = "AutoPeftModelForCausalLM.from_pretrained" if folder.name == "model" else "PeftModel.from_pretrained"
        hints.append(
            Paragraph(f"In PEFT, {read} reads the folder {folder.relative_to(facts.run_dir.path).as_posix()}.")
        )
    trigger = facts.recipe.data.trigger_word if facts.recipe else None
    if trigger:
        hints.append(Paragraph(f"Use the trigger word in the prompt: {trigger}"))
    return section(t("report.files_and_how_to_use_them"), table(("file", "size", ""), rows), *lost, *hints)


def _file_size(path: Path) -> str:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return size_text(sum(file.stat().st_size for file in files))


def _concept(facts: ReportData, headline: bool) -> ReportBox | None:
    """Return the box for the concept score, or None if ``is_headline`` of the score differs from ``headline``.

    Scores for texts, which runs of earlier versions have, are not shown.
    """
    found, of_texts = facts.view.last(ConceptEvent), facts.recipe is not None and facts.recipe.spec.trains_on_texts
    if found is None or of_texts or is_headline(found) != headline:
        return None
    control = f"control {found.control:.2f}" if found.control is not None else "no control prompts were given"
    meaning = (
        "The chance that a preview made after training is nearer to the training images than one made before: "
        "0.50 means no change, 1.00 that every one is nearer. The control is the same number for prompts "
        "without the concept; only the difference to the control counts. Only colours and edges are compared."
    )
    details = found.detail.items() if isinstance(found.detail, dict) else [("detail", found.detail)]
    rows = [(name, f"{value:.3f}" if isinstance(value, float) else value) for name, value in details]
    quality, distances = concept_quality(found), table(("mean distance to the nearest training image", ""), rows)
    if headline:
        about = Paragraph(f"{quality}; {control}" if quality else control, "soft")
        score = Paragraph(f"{found.score:.2f}", "big")
        return section(t("report.has_it_learned_the_concept"), score, about, Paragraph(meaning), distances)
    numbers = Paragraph(f"Concept score {found.score:.2f}{f' ({quality})' if quality else ''}; {control}.")
    advice = [] if found.demo else [Paragraph(ADVICE)]
    title = t("report.are_the_previews_nearer_to_the_training_images")
    return section(title, numbers, Paragraph(meaning), *advice, distances)


def _before_after(facts: ReportData) -> ReportBox | None:
    path = facts.run_dir.before_after
    is_own = path.exists() and facts.run_dir.holds(path)
    return section(t("report.before_and_after"), picture(path, "before and after", GRID_SIDE_PX)) if is_own else None


def _curves(facts: ReportData) -> ReportBox | None:
    # The points
    steps = facts.view.steps
    loss: list[Point] = [*steps.curve("loss")]
    rate: list[Point] = [*steps.curve("learning_rate")]
    held_out: list[Point] = [
        (event.updates, event.loss) for event in facts.view.all(ValidationEvent) if event.loss is not None
    ]
    watched: list[Point] = [
        (event.updates, event.loss) for event in facts.view.all(WatchedEvent) if event.loss is not None
    ]
    # The plots; one without finite points is omitted
    texts = facts.recipe is not None and facts.recipe.spec.trains_on_texts
    pairs = facts.recipe is not None and facts.recipe.objective.compares_pairs
    plots = [
        _smoothed_plot("loss", loss),
        *(_smoothed_plot(name, [*points]) for name, points in steps.curves_by_name("measures").items()),
        *_held_out_plots("held-out", held_out, texts and not pairs),
        *_held_out_plots("watched", watched, texts),
        *((f"Held-out {name}", [Series(name, points, "dots")]) for name, points in _measures(facts).items()),
        ("Learning rate", [Series("learning rate", rate)]),
        *(
            (name.replace("_", " "), [Series(name, [*points])])
            for name, points in steps.curves_by_name("optimizer").items()
        ),
    ]
    parts = list[Block]()
    for title, series in plots:
        if drawn := plot(title, series, t("report.step")):
            parts.append(drawn)
    return section(t("run.curves"), *parts)


def _smoothed_plot(name: str, points: list[Point]) -> tuple[str, list[Series]]:
    lines = [Series(t("run.each_step"), points, "raw"), Series(t("run.smoothed"), smoothed(points), "smooth")]
    return name.capitalize(), lines


def _held_out_plots(name: str, losses: list[Point], are_entropies: bool) -> Iterator[tuple[str, list[Series]]]:
    """Plots of a loss on samples that are not trained on, and of its perplexity if the loss is a cross-entropy."""
    points = sorted(dict(losses).items())
    yield f"{name.capitalize()} loss", [Series(f"{name} loss", points, "dots")]
    perplexity = [(updates, math.exp(min(loss, MAX_EXPONENT))) for updates, loss in points if are_entropies]
    yield f"{name.capitalize()} perplexity", [Series(f"{name} perplexity", perplexity, "dots")]


def _measures(facts: ReportData) -> dict[str, list[Point]]:
    """Values of the held-out samples other than the loss, by name.

    If a step was repeated, only its newest value is included.
    """
    found = defaultdict[str, dict[float, float]](dict)
    for event in facts.view.all(ValidationEvent):
        for name, value in event.measures.items():
            found[name][event.updates] = value
    return {name: sorted(values.items()) for name, values in found.items()}


def _images(facts: ReportData) -> ReportBox | None:
    losses = read_losses(facts.run_dir.all_losses())
    return images_section(hinted_losses(losses, facts.recipe), losses.lost_after(facts.view.updates - 1))


def _previews(facts: ReportData) -> ReportBox | None:
    # The files; links to files outside of the run are not opened
    rounds = [(updates, sorted(folder.glob("[0-9]*.*"))) for updates, folder in facts.run_dir.list_samples()]
    num_files = sum(len(files) for _, files in rounds)
    rounds = [(updates, [file for file in files if facts.run_dir.holds(file)]) for updates, files in rounds]
    links = num_files - sum(len(files) for _, files in rounds)
    rounds = [(updates, files) for updates, files in rounds if files]
    outside = (
        Paragraph(f"Not shown: {count_text(links, 'link')} to files outside of the run.", "bad") if links else None
    )
    if not rounds:
        return section(t("report.previews_over_time"), outside) if outside else None
    # Evenly chosen rounds, and the first prompts
    num_rounds = len(rounds)
    if num_rounds > MAX_ROUNDS:
        stride = (len(rounds) - 1) / (MAX_ROUNDS - 1)
        rounds = [rounds[round(number * stride)] for number in range(MAX_ROUNDS)]
    prompts = facts.recipe.sample.image_prompts if facts.recipe else []
    most = max(len(files) for _, files in rounds)
    columns = min(MAX_PROMPTS, most)
    head = [prompts[number] if number < len(prompts) else f"preview {number + 1}" for number in range(columns)]
    rows = [
        (f"step {updates}" if updates else "before", [preview(file, PREVIEW_SIDE_PX) for file in files[:columns]])
        for updates, files in rounds
    ]
    left_out = [f"{columns} of {most} prompts"] if columns < most else []
    left_out += [f"{len(rounds)} of {num_rounds} rounds"] if len(rounds) < num_rounds else []
    note = f"Shown are {' and '.join(left_out)}; all previews are in the folder samples of the run." if left_out else ""
    said = Paragraph(note, "soft") if note else None
    return section(t("report.previews_over_time"), outside, said, PictureTable(head, rows))


def _guard(facts: ReportData) -> ReportBox | None:
    incidents = facts.view.all(IncidentEvent)
    if not facts.view.steps and not incidents:
        return None
    counted = GuardCounts()
    counted.add_all(facts.view.log.steps)
    failures = counted.failures
    sentence = f"{failures} failed and were sent again" if failures else "none failed"
    counts = Paragraph(f"{counted.checks} transfers were checked, {sentence}.", "bad" if failures else "good")
    kinds = Counter(incident.kind for incident in incidents)
    summary = Paragraph(", ".join(f"{count} x {kind}" for kind, count in kinds.items())) if kinds else None
    return section(t("report.guard"), counts, _canaries(facts), summary)


def _canaries(facts: ReportData) -> Paragraph | None:
    """A sentence about the number of reference checks and their failures; None if there were no checks."""
    found = facts.view.all(CanaryEvent)
    wrong = [f"after step {event.updates}: {event.detail}" for event in found if not event.passed]
    if not found:
        return None
    sentence = f"Frozen weights, and kernels with known results, were checked {times_text(len(found))}"
    if wrong:
        return Paragraph(f"{sentence}, {len(wrong)} of them with a failure: {'; '.join(wrong[:MAX_WRONG])}", "bad")
    return Paragraph(f"{sentence}: always correct.", "good")


def _stories(facts: ReportData) -> ReportBox | None:
    """The box with what happened, the same stories as on the page of the run; None if nothing did."""
    stories = stories_of(facts.view, MAX_STORIES)
    restarts = sum(isinstance(event, RestartEvent) for event in facts.view.trouble)
    times = f"The training process was started again {times_text(restarts)}."
    shown = [Paragraph(times) if restarts else None, StoryList(stories)] if stories.found else []
    return section(t("run.stories"), *shown)


def _repaired(facts: ReportData) -> ReportBox | None:
    repaired = facts.view.all(RepairedEvent)
    if not repaired:
        return None
    kinds = Counter(event.kind for event in repaired)
    counted = ", ".join(f"{count} of {kind}" for kind, count in sorted(kinds.items()))
    what = f"Cache entries that were damaged and encoded again, never trained on: {counted}."
    advice = "Many of them, or more in every run, point to a failing disk: lora-rocm cache verify reads every entry."
    rows = [(event.kind, event.item, event.reason) for event in repaired]
    head = ("entry", "image or caption", "what was wrong")
    return section(t("report.cache"), Paragraph(what, "bad"), Paragraph(advice, "soft"), table(head, rows))


def _exports(facts: ReportData) -> ReportBox | None:
    newest = {event.path: event for event in facts.view.all(ExportEvent)}
    stale = {path: f" ({each.reason})" for path, each in facts.view.files.stale.items()}
    rows = [
        (
            ", ".join([event.path, *event.embeddings]) + stale.get(facts.run_dir.path / event.path, ""),
            event.format,
            number_text(event.max_difference),
            ", ".join(event.cannot_read) or "none known",
        )
        for event in newest.values()
    ]
    note = Paragraph(
        "Each file was loaded back by another reader; the difference is the largest one between the file's effect on "
        "the model and the trained adapter's effect.",
        "soft",
    )
    head = ("file", "format", "largest difference", "programs that cannot read it")
    return section(t("report.exports_loaded_back"), table(head, rows), note) if rows else None


def _data(facts: ReportData) -> ReportBox | None:
    data = facts.view.last(DataEvent)
    if data is None:
        return None
    aside = [(problem["where"], problem["what"], problem.get("fix", "")) for problem in data.set_aside]
    buckets = sorted(data.buckets.items(), key=lambda pair: -pair[1])
    return section(
        t("report.data"),
        Paragraph(
            f"{count_text(data.samples, 'sample')}, {count_text(data.steps_per_epoch, 'step')} per epoch, "
            f"{len(aside)} skipped."
        ),
        *(Paragraph(notice) for notice in data.notices),
        *_titled(t("report.skipped"), table(("sample", "why", "what to do"), aside)),
        *_titled(t("report.buckets"), table(("size", "samples"), buckets)),
    )


def _titled(title: str, block: Block | None) -> list[Block]:
    """Return a heading and a block; an empty list if there is no block."""
    return [Heading(title), block] if block else []


def _timings(facts: ReportData) -> ReportBox | None:
    seconds: dict[str, float] = defaultdict(float)
    for event in facts.view.all(PhaseEvent):
        if event.state == "end":
            seconds[event.phase] += event.seconds
    rows: list[tuple[str, str]] = [(phase_words(name), time_text(spent)) for name, spent in seconds.items()]
    columns = facts.view.steps.real
    total_s = sum(columns["step_s"])
    if total_s:
        rows.append(("speed", rate_text(len(facts.view.steps) / total_s)))
        for key, name in STEP_SHARES.items():
            rows.append((f"share of a step: {name}", f"{sum(columns[key]) / total_s:.2%}"))
        rows.append(("memory, highest", size_text(max(columns["memory_bytes"]))))
    starts = len(facts.view.all(StartEvent))
    note = Paragraph(f'"{phase_words("step")}" includes checkpoints and previews.', "soft") if rows else None
    device = facts.recipe.runtime.device if facts.recipe else "auto"
    slow = [
        Paragraph(text, "bad")
        for text in spilled(facts.environment, device, facts.view.log.in_order(StartEvent, ChangeEvent, StepEvent))
    ]
    often = Paragraph(f"Started {starts} times.") if starts > 1 else None
    return section(t("report.timings"), table((), rows), *slow, note, often)


def _recipe(facts: ReportData) -> ReportBox | None:
    if not facts.run_dir.holds(facts.run_dir.recipe):
        return section(t("report.recipe"), Paragraph("Not shown: it is a link to a file outside of the run.", "bad"))
    try:
        text = read_plain(facts.run_dir.recipe, MAX_RECIPE_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    return section(t("report.recipe"), Preformatted(text))


def readable(value: object) -> str:
    """Format a value of ``environment.json``: mappings as "key: value", lists with commas; empty parts are omitted."""
    if value is None or value in ({}, [], ""):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_inner(each)}" for key, each in value.items() if each not in (None, {}, [], ""))
    return ", ".join(map(_inner, value)) if isinstance(value, list | tuple) else str(value)


def _inner(value: object) -> str:
    """Format a value inside another value; it is in parentheses if it has several parts."""
    return f"({readable(value)})" if isinstance(value, dict | list | tuple) and value else readable(value)


def _environment(facts: ReportData) -> ReportBox | None:
    private = private_of(os.environ, platform.node(), texts_in(facts.environment))
    start, found = facts.view.last(StartEvent), private.value(dict(facts.environment))
    rows: list[tuple[str, object]] = []
    if start:
        rows += [(key, getattr(start, key)) for key in ("device", "precision", "threads", "torch")]
    packages, variables = found.pop("packages", {}), found.pop("variables", [])
    rows += sorted((key, readable(value)) for key, value in found.items())
    if isinstance(packages, dict):
        rows += [(name, version or "not installed") for name, version in packages.items()]
    rows_of_plan = [row for row in variables if isinstance(row, dict)] if isinstance(variables, list) else []
    planned = [(row.get("variable"), row.get("value"), row.get("why")) for row in rows_of_plan]
    return section(
        t("report.environment"),
        table((), rows),
        *_titled(t("report.variables_set_for_the_training_process"), table(("variable", "value", "why"), planned)),
    )
