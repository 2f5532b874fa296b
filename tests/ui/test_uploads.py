"""Files that a browser sends: bounded, decoded, named safely, and never over another file."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from lora_rocm.dataset.shape import SampleShape
from lora_rocm.errors import UserError
from lora_rocm.processes.process import OnEvent
from lora_rocm.rundir.event_types import CacheEvent
from lora_rocm.ui import text_uploads
from lora_rocm.ui.background import Work
from lora_rocm.ui.image_set import uploads
from lora_rocm.ui.image_set.uploads import usable_name
from lora_rocm.ui.text_samples import text_samples
from tests.ui.site import Site, code_of

TEXT_RECIPE = (
    'model: {family: causal-lm, name_or_path: "builtin:tiny-llama"}\n'
    "data: {sources: [{dataset: chats ü.jsonl}]}\ntrain: {max_train_steps: 1}\n"
)


def png(colour: int = 0) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (32, 32), (colour, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def send(site: Site, *files: tuple[str, bytes], folder: str = "new ü") -> Any:
    listed = [("files", (name, content)) for name, content in files]
    return site.client.post("/images/upload", params={"dir": folder}, files=listed)


@pytest.fixture
def folder(site: Site) -> Path:
    """A new folder, made in the page."""
    answer = site.client.post("/images/new", data={"name": "new ü"}, follow_redirects=False)
    assert answer.status_code == 303 and "new" in answer.headers["location"]
    assert "data-to" in site.get("/images/view", dir="new ü")
    return site.folder / "new ü"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_images_and_captions_are_saved(site: Site, folder: Path) -> None:
    found = send(site, ("ä b.png", png()), ("ä b.txt", "schön".encode()), ("sub\\c.PNG", png(9))).json()
    assert found == {"saved": ["ä b.png", "ä b.txt", "c.PNG"], "refused": []}
    assert (folder / "ä b.png").read_bytes() == png() and names(folder) == ["c.PNG", "ä b.png", "ä b.txt"]
    rows = site.client.get("/images/items", params={"dir": "new ü"}).json()["rows"]
    assert [row[:2] for row in rows] == [["c.PNG", ""], ["ä b.png", "schön"]]


def test_no_file_is_replaced(site: Site, folder: Path) -> None:
    assert send(site, ("a.png", png(1))).json()["saved"] == ["a.png"]
    assert [name for name, _ in send(site, ("a.png", png(2)), ("a.png", png(1))).json()["refused"]] == ["a.png"] * 2
    assert (folder / "a.png").read_bytes() == png(1)
    (folder / "link.png").symlink_to(site.folder.parent / "elsewhere.png")
    assert send(site, ("link.png", png())).json()["saved"] == [] and not (site.folder.parent / "elsewhere.png").exists()


def test_what_is_neither_image_nor_caption_is_refused(
    site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MAX_IMAGE_BYTES", 500)
    files = [("a.png", b"no image"), ("a.exe", b""), ("b.png", png() + bytes(500)), ("a.txt", b"\xff\xfe\x00x")]
    files += [("long.txt", b"x" * 70_000), (".hidden.png", png()), ("nul.png", png()), ("a\u202e.png", png())]
    found = send(site, *files).json()
    assert found["saved"] == [] and len(found["refused"]) == len(files) and names(folder) == []


@pytest.mark.parametrize(
    "name", ["", "x", "..", "../..", "a:b.png", "con.png", " .png", "a\x00.png", "a" * 300 + ".png"]
)
def test_a_name_that_cannot_be_used_is_refused(name: str) -> None:
    with pytest.raises(UserError) as raised:
        usable_name(name)
    assert raised.value.code == "upload-refused"
    assert usable_name("../../etc/a.png") == "a.png"  # only the last part counts


def test_files_go_only_into_named_folders(site: Site, folder: Path) -> None:
    for place, code in (("..", "outside-folders"), ("nothing", "no-folder")):
        assert code_of(send(site, ("a.png", png()), folder=place).text) == code
    for name, code in (("..", "folder-name"), ("a/b", "folder-name"), ("new ü", "folder-exists")):
        assert code_of(site.client.post("/images/new", data={"name": name}).text) == code
    refused = site.client.post(
        "/images/upload", params={"dir": "new ü"}, files={"files": ("a.png", png())}, headers={"X-CSRF": "wrong"}
    )
    assert refused.status_code == 403 and names(folder) == []


ROWS = b'{"prompt": "a", "completion": "b"}\n{"prompt": "c", "completion": "d"}\n'


def bring(site: Site, *files: tuple[str, bytes]) -> str:
    return str(site.client.post("/images/texts/upload", files=[("files", each) for each in files]).text)


def test_texts_are_saved_and_lead_to_a_recipe(site: Site) -> None:
    assert "/images/texts/upload" in site.get("/images")
    text = bring(site, ("chats ü.jsonl", ROWS), ("sub\\more.csv", b"prompt,completion\na,b\n"))
    assert (site.folder / "chats ü.jsonl").read_bytes() == ROWS and (site.folder / "more.csv").is_file()
    assert "/recipe/new?texts=chats" in text
    assert 'value="chats ü.jsonl"' in site.get("/recipe/new", texts="chats ü.jsonl")
    (site.folder / "my.yaml").write_text(
        TEXT_RECIPE.replace("]", ", {dataset: gone.jsonl}]"),
        encoding="utf-8",
    )
    assert "/images/texts?recipe=my.yaml" in bring(site, ("chats ü.jsonl", ROWS))  # the same file again
    page = site.get("/recipe/edit", file="my.yaml")
    assert "gone.jsonl is not there yet" in page and "chats ü.jsonl is not" not in page
    assert "/images/texts?recipe=my.yaml" in page
    assert "/recipe/edit?file=my.yaml" in site.get("/images/texts", recipe="my.yaml")  # the way back


def test_the_texts_are_counted_while_they_are_read_and_reading_can_be_cancelled(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site.folder / "my.yaml").write_text(TEXT_RECIPE, encoding="utf-8")
    (site.folder / "chats ü.jsonl").write_bytes(2 * ROWS)
    reached = threading.Event()
    weighed = {"num_bytes": {}, "notices": [], "files": [], "tokenizers": []}

    def child(module: str, job: Sequence[str], env: object, on_event: OnEvent, wanted: Callable[[], None]) -> object:
        if not module.endswith("check_texts"):
            return weighed
        total = json.loads(Path(job[0]).read_bytes())["num_texts"]
        on_event(CacheEvent(what="texts", done=1, total=total, per_second=1))
        wanted()
        reached.set()
        while True:
            time.sleep(0.02)
            wanted()

    monkeypatch.setattr("lora_rocm.processes.tool.run_for_json", child)
    monkeypatch.chdir(site.folder)
    site.get("/images/texts/samples", recipe="my.yaml")
    assert reached.wait(20)
    shown = site.get("/images/texts/samples", recipe="my.yaml")
    assert "1 / 4" in shown and "/images/texts/cancel" in shown and 'value="250"' in shown
    site.client.post("/images/texts/cancel", params={"recipe": "my.yaml"})
    (work,) = site.context.background._works.values()
    work.wait(10)
    assert "badge-cancelled" in site.get("/images/texts/samples", recipe="my.yaml")


def test_held_out_texts_are_named_next_to_the_lengths(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    (site.folder / "my.yaml").write_text(TEXT_RECIPE, encoding="utf-8")
    data = SimpleNamespace(
        usable=30, num_problems=0, looked_at=0, shown=[], problems=(), first_warnings=(), first_notices=(), notices=()
    )
    plan = SimpleNamespace(data=SimpleNamespace(buckets={SampleShape.of(length=64): 27}, held_out=3))
    found = SimpleNamespace(data=data, plan=plan, notes=(), error=None)
    monkeypatch.setattr("lora_rocm.ui.text_samples.checked", lambda *_, **__: found)
    samples = text_samples(site.folder / "my.yaml", Work("key"))
    assert samples.held_out == 3 and sum(each.count for each in samples.lengths) == samples.usable - samples.held_out


def test_texts_are_read_when_they_arrive_as_training_reads_them(site: Site) -> None:
    text = bring(site, ("a.jsonl", ROWS + b'{"odd": 1}\n'))
    assert "2 texts" in text and "a.jsonl:3" in text and code_of(text) == ""  # the odd row is named
    wrong = bring(site, ("b.jsonl", b'{"odd": "a"}\n'))
    assert code_of(wrong) == "no-usable-texts" and not (site.folder / "b.jsonl").exists()
    asked = bring(site, ("b.jsonl", b'{"question": "a", "answer": "b"}\n'))  # the repaired file, with the same name
    assert code_of(asked) == "" and (site.folder / "b.jsonl").is_file() and "<b>assistant</b>" in asked
    (site.folder / "own.jsonl").write_bytes(b'{"odd": 1}\n')
    assert code_of(bring(site, ("own.jsonl", b'{"odd": 1}\n'))) == "no-usable-texts"
    assert (site.folder / "own.jsonl").is_file(), "the upload did not make it"
    turns = b'[{"role": "user", "content": "who?"}, {"role": "assistant", "content": "%s"}]'
    pair = b'{"chosen": ' + turns % b"me" + b', "rejected": ' + turns % b"you" + b"}\n"
    shown = bring(site, ("c.jsonl", pair))
    assert code_of(shown) == "" and all(f"<b>{role}</b>" in shown for role in ("user", "chosen", "rejected"))
    assert ".parquet" in bring(site, ("d.xlsx", ROWS))  # the accepted extensions


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.yaml", b"model: {}"),
        ("a.html", ROWS),
        (".hidden.jsonl", ROWS),
        ("a\u202e.jsonl", ROWS),
        ("con.jsonl", ROWS),
        ("a.jsonl", b"\xff\xfe"),
        ("a.jsonl", b"[1, 2]\n"),
        ("a.jsonl", b"not json\n"),
        ("a.jsonl", b""),
        ("a.csv", b"\xff\xfe"),
        ("a.jsonl", b"[" * 100_000),
    ],
)
def test_what_is_no_table_of_texts_is_refused(name: str, content: bytes, site: Site) -> None:
    assert 'class="bad"' in bring(site, (name, content)) and names(site.folder) == []


def test_texts_are_bounded_and_replace_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(site, ("a.jsonl", ROWS))
    assert 'class="bad"' in bring(site, ("a.jsonl", ROWS + ROWS)) and (site.folder / "a.jsonl").read_bytes() == ROWS
    (site.folder / "link.jsonl").symlink_to(site.folder.parent / "elsewhere.jsonl")
    assert 'class="bad"' in bring(site, ("link.jsonl", ROWS)) and not (site.folder.parent / "elsewhere.jsonl").exists()
    monkeypatch.setattr(text_uploads, "MAX_TABLE_BYTES", 10)
    assert 'class="bad"' in bring(site, ("b.jsonl", ROWS)) and not (site.folder / "b.jsonl").exists()
    assert code_of(site.client.post("/images/texts/upload", data={"a": "b"}).text) == "no-upload"
