"""Images without a browser: the grid's rows, captions against their version, conflicts, undo, and hostile folders."""

from __future__ import annotations

import html
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lora_rocm.errors import UserError
from lora_rocm.ui.background import Work
from lora_rocm.ui.folders import MODELS
from lora_rocm.ui.image_set import listing
from lora_rocm.ui.image_set.changes import ChangeJournal
from lora_rocm.ui.image_set.choosing import MAX_ROWS
from lora_rocm.ui.image_set.listing import LISTINGS
from tests.ui.image_folders import write_folder, write_image
from tests.ui.site import Site, code_of


@pytest.fixture
def folder(site: Site) -> Path:
    """A folder with four images."""
    return write_folder(site.folder / "ä pictures")


def rows(site: Site, **query: Any) -> list[list[str]]:
    """Return the rows that the grid gets."""
    answer = site.client.get("/images/items", params={"dir": "ä pictures", **query})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["rows"])


def fields(site: Site, name: str) -> dict[str, str]:
    """Return the fields of the first caption in the editor of an image."""
    text = site.get("/images/item", dir="ä pictures", name=name)
    hidden = dict(re.findall(r'name="(file|version)" value="([^"]*)"', text))
    return {**hidden, "text": re.findall(r"<textarea[^>]*>\n(.*?)</textarea>", text, re.DOTALL)[0]}


def save(site: Site, name: str, given: dict[str, str]) -> Any:
    return site.client.post("/images/caption", params={"dir": "ä pictures", "name": name}, data=given)


def test_the_images_of_a_folder_for_models_are_not_offered(site: Site, folder: Path) -> None:
    assert "<li" in site.get("/images/found")
    site.context.folders.add(folder, MODELS)
    assert "<li" not in site.get("/images/found")
    site.context.folders.add(folder, "added")  # the user names it for its images too
    assert "<li" in site.get("/images/found")


def test_folders_are_found_and_opened(site: Site, folder: Path, tmp_path: Path) -> None:
    site.run()
    write_image(site.folder / "ä pictures" / "masks" / "image 0.png")
    text = site.get("/images/found")
    assert text.count("<li") == 1 and "4 images" in text  # neither previews of runs nor masks
    elsewhere = write_folder(tmp_path / "elsewhere")
    assert code_of(site.client.get("/images/view", params={"dir": str(elsewhere)}).text) == "outside-folders"
    answer = site.client.post("/images/open", data={"folder": str(elsewhere)})
    assert answer.status_code == 200 and site.get("/images/found").count("<li") == 2


def test_the_grid_gets_windows_of_the_chosen_images(site: Site, folder: Path) -> None:
    assert [row[0] for row in rows(site)] == [f"image {number}.png" for number in range(4)]
    assert [row[2] for row in rows(site)] == ["", "", "n", ""]
    assert [row[0] for row in rows(site, text="SMILE")] == ["image 1.png"]
    assert [row[0] for row in rows(site, tag="woman")] == ["image 0.png", "image 1.png"]
    assert [row[0] for row in rows(site, only="without")] == ["image 2.png"]
    assert [row[0] for row in rows(site, sort="long", count=1)] == ["image 1.png"]
    assert [row[0] for row in rows(site, start=3, count=MAX_ROWS + 1)] == ["image 3.png"]
    first = site.client.get("/images/items", params={"dir": "ä pictures", "sort": "long"}).json()
    (folder / "image 0.txt").write_text("x" * 100, encoding="utf-8")
    again = site.client.get("/images/items", params={"dir": "ä pictures", "sort": "long", "choice": first["choice"]})
    assert [row[0] for row in again.json()["rows"]] == [
        row[0] for row in first["rows"]
    ]  # nothing jumps while scrolling


def test_a_caption_is_saved_read_as_training_reads_it_and_undone(site: Site, folder: Path) -> None:
    given = fields(site, "image 2.png")
    assert given == {"file": "image 2.txt", "version": "missing", "text": ""}
    assert save(site, "image 2.png", {**given, "text": "a <b>tree</b>\r\nby a lake"}).status_code == 200
    assert (folder / "image 2.txt").read_bytes() == b"a <b>tree</b>\nby a lake"
    assert rows(site)[2][1:3] == ["a <b>tree</b> by a lake", ""]
    text = site.get("/images/item", dir="ä pictures", name="image 2.png", trigger="zwx")
    assert "zwx, a &lt;b&gt;tree&lt;/b&gt; by a lake" in text and "<b>tree" not in text
    answer = site.client.post("/images/undo", params={"dir": "ä pictures"})
    assert answer.status_code == 200 and not (folder / "image 2.txt").exists() and rows(site)[2][2] == "n"
    assert code_of(site.client.post("/images/undo", params={"dir": "ä pictures"}).text) == "nothing-to-undo"


def test_two_browsers_see_the_conflict(site: Site, folder: Path) -> None:
    first, second = fields(site, "image 0.png"), fields(site, "image 0.png")
    assert save(site, "image 0.png", {**first, "text": "first"}).status_code == 200
    answer = save(site, "image 0.png", {**second, "text": "second"})
    assert answer.status_code == 409 and (folder / "image 0.txt").read_text(encoding="utf-8") == "first"
    assert ">first</pre>" in answer.text and "second</textarea>" in answer.text  # both are shown
    version = re.findall(r'name="version" value="([^"]*)"', answer.text)[0]
    assert save(site, "image 0.png", {**second, "text": "second", "version": version}).status_code == 200
    assert (folder / "image 0.txt").read_text(encoding="utf-8") == "second"


def test_only_the_change_that_the_page_shows_is_undone(site: Site, folder: Path) -> None:
    where = {"dir": "ä pictures"}

    def newest() -> str:
        found = re.search(r'id="newest-change" name="newest" value="([^"]*)"', site.get("/images/view", **where))
        assert found is not None
        return found[1]

    assert newest() == ""
    answer = save(site, "image 0.png", {**fields(site, "image 0.png"), "text": "first"})
    shown = json.loads(answer.headers["hx-trigger"])["images:changed"]["newest"]
    assert shown == newest()
    save(site, "image 1.png", {**fields(site, "image 1.png"), "text": "of another browser"})
    refused = site.client.post("/images/undo", params=where, data={"newest": shown})
    assert refused.status_code == 409 and code_of(refused.text) == "edit-conflict"
    assert (folder / "image 1.txt").read_text(encoding="utf-8") == "of another browser"
    assert site.client.post("/images/undo", params=where, data={"newest": newest()}).status_code == 200
    assert (folder / "image 1.txt").read_text(encoding="utf-8") != "of another browser" and newest() == shown


def test_a_caption_in_windows_text_is_shown_and_repaired(site: Site, folder: Path) -> None:
    (folder / "image 0.txt").write_bytes("schön".encode("cp1252"))
    assert rows(site)[0][2] == "p"
    given = fields(site, "image 0.png")
    assert given["text"] == "schön" and save(site, "image 0.png", given).status_code == 200
    assert (folder / "image 0.txt").read_bytes() == "schön".encode() and rows(site)[0][2] == ""


def test_only_caption_files_of_the_image_are_written(site: Site, folder: Path, tmp_path: Path) -> None:
    for file in ("image 1.txt", "../x.txt", "image 0.png", ""):
        answer = save(site, "image 0.png", {"file": file, "version": "missing", "text": "x"})
        assert answer.status_code == 422 and code_of(answer.text) == "caption-file-unknown"
    for name in ("../image.png", "missing.png", "x" * 5000, "image 0.txt"):
        assert code_of(site.client.get("/images/item", params={"dir": "ä pictures", "name": name}).text) == "no-image"
    large = save(site, "image 0.png", {**fields(site, "image 0.png"), "text": "x" * 70_000})
    assert code_of(large.text) == "caption-too-large" and len(rows(site)[0][1]) < 70


def test_links_lead_neither_captions_nor_images_out(site: Site, folder: Path, tmp_path: Path) -> None:
    secret = write_image(tmp_path / "secret.png")
    (tmp_path / "secret.txt").write_text("the secret", encoding="utf-8")
    os.symlink(secret, folder / "linked.png")
    os.symlink(tmp_path / "secret.txt", folder / "image 2.txt")
    for address, name in (("thumb", "linked.png"), ("item", "image 2.png")):
        answer = site.client.get(f"/images/{address}", params={"dir": "ä pictures", "name": name})
        assert code_of(answer.text) == "outside-folders" and "the secret" not in answer.text
    given = {"file": "image 2.txt", "version": "missing", "text": "overwritten"}
    assert code_of(save(site, "image 2.png", given).text) == "outside-folders"
    assert (tmp_path / "secret.txt").read_text(encoding="utf-8") == "the secret"
    assert site.client.get("/images/thumb", params={"dir": "ä pictures", "name": "image 0.png"}).status_code == 200


def test_a_folder_that_changes_is_read_again(site: Site, folder: Path) -> None:
    assert len(rows(site)) == 4
    write_image(folder / "new.png")
    assert len(rows(site)) == 5
    for path in folder.glob("*.png"):
        path.unlink()
    empty = site.client.get("/images/items", params={"dir": "ä pictures"}).json()
    assert empty["total"] == 0 and empty["note"]
    folder.joinpath("image 0.png").write_bytes(b"not an image")
    assert rows(site, only="unread")[0][0] == "image 0.png"
    picture = site.client.get("/images/thumb", params={"dir": "ä pictures", "name": "image 0.png"})
    assert picture.headers["content-type"] == "image/svg+xml" and picture.status_code == 200


def test_a_folder_is_read_as_a_recipe_says(site: Site, folder: Path) -> None:
    LISTINGS.forget()
    recipe = site.folder / "a recipe.yaml"
    recipe.write_text(
        "model: {family: sd15, name_or_path: x}\ntrain: {max_train_steps: 1}\n"
        f"data: {{path: '{folder.as_posix()}', resolution: 64, trigger_word: zwx, caption_extension: .cap}}\n",
        encoding="utf-8",
    )
    (folder / "image 0.cap").write_text("from the cap", encoding="utf-8")
    assert "a recipe.yaml" in site.get("/images/view", dir="ä pictures")
    text = site.get("/images/item", dir="ä pictures", recipe="a recipe.yaml", name="image 0.png")
    assert "zwx, from the cap" in text and "64 × 64" in text
    other = site.client.get("/images/view", params={"dir": "runs", "recipe": "a recipe.yaml"})
    assert other.status_code in (404, 422)
    assert (
        code_of(site.client.get("/images/view", params={"dir": "ä pictures", "resolution": "1"}).text) != "page-failed"
    )


def change(site: Site, address: str = "change", **fields: str) -> str:
    """Change captions, and return the answer when the change has ended."""
    answer = site.client.post(f"/images/{address}", params={"dir": "ä pictures"}, data=fields)
    for _ in range(200):
        if "badge-running" not in answer.text:
            break
        time.sleep(0.02)
        answer = site.client.get("/images/progress", params={"dir": "ä pictures"})
    return answer.text


def texts(folder: Path) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]


def test_many_captions_are_changed_and_undone_at_once(site: Site, folder: Path) -> None:
    before = texts(folder)
    shown = change(site, "preview", kind="replace", find="WOMAN", put="person")
    assert "2 of 4" in shown and "person, red dress" in shown and texts(folder) == before
    change(site, kind="replace", find="WOMAN", put="person")
    assert texts(folder) == ["person, red dress", "person, smile, outdoors", "car"]
    change(site, kind="prepend", find="zwx", scope="selected", names='["image 2.png", "image 3.png", "other.png"]')
    assert texts(folder) == ["person, red dress", "person, smile, outdoors", "zwx", "zwx, car"]
    change(site, kind="remove", find="smile", tag="smile", only="with")
    assert texts(folder)[1] == "person, outdoors"
    for _ in range(3):
        assert site.client.post("/images/undo", params={"dir": "ä pictures"}).status_code == 200
    assert texts(folder) == before


def test_a_caption_changed_by_hand_stays_at_undo(site: Site, folder: Path) -> None:
    change(site, kind="append", find="zwx")
    (folder / "image 0.txt").write_text("by hand", encoding="utf-8")
    answer = site.client.post("/images/undo", params={"dir": "ä pictures"})
    assert answer.status_code == 200 and "1" in answer.text
    assert texts(folder) == ["by hand", "woman, smile, outdoors", "car"]


def test_a_change_without_text_or_selection_is_refused(site: Site, folder: Path) -> None:
    assert code_of(change(site, kind="replace")) == "edit-empty"
    assert code_of(change(site, kind="remove", find=" , ")) == "edit-empty"
    assert code_of(change(site, kind="other", find="x")) == "edit-unknown"
    for names in ("", "[]", "{", "5"):
        assert code_of(change(site, kind="tidy", scope="selected", names=names)) == "selection-invalid"


def test_a_change_of_many_and_its_undoing_can_be_cancelled(
    site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, at = texts(folder), [2]

    def advance(self: Work, done: int, total: int) -> None:
        if done == at[0]:
            self.cancel()
        self.require_wanted()

    monkeypatch.setattr(Work, "advance", advance)
    monkeypatch.setattr("lora_rocm.ui.image_set.changes.FILES_AT_ONCE", 1)
    assert "badge-cancelled" in change(site, kind="append", find="zwx")
    assert [text.endswith("zwx") for text in texts(folder)] == [True, True, False]
    at[0] = 1
    assert "badge-cancelled" in change(site, "undo")
    assert [text.endswith("zwx") for text in texts(folder)] == [False, True, False]
    at[0] = 9
    change(site, "undo")
    assert texts(folder) == before


def test_tags_are_counted(site: Site, folder: Path) -> None:
    text = site.get("/images/tags", dir="ä pictures", trigger="Woman")
    counts = dict(re.findall(r'<th scope="row">([^<]*)</th><td class="num">(\d+)', text))
    assert counts == {"woman": "2", "red dress": "1", "smile": "1", "outdoors": "1", "car": "1"}
    assert "2 of 4" in text


def test_captions_in_json_are_not_changed(site: Site, folder: Path) -> None:
    (folder / "image 0.txt").unlink()
    (folder / "image 0.json").write_text('{"caption": "woman"}', encoding="utf-8")
    answer = site.client.post(
        "/images/change", params={"dir": "ä pictures", "ext": ".json .txt"}, data={"kind": "append", "find": "zwx"}
    )
    assert answer.status_code == 200
    assert (folder / "image 0.json").read_text(encoding="utf-8") == '{"caption": "woman"}'


def ended(site: Site, address: str, **query: str) -> str:
    """Return a piece of the page when its background work has ended."""
    for _ in range(300):
        text = site.get(f"/images/{address}", dir="ä pictures", **query)
        if "badge-running" not in text:
            return text
        time.sleep(0.02)
    raise AssertionError(text)


def test_buckets_and_skipped_images_are_those_of_check(site: Site, folder: Path) -> None:
    write_image(folder / "tall.png", (64, 128))
    write_image(folder / "tiny.png", (8, 8))
    (folder / "damaged.png").write_bytes(b"\x89PNG")
    text = ended(site, "checked", resolution="128")
    assert "5" in re.findall(r'class="figures">[^<]*?(\d+)\.', text)[0]
    assert re.findall(r'data-only="bucket:(\w+)"', text) == ["64x64", "64x128"]
    assert "tiny.png" in text and "damaged.png" in text
    assert [row[0] for row in rows(site, only="bucket:64x128", resolution=128)] == ["tall.png"]
    assert len(rows(site, only="bucket:9x9", resolution=128)) == 0


def test_images_that_occur_twice_are_found(site: Site, folder: Path) -> None:
    write_image(folder / "copy.png", colour=20).with_suffix(".png")  # as image 1
    with Image.open(folder / "image 2.png") as image:
        image.resize((48, 32)).save(folder / "scaled.jpg", quality=60)
    text = ended(site, "alike")
    groups = [re.findall(r'data-open-image="([^"]*)"', part) for part in text.split("<section")[1:]]
    assert groups == [["copy.png", "image 1.png"], ["image 2.png", "scaled.jpg"]]
    for name in ("copy.png", "scaled.jpg"):
        (folder / name).unlink()
    assert "data-open-image" in ended(site, "alike")  # as it was, until it is examined again
    site.get("/images/alike", dir="ä pictures", again="1")
    assert "data-open-image" not in ended(site, "alike")


def test_hostile_names_and_captions_are_shown_as_text(site: Site, folder: Path) -> None:
    names = ["<img src=x onerror=1>.png", "a&b#c.png", "%2e%2e.png", "a\u202egpj.png", "{{1234*5678}}.png", "a'b.png"]
    for name in names:
        write_image(folder / name).with_suffix(".txt").write_text(
            "<script>1</script>, {{1234*5678}}, \u202e", encoding="utf-8"
        )
    found = [row[0] for row in rows(site) if not row[0].startswith("image ")]
    assert len(found) == len(names) and not any("\u202e" in name for name in found)
    pieces = [site.get("/images/item", dir="ä pictures", name=name) for name in found]
    pieces += [site.get("/images/edit", dir="ä pictures", name=name) for name in found]
    pieces += [site.get("/images/tags", dir="ä pictures"), ended(site, "checked"), ended(site, "alike")]
    pieces += [site.get("/images/found"), change(site, "preview", kind="append", find="<b>x</b>")]
    for text in pieces:
        assert "<script>1" not in text and "<img src=x" not in text and "7006652" not in text and "<b>x" not in text
        assert "\u202e" not in re.sub("<textarea.*?</textarea>", "", text, flags=re.DOTALL)  # there it stays as it is


def test_saving_an_unchanged_caption_keeps_every_letter(site: Site, folder: Path) -> None:
    caption = "\n  \u202eשלום\u200f \u200d👩\u200d🎨 <b>&amp;</b> {{x}}\t\x07 \u2028end\n\n"
    (folder / "image 0.txt").write_bytes(caption.encode())
    given = fields(site, "image 0.png")
    assert save(site, "image 0.png", {**given, "text": html.unescape(given["text"])}).status_code == 200
    assert (folder / "image 0.txt").read_bytes() == caption.encode()


def test_a_folder_that_changes_while_it_is_read_is_read_again(
    site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As during an upload. Otherwise the new image is missing until the folder changes once more."""
    os.utime(folder, (1, 1))
    walk = listing.walk

    def late(*args: Any, **options: Any) -> Any:
        found = walk(*args, **options)
        write_image(folder / "late.png")
        return found

    monkeypatch.setattr(listing, "walk", late)
    assert len(rows(site)) == 4
    monkeypatch.setattr(listing, "walk", walk)
    assert len(rows(site)) == 5


def test_an_undo_of_a_change_that_was_undone_meanwhile_is_refused(site: Site, folder: Path) -> None:
    for text in ("one", "two"):
        save(site, "image 0.png", {**fields(site, "image 0.png"), "text": text})
    journal = ChangeJournal(site.context.edits, folder)
    newest = journal.version
    journal.undo(if_match=newest)
    with pytest.raises(UserError) as raised:  # of two clicks, which were both accepted before the first one was done
        journal.undo(if_match=newest)
    assert raised.value.code == "edit-conflict" and (folder / "image 0.txt").read_text(encoding="utf-8") == "one"


def test_a_caption_that_is_saved_twice_is_one_change(site: Site, folder: Path) -> None:
    given = {**fields(site, "image 0.png"), "text": "new"}
    assert [save(site, "image 0.png", given).status_code for _ in range(2)] == [200, 200]
    assert len(ChangeJournal(site.context.edits, folder).changes()) == 1
