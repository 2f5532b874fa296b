"""Choose: the grid of a run's pictures, the blind test, its result, and copies of the chosen file."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from lora_rocm.errors import UserError
from lora_rocm.page_parts.texts import t
from lora_rocm.rundir.clicks import PREFERRED, add_click, read_clicks, undo_click
from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui.background import Work, key_of
from lora_rocm.ui.context import UiContext, context_of
from lora_rocm.ui.curves import HELD_OUT, curve_of
from lora_rocm.ui.fields import fields_of, query_of, text_of
from lora_rocm.ui.free_gpu import require_room, running_runs
from lora_rocm.ui.pages.run_exports import export_key
from lora_rocm.ui.part import Part
from lora_rocm.ui.rendering import fragment, is_fragment, page, problem
from lora_rocm.ui.run_details import TEXT
from lora_rocm.ui.run_files import download_name, peft_folders_by_step
from lora_rocm.ui.run_list import newest_runs
from lora_rocm.ui.thumbnails import MEDIA_TYPE, SIDES_PX, thumbnail

if TYPE_CHECKING:
    from lora_rocm.commands.comparison_grid import Grid
    from lora_rocm.recipe.schema import Recipe
    from lora_rocm.report.blind_test import BlindTest

LIST, VIEW = "choose.html.j2", "choose_run.html.j2"
MOST_FILES = 8
USUAL_STRENGTHS = (0.6, 0.8, 1.0)
MAX_TEXT_BYTES = 1 << 16
Values = dict[str, Any]
"""Values of a block of the template."""


@dataclass(frozen=True)
class ChooseRun:
    """A run in this part. name: what requests call it."""

    run_dir: RunDir
    name: str
    recipe: Recipe
    grid: Grid | None

    @property
    def kind(self) -> str:
        """The kind of its previews, which chooses the words of the page: text or image."""
        return TEXT if self.recipe.spec.preview == TEXT else "image"

    @property
    def strengths(self) -> tuple[float, ...]:
        """The strengths of its grid, or the usual ones."""
        usual = (1.0,) if self.kind == TEXT else USUAL_STRENGTHS
        return self.grid.request.strengths if self.grid else usual

    @property
    def only_step(self) -> int | None:
        """The step of its file if there is nothing to compare: one file at one strength. Otherwise None."""
        files = self.run_dir.checkpoint_loras()
        return files[0][0] if len(files) == 1 and len(self.strengths) == 1 else None

    @property
    def key(self) -> str:
        """The name of its work in the background."""
        return key_of("choose", self.name)


@dataclass(frozen=True)
class DrawnGrid:
    """The result of drawing. count: number of new pictures or answers. notices: messages of the process that drew."""

    count: int
    notices: tuple[str, ...]


def listed(request: Request) -> Response:
    """The runs with LoRA files."""
    runs = [run for run in newest_runs(context_of(request).folders) if RunDir(run.listed.path).checkpoint_loras()]
    return page(request, LIST, runs=runs)


def view(request: Request) -> Response:
    """The page of one run."""
    found = _open(request)
    sample = found.recipe.sample
    prompts = list(found.grid.request.prompts) if found.grid else []
    return page(
        request,
        VIEW,
        name=found.name,
        title=found.run_dir.path.name,
        prompts="\n".join(prompts or dict.fromkeys(sample.image_prompts)),
        strengths=", ".join(f"{each:g}" for each in found.strengths),
        most=len(found.grid.request.updates) if found.grid else min(MOST_FILES, len(found.run_dir.checkpoint_loras())),
        num_files=len(found.run_dir.checkpoint_loras()),
        key=found.key,
        is_busy=bool(running_runs(context_of(request).folders)),
        **{
            **_drawing(request, found),
            **_test(found),
            **_ranking(request, found),
            **_grid(found),
            **_take(context_of(request), found),
        },
    )


async def draw(request: Request) -> Response:
    """Draw the pictures that the asked grid lacks, in the background."""
    fields = await fields_of(request)
    prompts = [line.strip() for line in str(fields.get("prompts", "")).splitlines() if line.strip()]
    strengths = _numbers("strengths", str(fields.get("strengths", "")))
    most = _numbers("files", str(fields.get("most", MOST_FILES)))
    return await run_in_threadpool(_drawn, request, prompts, strengths, int(most[0]) if most else MOST_FILES)


def _drawn(request: Request, prompts: list[str], strengths: list[float], most: int) -> Response:
    from lora_rocm.commands.comparison_grid import draw_missing, grid_of, new_request, save_request

    ui, found = context_of(request), _open(request)
    asked = new_request(found.run_dir, found.recipe, prompts, strengths, most)
    grid = grid_of(found.run_dir, found.recipe, asked)

    def work(work: Work) -> DrawnGrid:
        work.report(t("work.loading"))
        if grid.missing:
            require_room(ui.folders, found.run_dir)
        notices = dict[str, None]()
        count = draw_missing(found.run_dir, found.recipe, grid, notices.setdefault, work.advance, work.require_wanted)
        return DrawnGrid(count, tuple(notices))

    ui.background.start(found.key, work)
    save_request(found.run_dir, asked)
    return drawing(request)


def drawing(request: Request) -> Response:
    """The progress of drawing."""
    found = _open(request)
    return fragment(request, VIEW, "drawing", name=found.name, key=found.key, **_drawing(request, found))


def cancel(request: Request) -> Response:
    """Cancel drawing. Pictures of finished files stay."""
    found = _open(request)
    if (work := context_of(request).background.of(found.key)) is not None:
        work.cancel()
    return drawing(request)


def pictures(request: Request) -> Response:
    """The grid, again."""
    found = _open(request)
    return fragment(request, VIEW, "grid", name=found.name, **_grid(found))


def test(request: Request) -> Response:
    """The pair to compare, again."""
    found = _open(request)
    return fragment(request, VIEW, "test", name=found.name, **_test(found))


def side(request: Request) -> Response:
    """A picture of the present pair. Its address does not name its file."""
    found = _open(request)
    pair = _blind_test(found).pair
    if pair is None or pair.token != query_of(request, "pair"):
        raise _old_pair()
    path = (pair.first if query_of(request, "side") == "first" else pair.second).path
    content, _ = thumbnail(context_of(request).folders.resolve(str(path)), SIDES_PX[-1])
    return Response(content, media_type=MEDIA_TYPE)


async def click(request: Request) -> Response:
    """Record a vote, and show the next pair. A vote on an earlier pair is not counted."""
    token, preferred = await text_of(request, "pair"), await text_of(request, "preferred")
    return await run_in_threadpool(_clicked, request, token, preferred)


_voting = threading.Lock()
"""From the shown pair to its vote in the file: of two votes on one pair, the second is refused."""


def _clicked(request: Request, token: str, preferred: str) -> Response:
    from lora_rocm.report.blind_test import click_on, ties_after

    found = _open(request)
    with _voting:
        run_dir, test = found.run_dir, _blind_test(found)
        pair, chosen = test.pair, next((each for each in PREFERRED if each == preferred), None)
        if pair is None or pair.token != token or chosen is None:
            return _old(request)
        click = click_on(pair, chosen, run_dir.path, time.time())
        for each in (click, *ties_after(test.pictures, [*test.clicks, click], run_dir.path)):
            add_click(run_dir, each)
    return _voted(request, found)


async def undo(request: Request) -> Response:
    """Take the newest vote back, if the page shows the pair that followed it."""
    token = await text_of(request, "pair")
    return await run_in_threadpool(_undone, request, token)


def _undone(request: Request, token: str) -> Response:
    found = _open(request)
    with _voting:
        pair = _blind_test(found).pair
        if pair is None or pair.token != token:
            return _old(request)
        undo_click(found.run_dir)
    return _voted(request, found)


def _old(request: Request) -> Response:
    """Refuse a vote on an earlier pair. The page then asks for the present one."""
    if not is_fragment(request):
        raise _old_pair()
    answer = problem(request, _old_pair())
    answer.headers["HX-Trigger"] = "pairs"
    return answer


def _voted(request: Request, found: ChooseRun) -> Response:
    """The next pair; the result updates itself at the event ``voted``."""
    answer = fragment(request, VIEW, "test", name=found.name, **_test(found))
    answer.headers["HX-Trigger"] = "voted"
    return answer


def ranking(request: Request) -> Response:
    """The result of the votes so far."""
    found = _open(request)
    return fragment(request, VIEW, "ranking", name=found.name, **_ranking(request, found))


def download(request: Request) -> Response:
    """The LoRA file of a step, to be saved."""
    found = _open(request)
    path = _file_of(found.run_dir, query_of(request, "step"))
    return FileResponse(path, filename=download_name(found.run_dir, path), media_type="application/octet-stream")


async def copy(request: Request) -> Response:
    """Copy the LoRA file of a step into the LoRA folder that the user chose. The first time, the folder is asked."""
    fields = await fields_of(request)
    step = await text_of(request, "step")
    # outside: the copy goes to the folder that the user names
    folder = str(fields.get("own_folder", "")).strip() or str(fields.get("folder", "")).strip()
    return await run_in_threadpool(_copied, request, step, folder)


def _copied(request: Request, step: str, folder: str) -> Response:
    from lora_rocm.commands.lora_folders import chosen_folder, copy_lora, remember_folder

    found = _open(request)
    path = _file_of(found.run_dir, step)
    if folder:
        remember_folder(Path(folder).expanduser())
    target = chosen_folder()
    if target is None:
        fix = "Select a folder, or write the whole path of one."
        raise UserError("field-missing", "The folder for the copy is missing.", where="folder", fix=fix)
    made = copy_lora(path, target, download_name(found.run_dir, path))
    return fragment(
        request,
        VIEW,
        "take",
        name=found.name,
        **_take(context_of(request), found) | {"copied": made, "step": int(step)},
    )


def take(request: Request) -> Response:
    """The file to use, again: the votes may prefer another one now."""
    found = _open(request)
    return fragment(request, VIEW, "take", name=found.name, **_take(context_of(request), found))


def _open(request: Request) -> ChooseRun:
    from lora_rocm.commands.comparison_grid import open_grid

    folders = context_of(request).folders
    run_dir = folders.run(query_of(request, "dir"))
    _, recipe, grid = open_grid(run_dir.path)
    return ChooseRun(run_dir, folders.name_of(run_dir.path), recipe, grid)


def _blind_test(found: ChooseRun) -> BlindTest:
    from lora_rocm.report.blind_test import BlindTest, GridPicture
    from lora_rocm.report.bradley_terry import LoraVariant

    cells = [cell for cell in found.grid.cells if cell.updates and cell.is_drawn] if found.grid else []
    prompts = found.grid.prompts if found.grid else ()
    pictures = [
        GridPicture(LoraVariant(cell.updates, cell.strength), cell.number, prompts[cell.number], cell.path)
        for cell in cells
    ]
    return BlindTest(pictures, read_clicks(found.run_dir))


def _drawing(request: Request, found: ChooseRun) -> Values:
    return {"kind": found.kind, "only_step": found.only_step, "work": context_of(request).background.of(found.key)}


def _test(found: ChooseRun) -> Values:
    from lora_rocm.report.bradley_terry import SETTLED

    test = _blind_test(found)
    shown = [_text(pair_side.path) for pair_side in (test.pair.first, test.pair.second)] if test.pair else []
    num_ties = len(test.clicks) - len(test.given)
    shared = {"kind": found.kind, "only_step": found.only_step, "test": test, "shown_texts": shown}
    return {**shared, "num_ties": num_ties, "stays": _stays(test), "enough": SETTLED}


def _stays(test: BlindTest) -> float | None:
    """The probability that 20 more votes do not change the answer; None without votes."""
    return test.ranking.chance_to_stay(seed=len(test.votes)) if test.votes else None


def _ranking(request: Request, found: ChooseRun) -> Values:
    losses, test = _held_out(context_of(request), found.run_dir), _blind_test(found)
    rows = [(row, _loss_at(losses, row.variant.updates)) for row in test.ranked()]
    of_files = [(step, _loss_at(losses, step)) for step, _ in found.run_dir.checkpoint_loras()] if losses else []
    has_losses = any(loss is not None for _, loss in rows)
    return {"rows": rows, "has_losses": has_losses, "of_files": of_files, "is_open": test.is_settled}


def _held_out(ui: UiContext, run_dir: RunDir) -> list[tuple[int, float]]:
    return [(step, loss) for step, loss in curve_of(ui.views.of(run_dir), HELD_OUT)]


def _loss_at(losses: list[tuple[int, float]], updates: int) -> float | None:
    """The newest held-out loss that was measured up to a step."""
    return next((loss for step, loss in reversed(losses) if step <= updates), None)


def _grid(found: ChooseRun) -> Values:
    """The rows of the grid: a title, and for each prompt the picture relative to the run, or a text."""
    rows = []
    grid = found.grid
    for updates in (0, *grid.request.updates) if grid else ():
        for strength in grid.request.strengths if updates and grid else (1.0,):
            cells = grid.row(updates, strength) if grid else []
            title = t("choose.variant", step=updates, strength=f"{strength:g}") if updates else t("choose.base")
            shown = [(cell.path.relative_to(found.run_dir.path).as_posix(), _text(cell.path)) for cell in cells]
            rows.append((title, [pair if cell.is_drawn else None for pair, cell in zip(shown, cells, strict=True)]))
    return {"kind": found.kind, "grid_rows": rows, "grid_prompts": grid.prompts if grid else ()}


def _text(path: Path) -> str | None:
    """The text of a language model's answer; None for an image."""
    if path.suffix != ".txt" or not path.is_file():
        return None
    with path.open("rb") as file:
        return file.read(MAX_TEXT_BYTES).decode("utf-8", "replace")


def _take(ui: UiContext, found: ChooseRun) -> Values:
    from lora_rocm.commands.lora_folders import chosen_folder, found_lora_folders

    folder, test = chosen_folder(), _blind_test(found)
    best = test.best if test.is_settled else None  # only a settled answer is selected in advance
    leads = test.best if test.given else None
    kind, run_dir = found.kind, found.run_dir
    steps = [updates for updates, _ in run_dir.checkpoint_loras()]
    step = best.updates if best and best.updates in steps else steps[-1] if steps else None
    is_blind = not test.is_settled and found.only_step is None
    curve = _held_out(ui, run_dir) if kind == TEXT else []
    return {
        "kind": kind,
        "zips": {
            updates: path.relative_to(run_dir.path).as_posix()
            for updates, path in (peft_folders_by_step(ui.views.of(run_dir)) if kind == TEXT else {}).items()
        },
        "losses": [(updates, _loss_at(curve, updates)) for updates in steps],
        "is_measured": bool(curve),
        "is_blind": is_blind,
        "export_key": export_key(ui, run_dir),
        "steps": steps,
        "best": best,
        "leads": leads,
        "num_votes": len(test.given),
        "step": step,
        "folder": folder,
        "lora_folders": [] if folder else found_lora_folders(Path.home(), [Path.cwd(), Path.cwd().parent]),
        "copied": None,
    }


def _file_of(run_dir: RunDir, step: str) -> Path:
    """Return the LoRA file of a step.

    Raises:
        UserError: file-unknown: there is none.
    """
    path = next((path for updates, path in run_dir.checkpoint_loras() if str(updates) == step), None)
    if path is None or not run_dir.holds(path):
        fix = "The page of the run lists its files."
        raise UserError("file-unknown", "There is no LoRA file of this step.", where=step[:40], fix=fix)
    return path


def _numbers(where: str, text: str) -> list[float]:
    """Return the numbers of a list with commas, semicolons or spaces.

    Raises:
        UserError: number-wrong: a piece is not a number.
    """
    try:
        return [float(piece) for piece in re.split(r"[,;\s]+", text.strip()) if piece]
    except ValueError:
        fix = "Write numbers with commas between them, such as 0.6, 0.8, 1."
        raise UserError(
            "number-wrong", "This is not a list of numbers.", where=f"{where}: {text:.60}", fix=fix
        ) from None


def _old_pair() -> UserError:
    what = "Votes or pictures have changed since this page showed its pair. Nothing was counted or taken back."
    return UserError("pair-old", what, fix="Vote on the pair that the page shows now.")


PART = Part(
    "choose",
    "/choose",
    [
        Route("/choose", listed),
        Route("/choose/run", view),
        Route("/choose/draw", draw, methods=["POST"]),
        Route("/choose/drawing", drawing),
        Route("/choose/cancel", cancel, methods=["POST"]),
        Route("/choose/pictures", pictures),
        Route("/choose/test", test),
        Route("/choose/side", side),
        Route("/choose/click", click, methods=["POST"]),
        Route("/choose/undo", undo, methods=["POST"]),
        Route("/choose/ranking", ranking),
        Route("/choose/download", download),
        Route("/choose/take", take),
        Route("/choose/copy", copy, methods=["POST"]),
    ],
)
