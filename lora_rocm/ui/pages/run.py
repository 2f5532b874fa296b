"""Runs: the list, and one run with its state, its curves, its previews and its incidents."""

from __future__ import annotations

import math
import os
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from lora_rocm.errors import UserError
from lora_rocm.foundation.files import refuse_link
from lora_rocm.page_parts.charts import reduced
from lora_rocm.report.figures import smoothed
from lora_rocm.report.stories import stories_of
from lora_rocm.rundir.disk_space import bytes_in
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.manage_runs import ARCHIVE, RunChange
from lora_rocm.ui.context import context_of
from lora_rocm.ui.curves import curve_of, to_bytes
from lora_rocm.ui.fields import query_of, text_of
from lora_rocm.ui.folder_zip import zip_answer
from lora_rocm.ui.live import live_id
from lora_rocm.ui.pages import run_exports, run_fork
from lora_rocm.ui.part import Part
from lora_rocm.ui.rendering import fragment, page, url
from lora_rocm.ui.run_details import ShownDetails, details_of, logs_of, previews_of
from lora_rocm.ui.run_family import parent_of
from lora_rocm.ui.run_files import download_name, result_folder, result_folders, result_paths, savable, sizes_of
from lora_rocm.ui.run_list import newest_runs, run_names
from lora_rocm.ui.thumbnails import MEDIA_TYPE, SIDES_PX, thumbnail

LIST, VIEW = "runs.html.j2", "run.html.j2"
ROUNDS, OTHERS = 12, 100
"""Rounds of previews that a page shows at first, and runs with which it can be compared."""


def listed(request: Request) -> Response:
    """The list of runs."""
    archived = "archived" in request.query_params
    return page(request, LIST, runs=newest_runs(context_of(request).folders, archived=archived), archived=archived)


def listed_again(request: Request) -> Response:
    """The rows of the list, again."""
    archived = "archived" in request.query_params
    runs = newest_runs(context_of(request).folders, archived=archived)
    return fragment(request, LIST, "runs", runs=runs, archived=archived)


def view(request: Request) -> Response:
    """The page of one run. Files, previews and the log follow on their own."""
    ui, run_dir = context_of(request), _run(request)
    name = ui.folders.name_of(run_dir.path)
    live = url("/live", **{"run": name, "from": live_id(run_dir)})
    others = [pair for pair in run_names(ui.folders, OTHERS) if pair[0] != name]
    shown = _details(request, run_dir)
    return page(
        request,
        VIEW,
        live=live,
        run=shown,
        name=name,
        others=others,
        stories=stories_of(shown.view),
        is_archived=run_dir.path.parent.name == ARCHIVE,
        parent=parent_of(ui.folders, run_dir),
        export_key=(key := run_exports.export_key(ui, run_dir)),
        is_exported=ui.background.of(key) is not None,
        checkpoints=[step for step, _ in run_dir.list_checkpoints()],
    )


def state(request: Request) -> Response:
    """The state of one run, again."""
    run_dir = _run(request)
    name = context_of(request).folders.name_of(run_dir.path)
    return fragment(request, VIEW, "state", run=_details(request, run_dir), name=name)


def stories(request: Request) -> Response:
    """The incidents of one run, again."""
    return fragment(request, VIEW, "stories", stories=stories_of(context_of(request).views.of(_run(request))))


def curve(request: Request) -> Response:
    """A curve as float32 numbers: all steps, then all values.

    ``smooth``: weight of the moving average. ``until``: the last step.
    """
    until = _number(request, "until", math.inf)
    whole = curve_of(context_of(request).views.of(_run(request)), query_of(request, "field"))
    found = whole if until == math.inf else [point for point in whole if point[0] <= until]
    weight = min(max(_number(request, "smooth", 0.0), 0.0), 0.9999)
    chosen = reduced(smoothed(found, weight) if weight else found, int(_number(request, "points", 1200)))
    return Response(to_bytes(chosen), media_type="application/octet-stream")


def previews(request: Request) -> Response:
    """The rounds of previews, the newest first."""
    run_dir = _run(request)
    name = context_of(request).folders.name_of(run_dir.path)
    found = previews_of(run_dir)
    are_all = "all" in request.query_params
    shown = found if are_all else found[:ROUNDS]
    more = len(found) - len(shown)
    return fragment(request, VIEW, "previews", name=name, rounds=shown, num_more=more, all=are_all)


def picture(request: Request) -> Response:
    """A preview of a run, reduced to a square of ``side`` pixels."""
    path = _file(request)
    content, version = thumbnail(path, int(_number(request, "side", SIDES_PX[1])))
    headers = {"etag": f'"{version}"', "cache-control": "private, no-cache"}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=MEDIA_TYPE, headers=headers)


def files(request: Request) -> Response:
    """The result files of a run, its remarks and its newest checkpoint."""
    run_dir = _run(request)
    name = context_of(request).folders.name_of(run_dir.path)
    found = context_of(request).views.of(run_dir)
    paths, folders = result_paths(found), result_folders(found)
    sizes = sizes_of([*paths, *(path for folder in folders for path in folder.files)])
    return fragment(request, VIEW, "files", name=name, paths=paths, result_folders=folders, found=found, sizes=sizes)


def download(request: Request) -> Response:
    """A result file of a run, to be saved. Only files that the run lists as its results are served."""
    run_dir, path = _run(request), _file(request)
    if path not in savable(context_of(request).views.of(run_dir)):
        fix = "The page of the run lists its files."
        raise UserError("file-unknown", "This is not a result file of the run.", where=str(path), fix=fix)
    return FileResponse(path, filename=download_name(run_dir, path), media_type="application/octet-stream")


def download_folder(request: Request) -> Response:
    """A result folder of a run, such as a PEFT adapter, to be saved as one ZIP file."""
    run_dir, path = _run(request), _file(request)
    folder = result_folder(context_of(request).views.of(run_dir), path)
    if folder is None:
        fix = "The page of the run lists its files."
        raise UserError("file-unknown", "This is not a result folder of the run.", where=str(path), fix=fix)
    return zip_answer(run_dir, folder)


def report(request: Request) -> Response:
    """The report of a run: a single file in a sandbox, which runs only the program's own scripts and loads nothing."""
    from lora_rocm.page_parts.inlined import inlined_files
    from lora_rocm.report.report import write_report

    run_dir = _run(request)
    path = write_report(run_dir)
    headers = {"content-security-policy": f"sandbox allow-scripts; {inlined_files().policy}"}
    return FileResponse(path, media_type="text/html", content_disposition_type="inline", headers=headers)


def speed(request: Request) -> Response:
    """The measured speed as a line for a public table, shown before it is copied."""
    from lora_rocm.report.measured_line import measured_line

    return fragment(request, VIEW, "speed", measured=measured_line(context_of(request).views.of(_run(request))))


def log(request: Request) -> Response:
    """The ends of the workers' logs."""
    return fragment(request, VIEW, "log", logs=logs_of(_run(request)))


def recipe(request: Request) -> Response:
    """The run's own recipe."""
    run_dir = _run(request)
    content, _ = context_of(request).edits.read(context_of(request).folders.resolve(str(run_dir.recipe)))
    return fragment(request, VIEW, "recipe", recipe=(content or b"").decode("utf-8", "replace"))


def size(request: Request) -> Response:
    """The space that deleting the run frees."""
    return fragment(request, VIEW, "freed", freed=bytes_in(_run(request).path))


def stop(request: Request) -> Response:
    """Ask the run to finish its step, save and end."""
    run_dir = _run(request)
    run_dir.ask_to_stop()
    return state(request)


def resume(request: Request) -> Response:
    """Continue the run in its own process."""
    ui = context_of(request)
    ui.launches.resume(_run(request), ui.folders.working)
    return state(request)


async def rename(request: Request) -> Response:
    """Rename the run's directory."""
    from starlette.concurrency import run_in_threadpool

    from lora_rocm.supervisor.manage_runs import rename_run

    run, name = _run_itself(request).path, await text_of(request, "name")
    return _moved(request, await run_in_threadpool(rename_run, run, name))


def archive(request: Request) -> Response:
    """Move the run into the archive."""
    from lora_rocm.supervisor.manage_runs import archive_run

    return _moved(request, archive_run(_run_itself(request).path))


def restore(request: Request) -> Response:
    """Move the run out of the archive."""
    from lora_rocm.supervisor.manage_runs import restore_run

    return _moved(request, restore_run(_run_itself(request).path))


def delete(request: Request) -> Response:
    """Delete the run with all its files."""
    from lora_rocm.supervisor.manage_runs import delete_run

    delete_run(_run_itself(request).path)
    return RedirectResponse("/runs", 303)


def _moved(request: Request, change: RunChange) -> Response:
    assert change.now is not None
    return RedirectResponse(url("/runs/view", dir=context_of(request).folders.name_of(change.now)), 303)


def _run(request: Request) -> RunDir:
    return context_of(request).folders.run(query_of(request, "dir"))


def _run_itself(request: Request) -> RunDir:
    """Return the run, to move or delete it.

    Raises:
        StorageError: link-refused: the request names a link to the run.
    """
    folders, text = context_of(request).folders, query_of(request, "dir")
    found = folders.run(text)
    refuse_link(Path(os.path.abspath(folders.working / text)))
    return found


def _file(request: Request) -> Path:
    """Return a file in the run. Links that leave the run's directory are refused.

    Raises:
        UserError: outside-folders: it is outside.
    """
    run_dir = _run(request)
    path = context_of(request).folders.resolve(str(run_dir.path / query_of(request, "file")))
    if not run_dir.holds(path):
        fix = "Only files in the run's own directory are shown."
        raise UserError("outside-folders", "This file is not in the run.", where=str(path), fix=fix)
    return path


def _details(request: Request, run_dir: RunDir) -> ShownDetails:
    ui = context_of(request)
    return details_of(ui.views.of(run_dir), ui.launches.of(run_dir.path))


def _number(request: Request, name: str, default: float) -> float:
    """Return a number of the address. Anything else counts as the default."""
    try:
        value = float(request.query_params.get(name, default))
    except ValueError:
        return default
    return value if abs(value) < 1e9 else default


PART = Part(
    "run",
    "/runs",
    [
        Route("/runs", listed),
        Route("/runs/list", listed_again),
        Route("/runs/view", view),
        Route("/runs/state", state),
        Route("/runs/stories", stories),
        Route("/runs/curve", curve),
        Route("/runs/previews", previews),
        Route("/runs/picture", picture),
        Route("/runs/files", files),
        Route("/runs/download", download),
        Route("/runs/zip", download_folder),
        Route("/runs/report", report),
        Route("/runs/speed", speed),
        Route("/runs/log", log),
        Route("/runs/recipe", recipe),
        Route("/runs/size", size),
        *run_fork.ROUTES,
        *run_exports.ROUTES,
        Route("/runs/stop", stop, methods=["POST"]),
        Route("/runs/resume", resume, methods=["POST"]),
        Route("/runs/rename", rename, methods=["POST"]),
        Route("/runs/archive", archive, methods=["POST"]),
        Route("/runs/restore", restore, methods=["POST"]),
        Route("/runs/delete", delete, methods=["POST"]),
    ],
)
