"""Take pictures of each part of the page, at three widths, light and dark, with real runs of the tiny models.

    python -m scripts.page_pictures OUTPUT [--folder FOLDER] [--only NAME] [--docs]

The folder is filled first: images, texts, recipes, two runs (some minutes on two cores), pictures by strength, answers,
votes, a queue.
Existing files are kept, so a second call only takes pictures. ``--docs`` renews the pictures of the documentation,
which are a few of them with few colours.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from lora_rocm.commands.comparison_grid import draw_missing, new_request, open_grid, save_request
from lora_rocm.commands.tries import TryValues, draw_try, tries_of
from lora_rocm.rundir.clicks import Click, Side, add_click, read_clicks
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.queue_dir import QueueDir
from lora_rocm.ui.server import PageServer

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "images"
BUILTIN = ROOT / "lora_rocm" / "builtin" / "demo_images"
CHROMIUM = "/usr/bin/chromium"
CHATS = ROOT / "lora_rocm" / "builtin" / "demo_chats.jsonl"
RUN, TEXT_RUN = "zibu-run", "notes-run"
STEPS, STRENGTHS = 300, (0.6, 1.0)
WIDTHS_PX = {360: 780, 1280: 900, 2560: 1440}
COLOURS, FRAME_PX, REPEATS = 256, 208, 12

RECIPE = f"""\
# A zibu on plain backgrounds
model:
  name_or_path: builtin:tiny-sdxl

data:
  path: images              # 18 images of a zibu, and 6 of other things
  trigger_word: zibu
  resolution: 128
  bucket_step: 32

lora:
  rank: 16

optim:
  learning_rate: 3.0e-3

train:
  max_train_steps: {STEPS}
  batch_size: 4

sample:
  every_n_steps: 75
  prompts:
    - a zibu on a green striped background
    - a zibu in the middle on a blue background
    - a zibu on the left on a yellow background

output:
  name: zibu
  save_every_n_steps: 60
"""

TEXT_RECIPE = """\
# Notes in an invented notation
model:
  family: causal-lm
  name_or_path: builtin:tiny-llama

data:
  sources:
    - dataset: chats.jsonl
  validation_split: 0.1

optim:
  learning_rate: 3.0e-3

train:
  max_train_steps: 120
  batch_size: 8
  validation_every_n_steps: 30

sample:
  every_n_steps: 60
  steps: 40                 # tokens
  prompts:
    - There are seven white foxes hiding in the field.
    - Five brown birds are running in the boat.

output:
  name: notes
  save_every_n_steps: 30
"""


def fill(folder: Path) -> None:
    """Fill the folder with everything that the page can show."""
    fill_images(folder)
    fill_texts(folder)


def trained(folder: Path, recipe: str, run: str) -> RunDir:
    """Return a finished run of a recipe in the folder. It is trained if it does not exist."""
    run_dir = RunDir(folder / "runs" / run)
    if not run_dir.result.exists():
        words = [sys.executable, "-m", "lora_rocm", "train", recipe, "--run-dir", str(run_dir.path)]
        subprocess.run([*words, "--set", "runtime.device=cpu"], cwd=folder, check=True)
    return run_dir


def fill_texts(folder: Path) -> None:
    """Fill the folder with a table, a recipe and a run of a language model, answers of its files, and a few votes."""
    if not (folder / "chats.jsonl").exists():
        shutil.copyfile(CHATS, folder / "chats.jsonl")
    (folder / "notes.yaml").write_text(TEXT_RECIPE, encoding="utf-8")
    run_dir = trained(folder, "notes.yaml", TEXT_RUN)
    draw_grid(run_dir, 2, [1.0])
    _, _, grid = open_grid(run_dir.path)
    if grid is not None and not read_clicks(run_dir):
        vote(run_dir, [cell for cell in grid.cells if cell.updates], 4)


def draw_grid(run_dir: RunDir, num_prompts: int, strengths: list[float]) -> None:
    """Make the pictures or answers of a run's files."""
    _, recipe, grid = open_grid(run_dir.path)
    if grid is None:
        prompts = list(recipe.sample.image_prompts)[:num_prompts]
        save_request(run_dir, new_request(run_dir, recipe, prompts, strengths, 4))
        grid = open_grid(run_dir.path)[2]
    if grid is not None and grid.missing:
        draw_missing(run_dir, recipe, grid, print, lambda done, total: None, lambda: None)


def fill_images(folder: Path) -> None:
    """Fill the folder with images, recipes, a run, pictures by strength, votes and a queue."""
    if not (folder / "images").is_dir():
        shutil.copytree(BUILTIN, folder / "images")
    for name in ("zibu", "zibu-rank-8", "zibu-small-rate"):
        (folder / f"{name}.yaml").write_text(RECIPE, encoding="utf-8")
    run_dir = trained(folder, "zibu.yaml", RUN)
    draw_grid(run_dir, 2, list(STRENGTHS))
    _, _, grid = open_grid(run_dir.path)
    if grid is not None and not read_clicks(run_dir):
        vote(run_dir, [cell for cell in grid.cells if cell.updates], 30)
    if not tries_of(run_dir, 1):
        draw_try(run_dir, TryValues("a zibu on a red background", "", 0.8, 7, 20, "", 0))
    queue = QueueDir(folder / "queue")
    if not queue.items():
        queue.path.mkdir(exist_ok=True)
        for name in ("zibu-rank-8", "zibu-small-rate"):
            queue.add(name, RECIPE)


def vote(run_dir: RunDir, cells: list[Any], count: int) -> None:
    """Vote some times: the later file usually wins."""
    draw = random.Random(0)
    for _ in range(count):
        number = draw.choice(cells).number
        first, second = draw.sample([cell for cell in cells if cell.number == number], 2)
        later = "first" if first.updates + draw.gauss(0, 60) > second.updates else "second"
        sides = [
            Side(each.updates, each.strength, each.path.relative_to(run_dir.path).as_posix())
            for each in (first, second)
        ]
        add_click(run_dir, Click(f"prompt {number}", sides[0], sides[1], later, time.time()))


def no_action(page: Any) -> None:
    """The page as it opens."""


def opened_caption(page: Any) -> None:
    """An image with its caption."""
    page.locator(".image-tile").nth(1).click()
    page.locator("form.caption").first.wait_for()


def counted(page: Any) -> None:
    """The recipe with the memory of each card."""
    page.locator("#plan .chips").first.wait_for()


def read_texts(page: Any) -> None:
    """The first texts of a recipe as the model reads them."""
    page.locator(".sample").first.wait_for()


def checked(page: Any) -> None:
    """The recipe with its texts counted, and with the memory of each card."""
    page.locator("#check dl").wait_for()
    page.locator("#check progress").wait_for(state="detached")
    counted(page)


def fitting(page: Any) -> None:
    """The recipe after its number of steps was changed, so that its intervals no longer fit."""
    page.locator("[data-key='train.max_train_steps']").first.fill("40")
    page.locator("[data-fit]").wait_for()
    counted(page)


def files_shown(page: Any) -> None:
    """A run with its files, and the PEFT folder open."""
    page.locator("#files details summary").first.click()


def answered(page: Any) -> None:
    """A chat with the answers to one message."""
    if page.locator(".exchange").count() == 0:
        page.locator("#field-prompt").fill("There are two grey owls singing in the barn.")
        page.get_by_role("button", name="Send").click()
        page.locator(".exchange").first.wait_for()
    page.locator(".caret").first.wait_for(state="detached")


def all_keys(page: Any) -> None:
    """All keys of the recipe, with one section open."""
    page.get_by_role("button", name="All keys").click()
    page.locator("#section-lora > summary").click()


PAGES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "start": ("/", no_action),
    "images": ("/images", no_action),
    "images-folder": ("/images/view?dir=images", opened_caption),
    "images-mask": ("/images/edit?dir=images&name=zibu_01.png", no_action),
    "recipes": ("/recipe", no_action),
    "recipe": ("/recipe/edit?file=zibu.yaml", counted),
    "recipe-all-keys": ("/recipe/edit?file=zibu.yaml", all_keys),
    "recipe-new": ("/recipe/new", no_action),
    "queue": ("/queue", no_action),
    "runs": ("/runs", no_action),
    "run": (f"/runs/view?dir=runs/{RUN}", no_action),
    "choose": ("/choose", no_action),
    "choose-run": (f"/choose/run?dir=runs/{RUN}", no_action),
    "try": ("/try", no_action),
    "try-run": (f"/try/run?dir=runs/{RUN}", no_action),
    "machine": ("/machine", no_action),
    "texts": ("/images/texts?recipe=notes.yaml", read_texts),
    "texts-recipe": ("/recipe/edit?file=notes.yaml", checked),
    "texts-recipe-fit": ("/recipe/edit?file=notes.yaml", fitting),
    "texts-run": (f"/runs/view?dir=runs/{TEXT_RUN}", files_shown),
    "texts-choose": (f"/choose/run?dir=runs/{TEXT_RUN}", no_action),
    "texts-chat": (f"/try/run?dir=runs/{TEXT_RUN}", answered),
}
IN_DOCS = {
    "ui-start": "start 1280 light",
    "ui-images": "images-folder 1280 light",
    "ui-recipe": "recipe 1280 light",
    "ui-queue": "queue 1280 dark",
    "ui-run": "run 1280 light",
    "ui-choose": "choose-run 1280 light",
    "ui-try": "try-run 1280 dark",
    "ui-phone": "run 360 dark",
}
"""Pictures of the documentation, by page, width and colours."""


def load_pictures(page: Any) -> None:
    """Wait for charts and thumbnails, and for the pictures that otherwise load only near the window."""
    page.wait_for_timeout(1500)
    page.evaluate("for (const each of document.querySelectorAll('main img[loading=lazy]')) each.loading = 'eager'")
    page.evaluate("scrollTo(0, 0)")  # the navigation stays at the top
    pictures = "[...document.querySelectorAll('main img[src]')]"
    page.evaluate(f"Promise.all({pictures}.map((each) => each.decode().catch(() => null)))")
    page.wait_for_timeout(300)


def take(folder: Path, output: Path, only: str) -> None:
    """Take the pictures of all pages, or of one."""
    from playwright.sync_api import sync_playwright

    with PageServer.listening(folder, Path("runs"), "127.0.0.1", 0) as server, sync_playwright() as playwright:
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(reduced_motion="reduce")
        page.set_default_timeout(120_000)
        page.goto(server.link)
        address = server.link.partition("/?")[0]
        for name, (path, act) in PAGES.items():
            for width, height in WIDTHS_PX.items() if only in ("", name) else ():
                page.set_viewport_size({"width": width, "height": height})
                page.emulate_media(color_scheme="light")
                page.goto(address + path)
                act(page)
                load_pictures(page)
                page.locator(".htmx-request").first.wait_for(state="detached")
                for theme in ("light", "dark"):
                    page.emulate_media(color_scheme=theme)
                    page.wait_for_timeout(300)
                    page.screenshot(path=output / f"{name} {width} {theme}.png", full_page=True)
                    if f"{name} {width} {theme}" in IN_DOCS.values():
                        page.screenshot(path=output / f"{name} {width} {theme} window.png")
        browser.close()
        server.stop()
        thread.join(10)


def reduce_for_docs(output: Path) -> None:
    """Write the pictures of the documentation: one window each, with few colours."""
    for name, source in IN_DOCS.items():
        with Image.open(output / f"{source} window.png") as image:
            shown = image.convert("RGB")
            # The navigation counts several times, so that large pictures do not take the colours of the page
            sample = Image.new("RGB", (shown.width + REPEATS * FRAME_PX, shown.height))
            sample.paste(shown, (0, 0))
            for number in range(REPEATS):
                sample.paste(shown.crop((0, 0, FRAME_PX, shown.height)), (shown.width + number * FRAME_PX, 0))
            reduced = sample.quantize(COLOURS, dither=Image.Dither.NONE).crop((0, 0, *shown.size))
            reduced.save(DOCS / f"{name}.png", optimize=True)


def main() -> None:
    """Fill the folder, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "lora-rocm-page" / "loras")
    parser.add_argument("--only", default="", choices=["", *PAGES], help="page; default: all")
    parser.add_argument("--docs", action="store_true")
    given = parser.parse_args()
    output, folder = given.output.resolve(), given.folder.resolve()
    for made in (output, folder):
        made.mkdir(parents=True, exist_ok=True)
    os.environ["LORA_ROCM_HOME"] = str(folder.parent / "home")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.chdir(folder)
    fill(folder)
    take(folder, output, given.only)
    if given.docs:
        reduce_for_docs(output)


if __name__ == "__main__":
    main()
