"""Try: a prompt with a run's LoRA and without it, side by side, and a history. Language models chat (``try_chat``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lora_rocm.errors import UserError
from lora_rocm.page_parts.texts import t
from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui.background import Work, key_of
from lora_rocm.ui.context import context_of
from lora_rocm.ui.fields import fields_of, number_of, query_of, whole_number_of
from lora_rocm.ui.free_gpu import require_room, running_runs
from lora_rocm.ui.pages import try_chat
from lora_rocm.ui.part import Part
from lora_rocm.ui.rendering import fragment, page
from lora_rocm.ui.run_list import newest_runs

if TYPE_CHECKING:
    from lora_rocm.commands.tries import Try, TryValues
    from lora_rocm.recipe.schema import Recipe

LIST, VIEW = "try.html.j2", "try_run.html.j2"
NUM_SHOWN = 20


@dataclass(frozen=True)
class TryRun:
    """A run in this part. name: what requests call it."""

    run_dir: RunDir
    name: str
    recipe: Recipe

    @property
    def key(self) -> str:
        """The name of its work in the background."""
        return key_of("try", self.name)


@dataclass(frozen=True)
class ShownTry:
    """A try of the history. picture, base: relative to the run. again: the query of the page with its values."""

    values: TryValues
    picture: str
    base: str
    again: dict[str, object]


def listed(request: Request) -> Response:
    """The runs with LoRA files."""
    runs = [run for run in newest_runs(context_of(request).folders) if _has_file(RunDir(run.listed.path))]
    return page(request, LIST, runs=runs)


def view(request: Request) -> Response:
    """The page of one run. Values in the address fill the fields."""
    found = _open(request)
    spec, given = found.recipe.spec, request.query_params
    if spec.trains_on_texts:
        return try_chat.chat_page(request, found.run_dir)
    prompts = found.recipe.sample.image_prompts
    values = {
        "prompt": given.get("prompt", prompts[0] if prompts else ""),
        "negative": given.get("negative", found.recipe.sample.negative_prompt),
        "strength": given.get("strength", "1"),
        "seed": given.get("seed", str(found.recipe.sample.seed)),
        "steps": given.get("steps", str(found.recipe.sample.steps)),
        "sampler": given.get("sampler", ""),
        "file": given.get("file", "0"),
    }
    return page(
        request,
        VIEW,
        name=found.name,
        title=found.run_dir.path.name,
        values=values,
        takes_negative=spec.reads("sample.negative_prompt"),
        samplers=spec.samplers if spec.reads("sample.sampler") else (),
        files=[step for step, _ in found.run_dir.checkpoint_loras()],
        key=found.key,
        is_busy=bool(running_runs(context_of(request).folders)),
        work=context_of(request).background.of(found.key),
        tries=_shown(found),
    )


async def draw(request: Request) -> Response:
    """Draw a prompt in the background."""
    fields = await fields_of(request)
    given = {key: value for key, value in fields.items() if isinstance(value, str)}
    return await run_in_threadpool(_drawn, request, given)


def _drawn(request: Request, given: dict[str, str]) -> Response:
    from lora_rocm.commands.tries import TryValues, draw_try

    ui, found = context_of(request), _open(request)
    if not given.get("prompt", "").strip():
        raise UserError("field-missing", "This field is empty.", where="prompt", fix="Write a prompt.")
    values = TryValues(
        given["prompt"].strip(),
        given.get("negative", "").strip(),
        number_of(given, "strength"),
        whole_number_of(given, "seed"),
        whole_number_of(given, "steps"),
        given.get("sampler", ""),
        whole_number_of(given, "file"),
    )
    values.require_sane()

    def work(work: Work) -> Try:
        work.report(t("work.loading"))
        require_room(ui.folders, found.run_dir)
        return draw_try(found.run_dir, values, work.report, work.advance, work.require_wanted)

    ui.background.start(found.key, work)
    return drawing(request)


def drawing(request: Request) -> Response:
    """The progress of drawing."""
    found = _open(request)
    work = context_of(request).background.of(found.key)
    return fragment(request, VIEW, "drawing", name=found.name, work=work)


def cancel(request: Request) -> Response:
    """Cancel drawing."""
    found = _open(request)
    if (work := context_of(request).background.of(found.key)) is not None:
        work.cancel()
    return drawing(request)


def history(request: Request) -> Response:
    """The newest tries, again."""
    found = _open(request)
    return fragment(request, VIEW, "history", name=found.name, tries=_shown(found))


def _open(request: Request) -> TryRun:
    from lora_rocm.families.registry import FAMILIES
    from lora_rocm.supervisor.choose_run_dir import open_recipe

    folders = context_of(request).folders
    run_dir = folders.run(query_of(request, "dir"))
    _, recipe = open_recipe(run_dir.path, FAMILIES)
    return TryRun(run_dir, folders.name_of(run_dir.path), recipe)


def _shown(found: TryRun) -> list[ShownTry]:
    from lora_rocm.commands.tries import tries_of

    return [_shown_try(found, each) for each in tries_of(found.run_dir, NUM_SHOWN)]


def _shown_try(found: TryRun, each: Try) -> ShownTry:
    values = each.values
    given: dict[str, object] = {
        "dir": found.name,
        "prompt": values.prompt,
        "negative": values.negative_prompt,
        "strength": f"{values.strength:g}",
        "seed": values.seed,
        "steps": values.steps,
        "sampler": values.sampler,
        "file": values.updates,
    }
    picture, base = (path.relative_to(found.run_dir.path).as_posix() for path in (each.picture, each.base))
    return ShownTry(values, picture, base, given)


def _has_file(run_dir: RunDir) -> bool:
    return run_dir.lora.is_file() or run_dir.peft_dir.is_dir() or bool(run_dir.checkpoint_loras())


PART = Part(
    "try",
    "/try",
    [
        Route("/try", listed),
        Route("/try/run", view),
        Route("/try/draw", draw, methods=["POST"]),
        Route("/try/drawing", drawing),
        Route("/try/cancel", cancel, methods=["POST"]),
        Route("/try/history", history),
        *try_chat.ROUTES,
    ],
)
