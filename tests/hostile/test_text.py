"""Text from files: recipes without end, captions, names and logs that would steer a terminal or a browser."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lora_rocm.commands.status import status, status_text
from lora_rocm.dataset.captions.captions import variants
from lora_rocm.dataset.sources.folders import MAX_CAPTION_BYTES, read_caption
from lora_rocm.dataset.sources.scan import scan
from lora_rocm.errors import LoraRocmError, RecipeError
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.exit_codes import exit_code_of
from lora_rocm.foundation.terminal_text import legible, one_line
from lora_rocm.hardware.facts import MAX_FILE_BYTES, load_facts
from lora_rocm.hardware.selftest_result import Result, SelftestVerdict, SoftwareAndGpu, path_of, stored
from lora_rocm.hardware.settings import VARIABLE, Settings, settings_from
from lora_rocm.page_parts.inlined import inlined_files
from lora_rocm.recipe.load import MAX_RECIPE_BYTES, load_recipe
from lora_rocm.recipe.schema import DataSection
from lora_rocm.recipe.sections import MAX_ITEMS
from lora_rocm.recipe.source_sections import SourceOptions
from lora_rocm.report.html import MissingImage, Picture, picture
from lora_rocm.report.progress_bar import BarView, LineView, ProgressDisplay
from lora_rocm.report.report import write_report
from lora_rocm.rundir.events import EventReader
from lora_rocm.rundir.heartbeat import read_heartbeat
from lora_rocm.rundir.layout import RunDir
from tests.event_lines import read_events
from tests.hostile import attacks
from tests.program import RECIPE
from tests.supervisor.fake_run import data_fields, step_fields, write_whole_run
from tests.wording import saying, says

STEERS = ("\x1b", "\x07", "\x9b")

RECIPES = {
    "100 MB": "a: " + "x" * (100 << 20),
    "laughs": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)),
    "keys twice, by aliases": "m: &m {" + "a: ," * 5000 + "}\nl: [" + "*m," * 10_000 + "]\n",
    "cycle": "a: &a {b: *a}",
    "brackets": "a: " + "[" * 3000 + "]" * 3000,
    "keys": RECIPE + "optim:\n" + "".join(f"  key{n}: 1\n" for n in range(4000)),
    "long key": RECIPE + "x" * 200_000 + ": 1\n",
    "items": RECIPE.replace("rank: 2", "targets: [" + "1," * 2_000 + "]"),
    "digits": RECIPE.replace("rank: 2", "rank: " + "9" * 200_000),
    "python": RECIPE.replace("rank: 2", "rank: !!python/object/apply:os.system [touch /tmp/x]"),
    "infinite": RECIPE.replace("rank: 2", "alpha: .inf"),
    "no number": RECIPE.replace("rank: 2", "alpha: .nan"),
    "key twice": RECIPE + "lora: {rank: 3}\n",
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_without_end(tmp_path: Path, name: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPES[name], encoding="utf-8")
    began = time.process_time()
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert time.process_time() - began < 20 and len(str(caught.value)) < 50_000  # 2 s where nothing else runs


def test_the_largest_recipe_is_read(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    prompts = "\n".join(f"    - prompt {n}" for n in range(MAX_ITEMS))
    path.write_text(f"{RECIPE}sample:\n  prompts:\n{prompts}\n".ljust(MAX_RECIPE_BYTES), encoding="utf-8")
    assert len(load_recipe(path).recipe.sample.prompts) == MAX_ITEMS


@pytest.mark.parametrize(
    ("content", "caption"),
    [
        (f"a {attacks.STEERING} b".encode(), "a ]0;owned [2J ]8;;http://x.example \\click ]8;; \\ b"),
        (b"a\0b\nc\r\n\td", "a b c d"),
        ("a\u2028b\u202ec".encode(), "a b c"),
        ("👨\u200d👩 ü\u00a0x".encode(), "👨\u200d👩 ü x"),
        (b"x" * MAX_CAPTION_BYTES, "x" * MAX_CAPTION_BYTES),
    ],
)
def test_a_caption_is_one_line_of_text(tmp_path: Path, content: bytes, caption: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert one_line(read_caption(tmp_path / "a.txt")) == caption


@pytest.mark.parametrize("content", [b"\xff\xfe\0", b"\xed\xa0\x80", b"a\x80", "a cat".encode("utf-16-le")])
def test_a_caption_in_no_encoding_costs_its_image_alone(tmp_path: Path, content: bytes) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.png").write_bytes(attacks.image())
    (tmp_path / "a.txt").write_bytes(content)
    found = scan(DataSection(path=str(tmp_path), resolution=8, bucket_step=8))
    assert [sample.key for sample in found.samples] == ["b.png"] and "not UTF-8" in found.set_aside[0].what


def test_a_caption_of_a_gigabyte(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(attacks.image())
    (tmp_path / "a.txt").write_bytes(b"")
    os.truncate(tmp_path / "a.txt", 1 << 30)  # a hole: it takes no space
    with pytest.raises(LoraRocmError, check=saying("hostile/larger-than-64-kib")):
        scan(DataSection(path=str(tmp_path)))
    os.truncate(tmp_path / "a.txt", 0)
    assert scan(DataSection(path=str(tmp_path))).samples


def test_a_caption_of_thousands_of_tags_is_shuffled_in_time() -> None:
    began = time.process_time()
    options = SourceOptions(shuffle_caption=True)
    assert len(variants(",".join(map(str, range(12_000))), options, 4, 1)) == 4
    assert time.process_time() - began < 5  # 14 s with the whole caption read for each tag


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such names")
def test_names_that_steer(tmp_path: Path) -> None:
    for name in (f"a{attacks.STEERING.replace('/', '')}.png", "b\nc.png", "d\udcff.png", "e\u202egnp.png"):
        (tmp_path / name).write_bytes(attacks.image())
    (tmp_path / "bad\x1b[2J.png").write_bytes(b"no")
    (tmp_path / "10_\x1b[2Jx").mkdir()
    (tmp_path / "10_\x1b[2Jx" / "f.png").write_bytes(attacks.image("JPEG"))
    found = scan(DataSection(path=str(tmp_path), resolution=8, bucket_step=8))
    shown = [text for s in found.samples for text in (s.key, s.caption, s.folder)] + list(found.notices)
    shown += [problem.where + problem.what for problem in found.set_aside]
    assert len(found.samples) == 5 and len(found.set_aside) == 1
    assert all(text.isprintable() and text.encode("utf-8") for text in shown), shown


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such names")
def test_names_that_look_the_same_are_not_taken_for_each_other(tmp_path: Path) -> None:
    (tmp_path / "a\x1b.png").write_bytes(attacks.image())
    (tmp_path / "a\\x1b.png").write_bytes(attacks.image(side=16))
    found = scan(DataSection(path=str(tmp_path), resolution=8, bucket_step=8))
    assert len(found.samples) == 1 and says(found.notices, "hostile/looks-the-same")


OWN_SCRIPTS = [("", inlined_files().library), (' type="module"', inlined_files().module)]


def steered(run_dir: RunDir) -> dict[str, str]:
    """Everything that the readers of a run directory show."""
    plain, bars = io.StringIO(), io.StringIO()
    views = (ProgressDisplay(LineView(plain)), ProgressDisplay(BarView(Console(file=bars, force_terminal=False))))
    for read in EventReader(run_dir.events()).poll():
        for view in views:
            view.on_event(read)
    views[1].view.end()
    shown = {"lines": plain.getvalue(), "bars": bars.getvalue(), "status": status_text(status(run_dir))}
    return {**shown, "report": write_report(run_dir).read_text(encoding="utf-8")}


def test_a_run_directory_from_somebody_else(tmp_path: Path) -> None:
    """Names, captions and messages in events reach terminal and browser as text."""
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    bad = attacks.STEERING + attacks.HTML
    written: list[dict[str, Any]] = [
        {"type": "data", **data_fields(notices=[bad], set_aside=[{"where": bad, "what": bad, "fix": bad}])},
        {"type": "notice", "text": bad},
        {"type": "repaired", "kind": "image", "item": bad, "reason": bad},
        {"type": "incident", "kind": bad, "iteration": 1, "samples": [bad], "detail": bad, "action": bad},
        {"type": "checkpoint", "updates": 3, "path": bad, "lora": bad},
        {"type": "error", "code": bad, "what": bad, "where": bad, "fix": bad, "exit_code": 3},
    ]
    with run_dir.events().open("a", encoding="utf-8", errors="backslashreplace") as file:  # this writer cleans nothing
        file.writelines(json.dumps({"session": 2, **fields}, ensure_ascii=False) + "\n" for fields in written)
    assert any(sign in run_dir.events().read_text(encoding="utf-8").replace("\\u001b", "\x1b") for sign in STEERS)
    for name, text in steered(run_dir).items():
        assert "owned" in text or name == "status", name  # it is shown
        assert not any(sign in text for sign in STEERS), name
        own = [f"<script{kind}>{each}</script>" for kind, each in OWN_SCRIPTS]
        rest = text.replace(own[0], "").replace(own[1], "")
        assert name != "report" or ("<script" not in rest and "<img src=x" not in rest)


LINES = (
    b"[" * 100_000,
    b'{"type": "step", "updates": ' + b"9" * 5000 + b"}",
    *(
        json.dumps({"type": "step", "time": 1.0, "session": 1, **step_fields(7), **wrong}).encode()
        for wrong in (
            {"updates": "7"},
            {"updates": 10**300},
            {"updates": True},
            {"loss": "low"},
            {"loss": float("inf")},
            {"step_s": None},
            {"step_s": float("nan")},
            {"step_s": 1e308},
            {"memory_bytes": [1]},
            {"time": "now"},
            {"session": {}},
        )
    ),
    *(
        json.dumps({"type": "data", **data_fields(**wrong)}).encode()
        for wrong in ({"set_aside": 3}, {"set_aside": [3]}, {"set_aside": [{}]}, {"buckets": []}, {"notices": "x"})
    ),
    b'{"type": "start"}',
    b'{"type": "\\ud800", "x": "\\ud800"}',
    b'{"type": "_event"}',
    b"\xff\xfe",
)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run directory, and its events as lines; for reading."""
    run_dir = RunDir(tmp_path_factory.mktemp("whole") / "run")
    write_whole_run(run_dir)
    return run_dir.path, steered(run_dir)["lines"]


@pytest.mark.parametrize("number", range(len(LINES)))
def test_lines_that_no_run_has_written(tmp_path: Path, whole_run: tuple[Path, str], number: int) -> None:
    whole, before = whole_run
    run_dir = RunDir(Path(shutil.copytree(whole, tmp_path / "run")))
    with run_dir.events().open("ab") as file:
        file.write(LINES[number] + b"\n")
    after = steered(run_dir)
    assert after["lines"].startswith(before.rsplit("\n", 2)[0])
    assert says(after["status"], "hostile/step-40-of-40")


def test_every_event_that_is_written_is_read(tmp_path: Path) -> None:
    """Control: a run writes only the kinds of events that the readers expect."""
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    assert len(read_events(run_dir.events())) == len(run_dir.events().read_bytes().splitlines())


@pytest.mark.parametrize("content", [b'{"pid": 1e999, "count": 1, "activity": "x"}', b"[" * 100_000, b"9" * 5000])
def test_a_heartbeat_of_somebody_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "heartbeat").write_bytes(content)
    assert read_heartbeat(tmp_path / "heartbeat") is None


def test_errors_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise LoraRocmError("x", attacks.STEERING, where=attacks.STEERING, fix="a\nb")

    assert exit_code_of(fail) == 1
    shown = capsys.readouterr().err
    assert not any(sign in shown for sign in STEERS) and "owned" in shown and "a\nb" in shown


def test_the_report_opens_nothing_but_png(tmp_path: Path) -> None:
    path = tmp_path / "01.png"
    for content in (
        attacks.eps(tmp_path),
        attacks.image("TIFF"),
        attacks.png_of(12_000, 12_000),
        attacks.LYING_WEIGHTS["gap"],
    ):
        path.write_bytes(content)
        assert picture(path, "x") == MissingImage()
    assert not (tmp_path / attacks.MARK).exists()
    path.write_bytes(attacks.image())
    assert isinstance(picture(path, attacks.HTML), Picture)


def test_plain_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert read_plain(tmp_path / "a", 3) == b"abc"
    with pytest.raises(OSError, check=saying("hostile/larger-than-0-kib")):
        read_plain(tmp_path / "a", 2)
    with pytest.raises(OSError, check=saying("hostile/no-plain-file")):
        read_plain(tmp_path, 2)
    with pytest.raises(FileNotFoundError):
        read_plain(tmp_path / "b", 2)


@pytest.mark.parametrize("seconds", ["1" + "0" * 400, "1e999", "[" * 50_000, '"x"'])
def test_a_verdict_of_somebody_else_counts_for_nothing(tmp_path: Path, seconds: str) -> None:
    stack = SoftwareAndGpu("2.13", "hip 7.2", "6.19", "gfx1151")
    sound = json.dumps(SelftestVerdict(stack, (Result("gemm.a", "passed", 0.5),)).to_json())
    path_of(tmp_path, stack).write_text(sound, encoding="utf-8")
    assert stored(tmp_path, stack) is not None
    path_of(tmp_path, stack).write_text(sound.replace("0.5", seconds), encoding="utf-8")
    found = stored(tmp_path, stack)
    assert found is None or seconds == "1e999"


def test_settings_nested_without_end() -> None:
    with pytest.raises(LoraRocmError, match="not JSON"):
        settings_from({VARIABLE: "[" * 100_000})
    assert settings_from({VARIABLE: "{}"}) == Settings()


def test_facts_without_end(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_bytes(b"[" + b"1," * (MAX_FILE_BYTES // 2) + b"1]")
    with pytest.raises(LoraRocmError, check=saying("hostile/larger-than-16-mib")):
        load_facts(tmp_path / "f.json")


def test_letters_that_are_not_seen_but_belong_to_others_stay() -> None:
    family = "👨\u200d👩\u200d👧\u00a0x"
    assert legible(family) == family and one_line(family) == family.replace("\u00a0", " ")
    assert legible(f"{family}\x1b\n\u202e\udcff") == family + r"\x1b\n\u202e\udcff"
    assert legible("a\nb\x07", keep="\n") == "a\nb" + r"\x07"
    assert one_line(" a\0\nb\u2029 c ") == "a b c"
