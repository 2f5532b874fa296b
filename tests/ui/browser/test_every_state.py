"""Every page in its states: filled, empty, wrong, in conflict and running, light at 1,280 px and dark at 360 px.

``PAGES`` has each route that answers with a whole page. A new one without an entry is an error.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.lock import locked
from lora_rocm.supervisor.queue_dir import QueueDir
from lora_rocm.supervisor.queue_dir import locked as locked_file
from lora_rocm.ui.application import PARTS
from lora_rocm.ui.background import Work
from lora_rocm.ui.server import PageServer
from tests.supervisor.fake_run import RECIPE, data_fields, event, failure_fields, write_whole_run
from tests.supervisor.wire import start_fields, step_fields
from tests.ui.browser.conftest import Tab, new_tab, serving
from tests.ui.drawn_grid import with_files, with_grid
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
        for key in ("choose-runs-trains", "try-runs-trains"):
            server.context.background.start(key, work_on)
        yield server


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """A server with an empty folder."""
    with serving(tmp_path_factory.mktemp("empty folder")) as server:
        yield server


def look(tab: Tab, addresses: list[str]) -> list[str]:
    """Return what axe-core finds on each page, pages that are wider than their window, and requests to elsewhere."""
    found = list[str]()
    tab.page.on("request", lambda asked: found.append(asked.url) if not asked.url.startswith(tab.address) else None)
    for width, theme in ((1280, "light"), (360, "dark")):
        tab.page.set_viewport_size({"width": width, "height": 900})
        tab.page.emulate_media(color_scheme=theme)
        for address in addresses:
            tab.page.goto(tab.address + address)
            tab.settle()
            tab.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
            tab.settle()
            place = f"{address} {width} px, {theme}: "
            found += [place + each for each in tab.axe()]
            if tab.widest() > 0:
                found.append(place + f"{tab.widest()} px too wide")
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
def test_every_empty_part_is_accessible_and_fits(browser: Any, empty: PageServer) -> None:
    with new_tab(browser, empty) as tab:
        assert look(tab, [part.path for part in PARTS]) == []
        for path in ("/runs", "/choose", "/try", "/recipe"):
            tab.open(path)
            tab.page.locator(".empty").first.wait_for()  # the control: it is empty, and says what to do
