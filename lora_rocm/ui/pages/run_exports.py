"""Exports of a run's LoRA in other formats, begun and cancelled in the page. They do what ``lora-rocm export`` does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lora_rocm.errors import UserError
from lora_rocm.page_parts.texts import t
from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui.background import Work, key_of
from lora_rocm.ui.context import UiContext, context_of
from lora_rocm.ui.fields import fields_of, query_of, text_of, whole_number_of
from lora_rocm.ui.free_gpu import require_room
from lora_rocm.ui.rendering import fragment
from lora_rocm.ui.run_files import export_place, files_in

if TYPE_CHECKING:
    from lora_rocm.commands.sample_export import ExportResult

TEMPLATE = "run_exports.html.j2"


def shown(request: Request) -> Response:
    """The formats with a button for each, and the progress or the result of the newest export."""
    ui = context_of(request)
    run_dir = ui.folders.run(query_of(request, "dir"))
    return _shown(request, run_dir, request.query_params.get("step", ""))


async def begin(request: Request) -> Response:
    """Begin an export in the background."""
    file_format = await text_of(request, "format")
    step = whole_number_of({"step": await text_of(request, "step")}, "step")
    llama_cpp = (await fields_of(request)).get("llama_cpp", "")
    named = llama_cpp.strip() if isinstance(llama_cpp, str) else ""
    return await run_in_threadpool(_begin, request, file_format, step, named)


def _begin(request: Request, file_format: str, step: int, llama_cpp: str) -> Response:
    from lora_rocm.commands.sample_export import export
    from lora_rocm.families.registry import FAMILIES
    from lora_rocm.foundation.files import make_folder
    from lora_rocm.rundir.remains import leaving_nothing
    from lora_rocm.supervisor.choose_run_dir import open_recipe

    ui = context_of(request)
    run_dir, recipe = open_recipe(ui.folders.run(query_of(request, "dir")).path, FAMILIES)
    output = export_place(run_dir, file_format, step) if file_format in recipe.exportable else None
    converter = _converter(ui, llama_cpp) if llama_cpp and file_format == "gguf" else None

    def work(work: Work) -> ExportResult:
        if file_format not in recipe.spec.conversions:
            work.report(t("work.loading"))
            require_room(ui.folders, run_dir)
        with leaving_nothing(output or run_dir.export_of(file_format)):
            if output is not None:
                make_folder(output.parent, run_dir.path)
            return export(
                run_dir.path,
                file_format,
                output=output,
                dtype=None,
                converter=converter,
                step=step,
                notify=work.report,
                require_wanted=work.require_wanted,
            )

    ui.background.start(export_key(ui, run_dir), work)
    return _shown(request, run_dir, str(step))


def cancel(request: Request) -> Response:
    """Cancel an export. Its child process is ended, and unfinished files are removed."""
    ui = context_of(request)
    run_dir = ui.folders.run(query_of(request, "dir"))
    if (work := ui.background.of(export_key(ui, run_dir))) is not None:
        work.cancel()
        work.wait(1.0)
    return _shown(request, run_dir, "")


def export_key(ui: UiContext, run_dir: RunDir) -> str:
    """Return the key of a run's exports among the work in the background."""
    return key_of("export", ui.folders.name_of(run_dir.path))


def _shown(request: Request, run_dir: RunDir, step: str) -> Response:
    from lora_rocm.commands.sample_export import export_text, finds_converter
    from lora_rocm.families.registry import FAMILIES
    from lora_rocm.supervisor.choose_run_dir import open_recipe

    ui = context_of(request)
    steps = [updates for updates, _ in run_dir.list_checkpoints()]
    formats = open_recipe(run_dir.path, FAMILIES)[1].exportable if steps else ()
    work = ui.background.of(export_key(ui, run_dir))
    result: ExportResult | None = work.result if work is not None else None
    written: list[Path] = []
    if result is not None and run_dir.holds(result.path):
        written = files_in(run_dir, result.path) if result.path.is_dir() else [result.path]
    return fragment(
        request,
        TEMPLATE,
        "exports",
        name=ui.folders.name_of(run_dir.path),
        path=run_dir.path,
        formats=formats,
        lacks_converter="gguf" in formats and not finds_converter(),
        steps=steps[::-1],
        step=int(step) if step in map(str, steps) else max(steps, default=None),
        work=work,
        said=export_text(result).splitlines() if result is not None else [],
        written=[path for path in written if path.is_file()],
    )


def _converter(ui: UiContext, text: str) -> Path:
    """Return llama.cpp's script in a named folder.

    Raises:
        UserError: outside-folders; or no-folder: there is no such folder.
    """
    from lora_rocm.commands.sample_export import SCRIPT

    folder = ui.folders.resolve(text)
    if not folder.is_dir():
        fix = "Write the path of llama.cpp's folder."
        raise UserError("no-folder", "There is no such folder.", where=text[:200], fix=fix)
    return ui.folders.resolve(str(folder / SCRIPT))


ROUTES = [
    Route("/runs/exports", shown),
    Route("/runs/exports/begin", begin, methods=["POST"]),
    Route("/runs/exports/cancel", cancel, methods=["POST"]),
]
