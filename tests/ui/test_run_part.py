"""The part Runs without a browser: curves, details, files, and changes of a run."""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import sys
import threading
from html import unescape
from pathlib import Path

import pytest

from lora_rocm.errors import UserError, storage_error
from lora_rocm.page_parts.charts import reduced
from lora_rocm.page_parts.inlined import inlined_files
from lora_rocm.report.figures import smoothed
from lora_rocm.report.stories import stories_of
from lora_rocm.rundir import layout
from lora_rocm.rundir.event_types import NoticeEvent
from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_view import RunView
from lora_rocm.supervisor.lock import locked
from lora_rocm.supervisor.manage_runs import ARCHIVE
from lora_rocm.ui import launch, run_files
from lora_rocm.ui.curves import FIELDS, curve_of, to_bytes
from lora_rocm.ui.pages import run as run_pages
from lora_rocm.ui.run_details import details_of, log_end, previews_of
from lora_rocm.ui.run_phases import activity_of, phases_of
from tests.supervisor.fake_run import change_fields, event, failure_fields, restart_fields, write_whole_run
from tests.supervisor.wire import start_fields, step_fields
from tests.ui.site import Site, code_of


def numbers_of(content: bytes) -> tuple[list[float], list[float]]:
    found = struct.unpack(f"<{len(content) // 4}f", content)
    return list(found[: len(found) // 2]), list(found[len(found) // 2 :])


def test_no_peak_disappears_from_a_reduced_curve() -> None:
    curve = [(step, math.sin(step / 50)) for step in range(1, 100_001)]
    curve[77_777] = (curve[77_777][0], 99.0)
    curve[33_333] = (curve[33_333][0], -99.0)
    found = reduced(curve, 1000)
    assert len(found) <= 1000 and found[0] == curve[0] and found[-1] == curve[-1]
    assert curve[77_777] in found and curve[33_333] in found
    assert [step for step, _ in found] == sorted({step for step, _ in found})
    assert reduced(curve[:500], 1000) == curve[:500] and reduced([], 1000) == []


@pytest.mark.parametrize("field", [*FIELDS, "held_out"])
def test_a_curve_has_the_numbers_of_the_events(field: str, site: Site) -> None:
    view = RunView.of(site.run())
    answer = site.client.get("/runs/curve", params={"dir": "runs/a-run", "field": field})
    steps, values = numbers_of(answer.content)
    wanted = curve_of(view, field)
    assert steps == [step for step, _ in wanted] and wanted
    assert all(math.isclose(value, raw, rel_tol=1e-6) for value, (_, raw) in zip(values, wanted, strict=True))


def test_a_curve_is_smoothed_over_all_steps(site: Site) -> None:
    view = RunView.of(site.run())
    asked = {"dir": "runs/a-run", "field": "loss", "smooth": "0.9", "points": "10"}
    _, values = numbers_of(site.client.get("/runs/curve", params=asked).content)
    wanted = smoothed(curve_of(view, "loss"), 0.9)
    assert len(values) <= 10 and math.isclose(values[-1], wanted[-1][1], rel_tol=1e-6)
    assert to_bytes(reduced(wanted, 10)) == site.client.get("/runs/curve", params=asked).content
    for odd in ({"smooth": "nan"}, {"smooth": "x", "points": "-1"}, {"points": "1e99"}):
        assert site.client.get("/runs/curve", params=asked | odd).status_code == 200
    assert code_of(site.client.get("/runs/curve", params=asked | {"field": "../x"}).text) == "no-curve"


def test_phases_have_counters(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run").create()
    run_dir.recipe.write_text("x", encoding="utf-8")
    writer = EventWriter(run_dir.events(), session=2)
    for name, state, seconds in (("imports", "end", 4.0), ("start", "begin", 0.0), ("start", "end", 1.0)):
        writer.write(event("phase", phase=name, state=state, seconds=seconds))
    writer.write(event("start", **start_fields()))
    writer.write(event("phase", phase="cache", state="begin", seconds=0.0))
    writer.write(event("cache", what="images", done=3, total=18, per_second=3.5))
    writer.close()
    view = RunView.of(run_dir)
    found = phases_of(view)
    assert [(phase.name, phase.seconds) for phase in found] == [("imports", 4.0), ("start", 1.0), ("cache", None)]
    assert (found[-1].done, found[-1].total) == (3, 18) and activity_of(view) == "cache"


def test_what_happened_is_told_with_what_it_means(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    assert stories_of(RunView.of(run_dir)).meaning == ""
    writer = EventWriter(run_dir.events("supervisor"))
    writer.write(event("failure", **failure_fields(what="It hung.\nlast line of the log")))
    writer.write(event("change", **change_fields()))
    writer.write(event("restart", **restart_fields()))
    writer.close()
    found = stories_of(RunView.of(run_dir))
    kinds = [story.kind for story in found.found]
    assert kinds[:3] == ["restart", "change", "failure"] and "incident" in kinds
    assert found.found[2].logs[0][1] == "last line of the log" and found.meaning


def test_a_state_is_derived_and_never_stays(site: Site) -> None:
    """Killed while "stopping": the file stop remains, and nothing shows "running"."""
    run_dir = site.run()
    run_dir.result.unlink()
    run_dir.ask_to_stop()
    lines = run_dir.events().read_bytes().splitlines()
    run_dir.events().write_bytes(b"\n".join(line for line in lines if b'"end"' not in line[:20]) + b"\n")
    shown = details_of(site.context.views.of(run_dir), None)
    assert shown.view.state == "died" and not shown.is_stopping and shown.can_resume
    with locked(run_dir):
        shown = details_of(site.context.views.of(run_dir), None)
        assert shown.view.state == "running" and shown.is_stopping
        assert shown.silent_s is None or shown.silent_s > 0


def test_previews_have_their_prompts(site: Site) -> None:
    run_dir = site.run()
    rows = [{"prompt": "a <b>cat</b>"}, {"prompt": "two"}, 3]
    (run_dir.samples_at(40) / "requests.json").write_text(json.dumps(rows), encoding="utf-8")
    (run_dir.samples_at(20) / "requests.json").write_text("[[[", encoding="utf-8")
    found = previews_of(run_dir)
    assert [each.updates for each in found] == [40, 20, 0]
    assert [prompt for _, prompt in found[0].files] == ["a <b>cat</b>", "two", ""]
    text = site.get("/runs/previews", dir="runs/a-run")
    assert "a &lt;b&gt;cat&lt;/b&gt;" in text and "<b>cat" not in text


def test_a_picture_that_has_gone_with_its_run_is_not_found(site: Site) -> None:
    run_dir = site.run("r")
    name = next(run_dir.path.rglob("*.png")).relative_to(run_dir.path).as_posix()
    address = {"dir": "runs/r", "file": name}
    assert site.client.get("/runs/picture", params=address).status_code == 200
    (run_dir.path / name).write_bytes(b"damaged")
    assert site.client.get("/runs/picture", params=address).status_code == 422
    (run_dir.path / name).unlink()
    assert site.client.get("/runs/picture", params=address).status_code == 404


def test_only_results_are_downloaded(site: Site) -> None:
    run_dir = site.run()
    answer = site.client.get("/runs/download", params={"dir": "runs/a-run", "file": "lora.safetensors"})
    assert answer.content == run_dir.lora.read_bytes()
    assert answer.headers["content-disposition"].startswith("attachment")
    for other in ("recipe.yaml", "events.jsonl", "../a-run/recipe.yaml"):
        answer = site.client.get("/runs/download", params={"dir": "runs/a-run", "file": other})
        assert code_of(answer.text) == "file-unknown", other


def test_the_report_runs_in_a_sandbox(site: Site) -> None:
    site.run()
    answer = site.client.get("/runs/report", params={"dir": "runs/a-run"})
    sandbox, _, policy = answer.headers["content-security-policy"].partition("; ")
    assert sandbox == "sandbox allow-scripts" and policy == inlined_files().policy
    assert unescape(answer.text).count(f'content="{policy}"') == 1


def test_the_log_is_shown_from_its_end(site: Site) -> None:
    run_dir = site.run()
    run_dir.worker_log.write_text("x" * 100_000 + "\nthe last line", encoding="utf-8")
    assert log_end(run_dir) == "the last line"
    assert "the last line" in site.get("/runs/log", dir="runs/a-run")
    run_dir.lock_of(1).touch()
    run_dir.log_of(1).write_text("of the second GPU", encoding="utf-8")
    text = site.get("/runs/log", dir="runs/a-run")
    assert "the last line" in text and "of the second GPU" in text


def test_a_full_disk_is_a_problem_and_no_bug(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = site.run()

    def full(path: Path, **how: object) -> object:
        raise storage_error(OSError(errno.ENOSPC, "full"), path)

    monkeypatch.setattr(layout, "open_in_place", full)
    answer = site.client.post("/runs/stop", params={"dir": "runs/a-run"}, headers={"hx-request": "true"})
    assert answer.status_code == 503 and code_of(answer.text) == "disk-full" and not run_dir.stop.exists()
    assert answer.headers["hx-retarget"] == "#problem"  # so the page keeps what the user has written


def test_a_run_is_renamed_archived_and_deleted(site: Site) -> None:
    site.run()
    asked = {"dir": "runs/a-run"}
    answer = site.client.post("/runs/rename", params=asked, data={"name": "größer & besser"}, follow_redirects=False)
    assert answer.status_code == 303 and (site.folder / "runs" / "größer & besser").is_dir()
    asked = {"dir": "runs/größer & besser"}
    for name in ("../x", "con", "a/b", "a\\b", "x.", "", "a" * 300, ARCHIVE, "a:b", "\u202ex"):
        answer = site.client.post("/runs/rename", params=asked, data={"name": name}, follow_redirects=False)
        assert code_of(answer.text) in ("run-name", "field-missing"), name
    site.run("other")
    answer = site.client.post("/runs/rename", params=asked, data={"name": "other"})
    assert code_of(answer.text) == "run-name-taken"
    assert site.client.post("/runs/archive", params=asked, follow_redirects=False).status_code == 303
    assert "größer" not in site.get("/runs")
    assert "größer" in site.get("/runs", archived=1) and "größer" in site.get("/runs/list", archived=1)
    asked = {"dir": f"runs/{ARCHIVE}/größer & besser"}
    assert site.client.post("/runs/restore", params=asked, follow_redirects=False).status_code == 303
    assert "größer" in site.get("/runs")
    asked = {"dir": "runs/größer & besser"}
    assert "KiB" in site.get("/runs/size", **asked)
    assert site.client.post("/runs/delete", params=asked, follow_redirects=False).status_code == 303
    assert sorted(path.name for path in (site.folder / "runs").iterdir()) == [ARCHIVE, "other"]
    assert code_of(site.client.get("/runs/view", params=asked).text) == "no-run"


@pytest.mark.parametrize("action", ["rename", "archive", "delete"])
def test_a_running_run_stays_where_it_is(action: str, site: Site) -> None:
    with locked(site.run()):
        answer = site.client.post(f"/runs/{action}", params={"dir": "runs/a-run"}, data={"name": "x"})
    assert code_of(answer.text) == "run-is-running" and site.run_dir("a-run").recipe.is_file()


def test_deleting_a_run_follows_no_link(site: Site, tmp_path: Path) -> None:
    keep = tmp_path / "keep.txt"
    keep.write_text("mine", encoding="utf-8")
    (site.run().samples / "link").symlink_to(tmp_path, target_is_directory=True)
    assert site.client.post("/runs/delete", params={"dir": "runs/a-run"}, follow_redirects=False).status_code == 303
    assert keep.read_text(encoding="utf-8") == "mine" and not site.run_dir("a-run").path.exists()


@pytest.mark.parametrize("action", ["delete", "rename", "archive"])
def test_a_link_to_a_run_moves_and_deletes_nothing(action: str, site: Site) -> None:
    kept = site.run("a-run").path
    link = kept.with_name("link")
    link.symlink_to(kept, target_is_directory=True)
    for text in ("runs/link", "runs/link/samples/..", str(link)):
        answer = site.client.post(f"/runs/{action}", params={"dir": text}, data={"name": "x"})
        assert code_of(answer.text) == "link-refused", text
    assert kept.is_dir() and link.is_symlink()


@pytest.mark.parametrize("address", ["/images/view", "/runs/view", "/recipe/present"])
def test_a_name_that_no_file_can_have_is_refused(address: str, site: Site) -> None:
    answer = site.client.get(address, params={"dir": "x" * 300, "file": "x" * 300 + ".yaml"})
    assert answer.status_code < 500 and code_of(answer.text) not in ("", "page-failed")


def test_stop_writes_the_file_that_asks_the_worker(site: Site) -> None:
    run_dir = site.run()
    with locked(run_dir):
        text = site.client.post("/runs/stop", params={"dir": "runs/a-run"}).text
    assert run_dir.stop.exists() and "disabled" in text


RECIPE = """\
model: {name_or_path: "builtin:tiny-sdxl"}
data: {path: "builtin:demo"}
train: {max_train_steps: 40}
"""


def test_training_is_another_process_that_outlives_the_server(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a process in place of training, which notes its arguments, its folder and its group."""
    started = site.folder / "started.json"
    code = "import json, os, sys; open(sys.argv[1], 'w').write(json.dumps([sys.argv[2:], os.getcwd()]))"
    monkeypatch.setattr(launch, "python_command", lambda *words: [sys.executable, "-c", code, str(started), *words])
    (site.folder / "r.yaml").write_text(RECIPE, encoding="utf-8")
    run_dir = site.context.launches.train(site.folder / "r.yaml", ["lora.rank=8"], site.folder)
    made = site.context.launches.of(run_dir)
    assert made is not None and made.process.wait(20) == 0
    words, folder = json.loads(started.read_text(encoding="utf-8"))
    assert words[:3] == ["-m", "lora_rocm", "train"] and words[-2:] == ["--set", "lora.rank=8"]
    assert folder == str(site.folder) and str(run_dir) in words
    with pytest.raises(UserError):
        site.context.launches.train(site.folder / "none.yaml", [], site.folder)


def test_a_start_that_fails_shows_why(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; print('There is no GPU.'); sys.exit(3)"
    monkeypatch.setattr(launch, "python_command", lambda *words: [sys.executable, "-c", code])
    run_dir = site.run()
    run_dir.result.unlink()
    assert site.client.post("/runs/resume", params={"dir": "runs/a-run"}).text
    made = site.context.launches.of(run_dir.path)
    assert made is not None and made.process.wait(20) == 3
    assert "There is no GPU." in site.get("/runs/state", dir="runs/a-run")


def test_between_the_click_and_the_first_event_a_run_is_starting(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "python_command", lambda *words: [sys.executable, "-c", "import time; time.sleep(60)"])
    run_dir = site.run()
    run_dir.result.unlink()
    run_dir.ask_to_stop()
    os.utime(run_dir.stop, (1, 1))  # of the session before
    text = site.client.post("/runs/resume", params={"dir": "runs/a-run"}).text
    assert "every 1s" in text and "/runs/resume" not in text and "/runs/stop" not in text
    with locked(run_dir):  # the supervisor has begun, and has not yet removed the file
        shown = details_of(site.context.views.of(run_dir), site.context.launches.of(run_dir.path))
        assert (shown.is_stopping, shown.activity, shown.phases, shown.progress.eta_s) == (False, "imports", [], None)
        run_dir.ask_to_stop()
        launched = site.context.launches.of(run_dir.path)
        assert launched is not None
        later_s = launched.began_s + 1  # not the present time: the clock of a machine may be set back
        os.utime(run_dir.stop, (later_s, later_s))
        assert "disabled" in site.get("/runs/state", dir="runs/a-run")
    # It records events, and ends as a stopped run does: with a code that is not 0
    writer = EventWriter(run_dir.events(), session=2)
    writer.write(event("step", **step_fields(41)))
    writer.close()
    made = site.context.launches.of(run_dir.path)
    assert made is not None
    made.process.kill()
    assert made.process.wait(20) != 0
    assert "<pre>" not in site.get("/runs/state", dir="runs/a-run")


def test_a_finished_run_leads_to_the_next_step(site: Site) -> None:
    site.run()
    text = site.get("/runs/state", dir="runs/a-run")
    assert "/choose/run?dir=runs%2Fa-run" in text and "/try/run?dir=runs%2Fa-run" in text


def test_a_long_run_opens_quickly_and_its_pieces_read_it_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, reads = site.run(), []
    of_logs = RunView.of_logs
    monkeypatch.setattr(RunView, "of_logs", lambda *args, **how: reads.append(1) or of_logs(*args, **how))
    views = site.context.views
    threads = [threading.Thread(target=views.of, args=(run_dir,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 1
    writer = EventWriter(run_dir.events(), session=1)
    writer.write(event("step", **step_fields(41)))
    writer.close()
    assert views.of(run_dir).updates == 41 and len(reads) == 2
    whole = run_dir.events().read_bytes()
    run_dir.events().write_bytes(whole[: len(whole) // 2])  # as after a power failure
    assert views.of(run_dir).updates == RunView.of(run_dir).updates < 41
    run_dir.events().unlink()
    assert views.of(run_dir).updates == 0


def test_a_view_stays_as_it_is_while_another_thread_reads_more(site: Site) -> None:
    run_dir = site.run()
    views = site.context.views
    before = views.of(run_dir)
    num_steps, notices = len(before.log.steps), len(before.log.in_order(NoticeEvent))
    writer = EventWriter(run_dir.events(), session=1)
    writer.write(event("step", **step_fields(41)))
    writer.write(event("notice", text="new"))
    writer.close()
    after = views.of(run_dir)
    assert len(before.log.steps) == num_steps and len(before.log.in_order(NoticeEvent)) == notices
    assert len(after.log.steps) == num_steps + 1 and len(after.log.in_order(NoticeEvent)) == notices + 1
    assert after.log.to_bytes({}) == RunView.of(run_dir, use_index=False).log.to_bytes({})


def test_a_file_that_is_replaced_meanwhile_is_left_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = site.run()
    paths = run_files.result_paths
    (first, *others) = paths(site.context.views.of(run_dir))

    def late(view: RunView) -> list[Path]:
        found = paths(view)
        first.unlink()
        return found

    monkeypatch.setattr(run_pages, "result_paths", late)
    text = site.get("/runs/files", dir="runs/a-run")
    assert f">{first.name}</a>" not in text and others and f">{others[0].name}</a>" in text
