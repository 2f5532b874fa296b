"""The line for a public table in the page: of one run, and of the newest run with enough steps."""

from __future__ import annotations

import os
import re
from html import unescape

from lora_rocm.report.measured_line import measured_line
from lora_rocm.rundir.run_view import RunView
from tests.report.measured_run import write_measured_run
from tests.ui.site import Site, code_of


def fields_of(html: str) -> dict[str, str]:
    """The fields that can be copied, by their ids."""
    return {name: unescape(text) for name, text in re.findall(r'<textarea id="speed-(\w+)"[^>]* readonly>(.*?)<', html)}


def test_a_run_shows_its_line_before_it_is_copied(site: Site) -> None:
    run_dir = site.run_dir("measured")
    write_measured_run(run_dir)
    html = site.get("/runs/speed", dir="runs/measured")
    wanted = measured_line(RunView.of(run_dir))
    assert fields_of(html) == {"header": wanted.header, "line": wanted.line}
    assert html.count("<copy-button") == 2 and "/runs/speed?dir=runs%2Fmeasured" in site.get(
        "/runs/view", dir="runs/measured"
    )


def test_too_few_steps_are_refused_in_the_place_of_the_line(site: Site) -> None:
    site.run()
    headers = {"HX-Request": "true", "X-Problem-Target": "#speed"}
    answer = site.client.get("/runs/speed", params={"dir": "runs/a-run"}, headers=headers)
    assert answer.status_code == 422 and code_of(answer.text) == "too-few-steps"
    assert answer.headers["hx-retarget"] == "#speed" and not fields_of(answer.text)


def test_the_machine_shows_the_newest_run_with_enough_steps(site: Site) -> None:
    assert "/machine/speed" in site.get("/machine") and not fields_of(site.get("/machine/speed"))
    run_dir = site.run_dir("measured")
    write_measured_run(run_dir)
    newer = site.run("newer")  # too few steps
    for path in newer.path.iterdir():
        os.utime(path, (4e9, 4e9))
    html = site.get("/machine/speed")
    assert fields_of(html)["line"] == measured_line(RunView.of(run_dir)).line
    assert "dir=runs%2Fmeasured" in html and "newer" not in html
