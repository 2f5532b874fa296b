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
from lora_rocm.ui.run_files import export_place

if TYPE_CHECKING:
    from lora_rocm.commands.sample_export import ExportResult

TEMPLATE = "run_exports.html.j2"


def shown(request: Request) -> Response:
    """The formats with a button for each, and the progress or the result of the newest export."""
    ui = context_of(request)
    run_dir = ui.folders.run(query_of(request, "dir"))
    query = request.query_params
    return _shown(request, run_dir, query.get("step", ""), query.get("llama_cpp", "").strip())


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
    from lora_rocm.recipe.adapter_sections import GGUF
    from lora_rocm.rundir.remains import leaving_nothing
    from lora_rocm.supervisor.choose_run_dir import open_recipe

    ui = context_of(request)
    run_dir, recipe = open_recipe(ui.folders.run(query_of(request, "dir")).path, FAMILIES)
    is_known = file_format in recipe.exportable
    output = export_place(run_dir, file_format, step) if is_known else None
    converter = _converter(ui, llama_cpp) if is_known and file_format == GGUF else None

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
    return _shown(request, run_dir, str(step), llama_cpp)


def cancel(request: Request) -> Response:
    """Cancel an export. Its child process is ended, and unfinished files are removed."""
    ui = context_of(request)
    run_dir = ui.folders.run(query_of(request, "dir"))
    if (work := ui.background.of(export_key(ui, run_dir))) is not None:
        work.cancel()
        work.wait(1.0)
    return _shown(request, run_dir, "", "")


def export_key(ui: UiContext, run_dir: RunDir) -> str:
    """Return the key of a run's exports among the work in the background."""
    return key_of("export", ui.folders.name_of(run_dir.path))


def _shown(request: Request, run_dir: RunDir, step: str, llama_cpp: str) -> Response:
    from lora_rocm.commands.sample_export import export_text
    from lora_rocm.families.registry import FAMILIES
    from lora_rocm.recipe.adapter_sections import GGUF
    from lora_rocm.supervisor.choose_run_dir import open_recipe

    ui = context_of(request)
    steps = [updates for updates, _ in run_dir.list_checkpoints()]
    formats = open_recipe(run_dir.path, FAMILIES)[1].exportable if steps else ()
    work = ui.background.of(export_key(ui, run_dir))
    result: ExportResult | None = work.result if work is not None else None
    written = [] if result is None or not run_dir.holds(result.path) else [result.path]
    return fragment(
        request,
        TEMPLATE,
        "exports",
        name=ui.folders.name_of(run_dir.path),
        path=run_dir.path,
        formats=formats,
        converter_fault=_converter_fault(ui, llama_cpp) if GGUF in formats else "",
        llama_cpp=llama_cpp,
        steps=steps[::-1],
        step=int(step) if step in map(str, steps) else max(steps, default=None),
        work=work,
        said=export_text(result).splitlines() if result is not None else [],
        written=[path for path in written if path.is_file()],
        is_folder=any(path.is_dir() for path in written),
    )


def _converter_fault(ui: UiContext, llama_cpp: str) -> str:
    """Return why no GGUF file can be written, as ``begin`` refuses it; an empty text if one can."""
    try:
        _converter(ui, llama_cpp)
    except UserError as error:
        return error.what if llama_cpp else t("export_format.no_converter")
    return ""


def _converter(ui: UiContext, text: str) -> Path:
    """Return llama.cpp's script: in the folder that the page's field names, or as ``lora-rocm export`` finds it.

    Raises:
        UserError: outside-folders; no-folder: there is no such folder; or gguf-converter-missing.
    """
    from lora_rocm.commands.sample_export import SCRIPT, find_converter

    if not text:
        return find_converter(None)
    folder = ui.folders.resolve(text)
    if not folder.is_dir():
        fix = "Write the path of llama.cpp's folder."
        raise UserError("no-folder", "There is no such folder.", where=text[:200], fix=fix)
    return find_converter(ui.folders.resolve(str(folder / SCRIPT)))


ROUTES = [
    Route("/runs/exports", shown),
    Route("/runs/exports/begin", begin, methods=["POST"]),
    Route("/runs/exports/cancel", cancel, methods=["POST"]),
]
