"""The file of votes: append only, and readable after a power failure."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from lora_rocm.errors import StorageError
from lora_rocm.rundir.clicks import Click, Side, add_click, read_clicks, undo_click
from lora_rocm.rundir.layout import RunDir

ONE, TWO = Side(200, 0.8, "grid/a.png"), Side(400, 1.0, "grid/b.png")


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "my rün").create()


def test_votes_are_read_in_the_order_of_the_clicks(run_dir: RunDir) -> None:
    assert read_clicks(run_dir) == []
    add_click(run_dir, Click("a <b>zibu</b>, größe", ONE, TWO, "first", time.time()))
    add_click(run_dir, Click("two", TWO, ONE, "tie", time.time()))
    first, second = read_clicks(run_dir)
    assert (first.prompt, first.first, first.second, first.preferred) == ("a <b>zibu</b>, größe", ONE, TWO, "first")
    assert second.preferred == "tie" and second.time >= first.time
    before = run_dir.clicks.read_bytes()
    add_click(run_dir, Click("three", ONE, TWO, "second", time.time()))
    assert run_dir.clicks.read_bytes().startswith(before)


def test_a_vote_can_be_undone(run_dir: RunDir) -> None:
    undo_click(run_dir)
    assert not run_dir.clicks.exists()
    for prompt in ("one", "two"):
        add_click(run_dir, Click(prompt, ONE, TWO, "first", time.time()))
    undo_click(run_dir)
    assert [click.prompt for click in read_clicks(run_dir)] == ["one"]


def test_no_cut_of_the_file_loses_another_vote(run_dir: RunDir) -> None:
    for prompt in ("one", "two"):
        add_click(run_dir, Click(prompt, ONE, TWO, "first", time.time()))
    content = run_dir.clicks.read_bytes()
    first_end = content.index(b"\n") + 1
    for end in range(first_end, len(content), 7):
        run_dir.clicks.write_bytes(content[:end])
        add_click(run_dir, Click("three", ONE, TWO, "second", time.time()))
        prompts = [click.prompt for click in read_clicks(run_dir)]
        assert prompts == ["one", "three"] or (end == len(content) - 1 and prompts == ["one", "two", "three"]), end


def test_lines_that_are_no_vote_are_ignored(run_dir: RunDir) -> None:
    add_click(run_dir, Click("good", ONE, TWO, "first", time.time()))
    value = json.loads(run_dir.clicks.read_bytes())
    bad = [
        value | {"preferred": "third"},
        value | {"first": {}},
        value | {"second": None},
        value | {"time": "now"},
        value | {"first": value["first"] | {"updates": True}},
        value | {"first": value["first"] | {"strength": float("nan")}},
        [value],
    ]
    lines = [json.dumps(each).encode() for each in bad]
    run_dir.clicks.write_bytes(b"\n".join([b"\xff\x00", b"[" * 100_000, *lines, json.dumps(value).encode()]))
    assert [click.prompt for click in read_clicks(run_dir)] == ["good"]


def test_a_link_is_not_written_through(run_dir: RunDir, tmp_path: Path) -> None:
    run_dir.clicks.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError) as caught:
        add_click(run_dir, Click("one", ONE, TWO, "first", time.time()))
    assert caught.value.code == "link-refused" and not (tmp_path / "elsewhere").exists()
