"""One server and one browser for each process of tests. Without Chromium the tests are skipped."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands import check, plan_cards
from lora_rocm.commands.check import CheckResult
from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui.server import PageServer
from tests.supervisor.fake_run import write_whole_run
from tests.ui.test_recipe_plan import rows

REQUIRED = "LORA_ROCM_REQUIRE_BROWSER"
AXE = Path(__file__).parents[1] / "vendored" / "axe.min.js"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_MS = 30_000
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
VIOLATIONS = """async tags => {
  const found = await axe.run({runOnly: tags, resultTypes: ["violations"]});
  return found.violations;
}"""
"""All rules with these tags. To describe each element that passes takes three times as long as the rules."""


@dataclass
class Tab:
    """A tab of the browser with the server's cookie.

    ``page`` is Playwright's page. ``folder`` is the server's folder, which all tests of a process share, so a test
    makes its own runs and files. ``faults`` has errors of scripts and of the policy; a test fails if there are any
    but those that it expects.
    """

    page: Any
    server: PageServer
    faults: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    def expect(self, fault: str | int) -> None:
        """Expect errors with this status or text.

        The browser often reports an error after the page shows it. So a test names the errors
        that it expects, and no report is removed.
        """
        self.expected.append(f"status of {fault} " if isinstance(fault, int) else fault)

    @property
    def unexpected(self) -> list[str]:
        """The faults that the test does not expect."""
        return [fault for fault in self.faults if not any(expected in fault for expected in self.expected)]

    @property
    def folder(self) -> Path:
        return self.server.context.folders.working

    @property
    def address(self) -> str:
        return self.server.link.partition("/?")[0]

    def open(self, path: str) -> Any:
        """Open an address of the server."""
        answer = self.page.goto(self.address + path)
        assert answer is not None and answer.status < 400, f"{path}: {answer and answer.status}"
        return self.page

    def settle(self) -> None:
        """Wait for the requests of htmx. The policy forbids ``wait_for_function``, which evaluates text."""
        self.page.locator(".htmx-request").first.wait_for(state="detached")

    def wait_for_value(self, field: Any, value: str) -> None:
        """Wait until a field has a value. Locators find no values of fields."""
        deadline_s = time.monotonic() + TIMEOUT_MS / 1000
        while field.input_value() != value:
            assert time.monotonic() < deadline_s, f"{field.input_value()!r} is still not {value!r}"
            self.page.wait_for_timeout(50)

    def run(self, name: str) -> RunDir:
        """Write a finished run."""
        run_dir = RunDir(self.folder / "runs" / name)
        shutil.rmtree(run_dir.path, ignore_errors=True)
        write_whole_run(run_dir)
        return run_dir

    def axe(self) -> list[str]:
        """Return what axe-core finds on the page: rule, help and the first place of each violation of WCAG 2.2 AA."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found = self.page.evaluate(VIOLATIONS, TAGS)
        return [f"{each['id']}: {each['help']}: {each['nodes'][0]['html'][:200]}" for each in found]

    def widest(self) -> int:
        """Return by how many pixels the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))


class Held:
    """Holds the requests with an address until ``go``. routes: those that were held."""

    def __init__(self, tab: Tab, pattern: str) -> None:
        self.page, self.routes, self.is_open = tab.page, list[Any](), False
        self.page.route(pattern, lambda route: route.continue_() if self.is_open else self.routes.append(route))

    def wait(self) -> None:
        """Wait for the first request."""
        wait_until(self.page, lambda: bool(self.routes))

    def go(self) -> None:
        """Let them go on, with all later ones, and wait until they are answered."""
        self.is_open = True
        for each in self.routes:
            with self.page.expect_response(lambda answer, each=each: answer.request == each.request):
                each.continue_()


def wait_until(page: Any, is_true: Callable[[], bool]) -> None:
    for _ in range(400):
        if is_true():
            return
        page.wait_for_timeout(25)
    raise AssertionError("it did not happen within 10 s")


def uncounted_recipe(tab: Tab, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe without a count of its memory: a child that counts would take the processors from the next tests."""
    monkeypatch.setattr(plan_cards, "plan_cards", rows)
    monkeypatch.setattr(check, "checked", lambda loaded, command: CheckResult(loaded.path, "sdxl", "base"))
    path = tab.folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The browser of this process."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        if os.environ.get(REQUIRED):
            pytest.fail("there is no Chromium here")
        pytest.skip("there is no Chromium here")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@contextmanager
def serving(folder: Path) -> Iterator[PageServer]:
    """A server of a folder, which is also the current one."""
    before = Path.cwd()
    os.chdir(folder)
    with PageServer.listening(folder, Path("runs"), "127.0.0.1", 0) as made:
        thread = threading.Thread(target=made.serve, daemon=True)
        thread.start()
        yield made
        made.stop()
        thread.join(10)
    os.chdir(before)


def told(line: Any) -> str:
    """Return an error of the browser's console with the address that it is about."""
    return f"{line.text} {line.location['url']}"


@contextmanager
def new_tab(browser: Any, server: PageServer) -> Iterator[Tab]:
    """A new tab, logged in, in an own browser profile."""
    profile = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    profile.set_default_timeout(TIMEOUT_MS)
    page = profile.new_page()
    made = Tab(page, server)
    page.on("pageerror", lambda error: made.faults.append(str(error)))
    page.on("console", lambda line: made.faults.append(told(line)) if line.type == "error" else None)
    access = server.context.access
    profile.add_cookies([{"name": access.cookie_name, "value": access.cookie, "url": made.address}])
    yield made
    profile.close()
    assert not made.unexpected


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """The server of this process."""
    with serving(tmp_path_factory.mktemp("my models")) as made:
        yield made


@pytest.fixture
def tab(browser: Any, server: PageServer) -> Iterator[Tab]:
    """A new tab of the server of this process."""
    with new_tab(browser, server) as made:
        yield made
