"""Every page in its states: filled, empty, wrong, in conflict and running, light at 1,280 px and dark at 360 px.

``PAGES`` has each route that answers with a whole page. A new one without an entry is an error.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.rundir.clicks import Click, Side, add_click, read_clicks
from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.lock import locked
from lora_rocm.supervisor.queue_dir import QueueDir
from lora_rocm.supervisor.queue_dir import locked as locked_file
from lora_rocm.ui.application import PARTS
from lora_rocm.ui.background import Work, key_of
from lora_rocm.ui.image_set.changes import ChangeJournal
from lora_rocm.ui.server import PageServer
from tests.supervisor.fake_run import RECIPE, data_fields, event, failure_fields, write_whole_run
from tests.supervisor.wire import start_fields, step_fields
from tests.ui.browser.conftest import Tab, new_tab, serving
from tests.ui.drawn_grid import PROMPT, STEPS, with_files, with_grid
from tests.ui.image_folders import write_folder
from tests.ui.route_table import SAFE, entries, fill, usual_fields
from tests.ui.site import Site

IMAGES, RUN, RECIPE_FILE = "dir=pictures", "dir=runs/a-run", "file=cat.yaml"
PAGES = {
    "/": [""],
    "/images": [""],
    "/images/view": [IMAGES, "dir=nothing", "dir=/etc"],
    "/images/edit": [f"{IMAGES}&name=image 0.png", f"{IMAGES}&name=nothing"],
    "/images/texts": ["recipe=texts.yaml", "recipe=nothing.yaml"],
    "/recipe": [""],
    "/recipe/edit": [RECIPE_FILE, "file=broken.yaml", "file=nothing.yaml"],
    "/recipe/new": [""],
    "/recipe/started": [f"{RECIPE_FILE}&dir=runs/nothing"],
    "/queue": [""],
    "/runs": ["", "archived=1"],
    "/runs/view": [RUN, "dir=runs/trains", "dir=runs/broken", "dir=runs/nothing"],
    "/choose": [""],
    "/choose/run": [RUN, "dir=runs/trains"],
    "/try": [""],
    "/try/run": [RUN, "dir=runs/trains"],
    "/machine": [""],
}
"""The whole pages, each with the query of its states."""
LOOKS = ((1280, "light"), (360, "dark"))
ADDRESSES = [f"{path}?{query}".rstrip("?") for path, queries in PAGES.items() for query in queries]


def test_each_whole_page_is_in_the_table(site: Site) -> None:
    fill(site)
    whole = set[str]()
    for entry in entries():
        if entry.method in SAFE and entry.path != "/runs/report":  # a single file with its own test
            answer = site.client.get(entry.path, params=usual_fields(site, entry.path))
            if answer.status_code == 200 and "<!doctype html>" in answer.text[:200].lower():
                whole.add(entry.path)
    assert whole <= PAGES.keys(), whole - PAGES.keys()


# Conflicts: another browser or program changes a file between the load of a page and a change there


def of_recipe(tab: Tab, folder: Path) -> Any:
    page, path = tab.open(f"/recipe/edit?{RECIPE_FILE}"), folder / "cat.yaml"
    page.locator("#recipe-text").fill(RECIPE + MINE)
    path.write_text(RECIPE + "# theirs\n", encoding="utf-8")
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_role("button", name="Save my version").wait_for()
    assert path.read_text(encoding="utf-8").endswith("# theirs\n")
    return page.locator("#recipe-text")


def of_deleted_recipe(tab: Tab, folder: Path) -> Any:
    path = folder / "dog.yaml"
    page = tab.open("/recipe/edit?file=dog.yaml")
    text = page.locator("#recipe-text")
    path.write_text(RECIPE + MINE, encoding="utf-8")
    page.evaluate("window.dispatchEvent(new Event('focus'))")
    for _ in range(200):  # the page has read it
        if text.input_value().endswith(MINE):
            break
        page.wait_for_timeout(50)
    path.unlink()
    page.evaluate("window.dispatchEvent(new Event('focus'))")
    page.get_by_text("The file was deleted.", exact=False).wait_for()
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_role("button", name="Save my version").wait_for()
    assert not path.exists()
    return text


def of_order(tab: Tab, folder: Path) -> None:
    queue = QueueDir(folder / "queue")
    page = tab.open("/queue")
    page.route("**/queue/items", lambda route: route.fulfill(status=204))  # the page has not heard of it yet
    queue.add("emu", RECIPE)
    page.get_by_role("button", name="Move dog to the first place").click()
    page.locator("#queue-report .problem .code", has_text="edit-conflict").wait_for()
    page.get_by_role("button", name="Move emu up").wait_for()  # the list has the present order


def of_queued_recipe(tab: Tab, folder: Path) -> Any:
    file = QueueDir(folder / "queue").find("dog").path
    page = tab.open("/queue")
    page.get_by_role("button", name="Edit the recipe dog").click()
    text = page.locator("#queue-text")
    text.fill(RECIPE + MINE)
    file.write_text(RECIPE + "# theirs\n", encoding="utf-8")
    page.locator("#queue-recipe").get_by_role("button", name="Save").click()
    page.locator("#queue-recipe .problem pre", has_text="# theirs").wait_for()
    assert file.read_text(encoding="utf-8").endswith("# theirs\n")
    return text


def of_vote(tab: Tab, folder: Path) -> None:
    run_dir = RunDir(folder / "runs" / "a-run")
    page = tab.open(f"/choose/run?{RUN}")
    token = page.locator("#pair").input_value()
    sides = [Side(step, 1.0, f"grid/{step}.png") for step in STEPS[:2]]
    add_click(run_dir, Click(PROMPT, *sides, "first", time.time()))
    votes = len(read_clicks(run_dir))
    page.locator("button.picture").first.click()
    page.locator("#problem .code", has_text="pair-old").wait_for()
    page.locator(f'#pair:not([value="{token}"])').wait_for(state="attached")  # the present pair is there by itself
    assert len(read_clicks(run_dir)) == votes


def of_caption(tab: Tab, folder: Path) -> Any:
    page = tab.open(f"/images/view?{IMAGES}")
    page.locator(".image-tile").first.click()
    text = page.locator("#caption-1")
    text.fill(MINE)
    (folder / "pictures" / "image 0.txt").write_text("theirs", encoding="utf-8")
    page.get_by_role("button", name="Save", exact=True).click()
    page.locator(".theirs").wait_for()
    return text


def of_undo(tab: Tab, folder: Path) -> None:
    page = tab.open(f"/images/view?{IMAGES}")
    ChangeJournal(tab.server.context.edits, folder / "pictures").add("caption", [folder / "pictures" / "image 1.txt"])
    page.get_by_role("button", name="Undo the last change").click()
    page.locator("#problem .code", has_text="edit-conflict").wait_for()


MINE = "# mine\n"
CONFLICTS = (of_recipe, of_deleted_recipe, of_order, of_queued_recipe, of_vote, of_caption, of_undo)
"""Each makes a conflict, waits until the page shows it, and returns the field with the user's text, if any."""


def fill_folder(folder: Path) -> None:
    """Give a folder a finished run, one that trains, a broken one, images, recipes and a queue."""
    finished = RunDir(folder / "runs" / "a-run")
    write_whole_run(finished)
    with_grid(finished)
    write_folder(folder / "pictures")
    texts = 'model: {name_or_path: "builtin:tiny-llama"}\ndata: {path: "builtin:chat"}\n'
    for name, text in (("cat", RECIPE), ("dog", RECIPE), ("broken", RECIPE + "lora: {rank: much}\n"), ("texts", texts)):
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    queue = QueueDir(folder / "queue")
    queue.path.mkdir()
    for name in ("cat", "dog"):
        queue.add(name, RECIPE)
    for name in ("trains", "broken"):
        run_dir = RunDir(folder / "runs" / name)
        run_dir.create()
        shutil.copy(finished.recipe, run_dir.recipe)
        worker, supervisor = EventWriter(run_dir.events(), session=1), EventWriter(run_dir.events("supervisor"))
        worker.write(event("start", **start_fields()))
        worker.write(event("data", **data_fields()))
        for updates in range(1, 30):
            worker.write(event("step", **step_fields(updates)))
        supervisor.write(event("failure", **failure_fields(what="The driver reset the GPU.")))
        for writer in (worker, supervisor):
            writer.close()
        run_dir.checkpoints.mkdir(exist_ok=True)
        with_files(run_dir)


def work_on(work: Work) -> None:
    """Work in the background that has reported, and goes on until it is cancelled."""
    work.report("Drawing step 20")
    while True:
        work.advance(3, 9)
        time.sleep(0.05)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """A server with a filled folder, in which a run trains, the queue runs, and pictures are drawn."""
    folder = tmp_path_factory.mktemp("filled folder")
    fill_folder(folder)
    queue, runs = QueueDir(folder / "queue"), folder / "runs"
    queue.begin("cat", runs / "trains")
    with serving(folder) as server, locked(RunDir(runs / "trains")), locked_file(queue.run_lock, 0, "", ""):
        of_run = [key_of(kind, "runs/trains") for kind in ("choose", "try", "export")]
        for key in (*of_run, "machine-step", "machine-transfer"):
            server.context.background.start(key, work_on)
        yield server


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """A server with an empty folder."""
    with serving(tmp_path_factory.mktemp("empty folder")) as server:
        yield server


def look_at(tab: Tab, place: str, width: int, theme: str) -> list[str]:
    """Return what axe-core finds in the present state, and whether it is wider than its window."""
    tab.page.set_viewport_size({"width": width, "height": 900})
    tab.page.emulate_media(color_scheme=theme)
    found = tab.axe() + ([f"{tab.widest()} px too wide"] if tab.widest() > 0 else [])
    return [f"{place} {width} px, {theme}: {each}" for each in found]


def look(tab: Tab, addresses: list[str]) -> list[str]:
    """Return what axe-core finds on each page, pages that are wider than their window, and requests to elsewhere."""
    found = list[str]()
    tab.page.on("request", lambda asked: found.append(asked.url) if not asked.url.startswith(tab.address) else None)
    for width, theme in LOOKS:
        for address in addresses:
            tab.page.set_viewport_size({"width": width, "height": 900})
            tab.page.emulate_media(color_scheme=theme)
            tab.page.goto(tab.address + address)
            tab.settle()
            tab.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
            tab.settle()
            found += look_at(tab, address, width, theme)
    tab.expect("Failed to load resource")  # states of errors
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", [part.key for part in PARTS])
def test_every_state_is_accessible_and_fits(part: str, browser: Any, filled: PageServer) -> None:
    path = next(each.path for each in PARTS if each.key == part)
    addresses = [each for each in ADDRESSES if f"/{each.split('?')[0].split('/')[1]}" == path]
    with new_tab(browser, filled) as tab:
        assert addresses and look(tab, addresses) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("make", CONFLICTS, ids=lambda make: str(make.__name__))
def test_every_conflict_is_shown_and_nothing_written_is_lost(
    make: Callable[[Tab, Path], Any], browser: Any, tmp_path: Path
) -> None:
    fill_folder(tmp_path)
    with serving(tmp_path) as server, new_tab(browser, server) as tab:
        field, found = make(tab, tmp_path), list[str]()
        for width, theme in LOOKS:
            found += look_at(tab, make.__name__, width, theme)
        assert found == [] and (field is None or MINE.strip() in field.input_value())
        assert tab.page.locator(".problem").first.is_visible()  # also after checks and looks at the file
        tab.expect("Failed to load resource")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_empty_part_is_accessible_and_fits(browser: Any, empty: PageServer) -> None:
    with new_tab(browser, empty) as tab:
        assert look(tab, [part.path for part in PARTS]) == []
        for path in ("/runs", "/choose", "/try", "/recipe"):
            tab.open(path)
            tab.page.locator(".empty").first.wait_for()  # the control: it is empty, and says what to do
