"""The line for a public table in a browser: shown, then copied by its button; a refusal is in its place."""

from __future__ import annotations

import shutil

from lora_rocm.report.measured_line import measured_line
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_view import RunView
from tests.report.measured_run import write_measured_run
from tests.ui.browser.conftest import Tab


def test_the_line_is_shown_and_copied(tab: Tab) -> None:
    tab.run("few")
    run_dir = RunDir(tab.folder / "runs" / "measured")
    shutil.rmtree(run_dir.path, ignore_errors=True)
    write_measured_run(run_dir)
    wanted = measured_line(RunView.of(run_dir))
    for address, opened in (("/runs/view?dir=runs%2Fmeasured", True), ("/machine", False)):
        page = tab.open(address)
        if opened:
            page.get_by_text("Speed for a public table").click()
        field = page.get_by_label("Line", exact=True)
        field.wait_for()
        assert field.input_value() == wanted.line and not field.is_editable()
        # Without the right to write to the clipboard the text is selected
        page.locator("#speed copy-button button").nth(1).click()
        page.locator("#speed copy-button button", has_text="Cop").nth(1).wait_for()
        tab.settle()
        assert tab.axe() == [] and tab.widest() <= 0
    tab.open("/runs/view?dir=runs%2Ffew").get_by_text("Speed for a public table").click()
    tab.page.locator("#speed .problem").wait_for()
    assert "too-few-steps" in tab.page.locator("#speed .problem").inner_text()
    tab.expect(422)
