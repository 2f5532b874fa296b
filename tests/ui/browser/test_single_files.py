"""report.html and compare.html in a browser: from disk, without scripts, on paper, with hostile text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.report.comparison import Compared, comparison_page
from lora_rocm.report.report import write_report
from lora_rocm.rundir.layout import RunDir
from tests.supervisor.fake_run import write_whole_run
from tests.ui.browser.conftest import AXE, Tab

STRANGE = "<script>document.title = 'taken over'</script>"


@pytest.fixture
def report(tmp_path: Path) -> Path:
    run_dir = RunDir(tmp_path / "größe & co")
    write_whole_run(run_dir)
    return write_report(run_dir)


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """Opens a file in its own window; a message of the browser or a request to anywhere fails the test."""
    faults = list[str]()
    profiles = list[Any]()

    def open_file(path: Path, *, width: int = 1280, are_faults_expected: bool = False, **settings: Any) -> Any:
        profile = browser.new_context(viewport={"width": width, "height": 900}, **settings)
        profiles.append(profile)
        page = profile.new_page()
        if not are_faults_expected:
            page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or faults.append(asked.url))
        page.goto(path.as_uri())
        return page

    yield open_file
    for profile in profiles:
        profile.close()
    assert not faults


def charts(page: Any, kind: str) -> list[bool]:
    """Which charts of this kind are visible: "canvas" of the script, or "svg"."""
    return [each.is_visible() for each in page.locator(f"still-chart {kind}").all()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_opens_from_disk(report: Path, opened: Any, scheme: str) -> None:
    page = opened(report, color_scheme=scheme)
    assert charts(page, "canvas") == [True] * 3 and charts(page, "svg") == [False] * 3
    assert "5" in page.locator("still-chart .chart").first.get_attribute("aria-label")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("() => axe.run()")["violations"]
    assert [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found] == []
    page.emulate_media(media="print")
    assert charts(page, "canvas") == [False] * 3 and charts(page, "svg") == [True] * 3


@pytest.mark.parametrize("width", [360, 2560])
def test_a_comparison_fits_its_window(tmp_path: Path, opened: Any, width: int) -> None:
    losses = [Compared(10 * step, {"a": 0.4 - step / 50, "b": 0.3}, []) for step in range(4)]
    path = tmp_path / "compare.html"
    path.write_text(comparison_page("run", losses, [], [1.0], [STRANGE], holds_out=True), encoding="utf-8")
    page = opened(path, width=width)
    assert charts(page, "canvas") == [True] and STRANGE in page.locator("header").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_a_report_is_readable_without_scripts(report: Path, opened: Any) -> None:
    page = opened(report, java_script_enabled=False)
    assert charts(page, "svg") == [True] * 3 and charts(page, "canvas") == []
    assert page.locator(".keys").first.is_visible()


@pytest.mark.parametrize("has_policy", [True, False])
def test_no_foreign_script_runs(report: Path, opened: Any, has_policy: bool) -> None:
    """Also if a text became markup. Without the policy it would run, so the test can fail."""
    html = report.read_text(encoding="utf-8").replace("</main>", f"{STRANGE}</main>")
    report.write_text(html if has_policy else html.replace("Content-Security-Policy", "nothing"), encoding="utf-8")
    page = opened(report, are_faults_expected=True)
    assert (page.title() == "taken over") is not has_policy
    assert charts(page, "canvas") == [True] * 3


def test_the_server_shows_a_report_with_its_charts(tab: Tab) -> None:
    tab.run("reported")
    page = tab.open("/runs/report?dir=runs/reported")
    page.locator("still-chart canvas").first.wait_for()
    assert page.evaluate("origin") == "null", "a sandbox: it cannot reach the server"
