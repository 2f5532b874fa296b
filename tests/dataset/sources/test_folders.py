import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_rocm.dataset.sources.folders import describes, read_caption, shown, some, source_folder, walk
from lora_rocm.errors import DataError
from lora_rocm.foundation.terminal_text import one_line
from tests.wording import saying, says, worded


def test_sub_folders_in_one_order(tmp_path: Path, make: SimpleNamespace) -> None:
    for name in ("b.png", "sub/a.png", "a ü [1].png", "Z.JPG", ".hidden.png", ".trash/c.png"):
        make.image(tmp_path / name)
    assert [relative for _, relative in walk(tmp_path, ".txt").images] == [
        "Z.JPG",
        "a ü [1].png",
        "b.png",
        "sub/a.png",
    ]


def test_captions_are_those_beside_the_image(tmp_path: Path, make: SimpleNamespace) -> None:
    first = make.image(tmp_path / "a.b.png", caption="one")
    second = make.image(tmp_path / "sub" / "a.b.png")
    found = walk(tmp_path, "txt")
    assert found.captions.of(first) == [tmp_path / "a.b.txt"] and found.captions.of(second) == []


def test_a_caption_without_an_image_is_said(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png", caption="x")
    assert walk(tmp_path, ".txt").notices == []
    (tmp_path / "lonely.txt").touch()
    assert walk(tmp_path, ".txt").notices == [worded("dataset/1-caption-file-has-no-image-of")]


def test_an_image_has_each_caption_file_of_a_list(tmp_path: Path, make: SimpleNamespace) -> None:
    every, some_of_them, none = (make.image(tmp_path / name) for name in ("a.png", "b.v2.png", "c.png"))
    for name in ("a.txt", "a.TAGS.txt", "a_1.txt", "a.caption", "b.v2.tags.Txt", "c.tags"):
        (tmp_path / name).touch()
    found = walk(tmp_path, (".txt", ".tags.txt", "_1.TXT", "caption"))
    assert [file.name for file in found.captions.of(every)] == ["a.txt", "a.TAGS.txt", "a_1.txt", "a.caption"]
    assert [file.name for file in found.captions.of(some_of_them)] == ["b.v2.tags.Txt"]
    assert found.captions.of(none) == []
    assert found.notices == [worded("dataset/1-image-has-a-tags-file-beside")]
    other_order = walk(tmp_path, ("_1.txt", ".txt"))
    assert [file.name for file in other_order.captions.of(every)] == ["a_1.txt", "a.txt"]
    assert [file.name for file in walk(tmp_path, ".tags.txt").captions.of(every)] == ["a.TAGS.txt"]
    (notice, *_) = walk(tmp_path, ".txt").notices
    assert notice == worded("dataset/3-caption-files-have-no-image-of")


def test_a_caption_file_without_an_image_is_said_once_of_a_list(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png", caption="x")
    for name in ("b.tags.txt", "b.txt", "left.tags.txt"):
        (tmp_path / name).touch()
    make.image(tmp_path / "left.png")
    notices = walk(tmp_path, (".txt", ".tags.txt"), exclude=("left.png",)).notices
    assert says(notices, "dataset/2-caption-files-have-no-image-of") and len(notices) == 2
    with pytest.raises(DataError, match=r"found 2 \.txt, 2 \.tags\.txt"):
        walk(tmp_path, (".txt", ".tags.txt"), exclude=("*.png",))


def test_a_caption_file_is_that_of_the_image_with_its_very_name(tmp_path: Path, make: SimpleNamespace) -> None:
    plain, numbered = make.image(tmp_path / "a.png", caption="x"), make.image(tmp_path / "a_2.png", caption="y")
    endings = (".txt", "_2.txt")
    found = walk(tmp_path, endings)
    assert found.captions.of(plain) == [tmp_path / "a.txt"]
    assert found.captions.of(numbered) == [tmp_path / "a_2.txt"] and found.notices == []
    assert walk(tmp_path, endings, exclude=("a_2.png",)).captions.of(plain) == [tmp_path / "a.txt"]
    numbered.unlink()
    found = walk(tmp_path, endings)
    assert found.captions.of(plain) == [tmp_path / "a.txt", tmp_path / "a_2.txt"] and found.notices == []


def test_captions_have_no_ending_of_images(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png", caption="x")
    for wrong in (".PNG", "_1.jpg"):
        with pytest.raises(DataError) as caught:
            walk(tmp_path, (".txt", wrong))
        assert wrong.lower() in caught.value.what and "data.caption_extension" in caught.value.where
        assert wrong.lower() in caught.value.fix


def test_what_runs_have_drawn_is_no_image_to_train_on(tmp_path: Path, make: SimpleNamespace) -> None:
    """As with ``data.path: .`` in the recipe's folder."""
    make.image(tmp_path / "a.png", caption="x")
    for name in ("one", "two"):
        run_dir = tmp_path / "runs" / name
        make.image(run_dir / "samples" / "step-00000002" / "00.png", caption="x")
        (run_dir / "recipe.yaml").touch()
    assert len(walk(tmp_path, ".txt").relatives) == 3, "a recipe alone makes no run"
    for name in ("one", "two"):
        (tmp_path / "runs" / name / "events.jsonl").touch()
    found = walk(tmp_path, ".txt")
    assert [relative for _, relative in found.images] == ["a.png"]
    (notice,) = found.notices
    assert says(notice, "dataset/2-run-directories-were-left-out") and "runs/one, runs/two" in notice
    with pytest.raises(DataError, check=saying("dataset/2-run-directories-were-left-out")):
        walk(tmp_path / "runs", ".txt")
    assert len(walk(tmp_path / "runs" / "one", ".txt").relatives) == 1, "who asks for it gets it"


def test_a_folder_named_like_an_image(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "x.png" / "inside.png")
    assert [relative for _, relative in walk(tmp_path, ".txt").images] == ["x.png/inside.png"]


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
def test_loops_of_links_end(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "data" / "a.png")
    make.image(tmp_path / "elsewhere" / "b.png")
    (tmp_path / "data" / "again").symlink_to(tmp_path / "data", target_is_directory=True)
    (tmp_path / "data" / "other").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "data" / "self.png").symlink_to(tmp_path / "data" / "self.png")
    relatives = [relative for _, relative in walk(tmp_path / "data", ".txt").images]
    assert relatives == ["a.png", "other/b.png", "self.png"]


def test_repeat_folders(tmp_path: Path, make: SimpleNamespace) -> None:
    for name in (
        "10_zibu_cat/a.png",
        "0_off/b.png",
        "plain/c.png",
        "3_x.png",
        "plain/5_deep/d.png",
        "20240131_sea/e.png",
    ):
        make.image(tmp_path / name)
    found = walk(tmp_path, ".txt")
    relatives = [relative for _, relative in found.images]
    assert relatives == ["10_zibu_cat/a.png", "20240131_sea/e.png", "3_x.png", "plain/5_deep/d.png", "plain/c.png"]
    repeats = found.repeat_folder("10_zibu_cat/a.png")
    assert (repeats.repeats, repeats.caption) == (10, "zibu cat")
    assert found.repeat_folder("20240131_sea/e.png").repeats == 1
    assert found.repeat_folder("3_x.png").repeats == 1 and found.repeat_folder("plain/5_deep/d.png").repeats == 5
    assert found.notices == [
        worded("dataset/folder-0-off-left-out-kohyas-number"),
        worded("dataset/folder-10-zibu-cat-each-image-is"),
        worded("dataset/folder-plain-5-deep-each-image-is"),
        worded("dataset/3-images-lie-outside-the-number-name"),
    ]


def test_images_outside_number_name_folders_are_named(tmp_path: Path, make: SimpleNamespace) -> None:
    for name in ("img/1_zibu/a.png", "log/b.png", "preview.png"):
        make.image(tmp_path / name)
    repeats, outside = walk(tmp_path, ".txt").notices
    assert "once" in repeats and "img/1_zibu" in repeats
    assert all(name in outside for name in ("log/b.png", "preview.png", "exclude")) and "a.png" not in outside
    assert len(walk(tmp_path / "img", ".txt").notices) == 1, "the control: there are none"
    assert not walk(tmp_path / "log", ".txt").notices, "and without such folders nothing is outside"


def test_an_empty_folder_says_what_is_there(tmp_path: Path) -> None:
    for name in ("a.cr2", "b.cr2", "c.mov", "d.txt"):
        (tmp_path / name).touch()
    with pytest.raises(DataError) as caught:
        walk(tmp_path, ".txt")
    assert caught.value.code == "data-folder-empty"
    assert "2 .cr2, 1 .mov, 1 .txt" in caught.value.what and str(tmp_path) in caught.value.where


def test_a_missing_folder_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        source_folder("photos/mine", 0)
    assert str(tmp_path / "photos" / "mine") in caught.value.what and "photos/mine" in caught.value.where
    (tmp_path / "a.png").touch()
    with pytest.raises(DataError, check=saying("dataset/is-a-file")):
        source_folder("a.png", 0)


def test_the_images_of_the_demo_ship_with_the_package() -> None:
    assert len(walk(source_folder("builtin:demo", 0), ".txt").relatives) >= 10
    with pytest.raises(DataError) as caught:
        source_folder("builtin:demos", 0)
    assert "builtin:demo" in caught.value.fix


@pytest.mark.parametrize("content", [b"a  red\r\nhouse \n", b"\xef\xbb\xbfa red house"])
def test_a_caption_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert one_line(read_caption(tmp_path / "a.txt")) == "a red house"


def test_camera_names_describe_nothing() -> None:
    assert not any(map(describes, ["IMG 0042", "DSC01234", "20240131 120000", "PXL 2024", "image (3)", "7", ""]))
    assert all(map(describes, ["red cat", "zibu 03", "a", "image of a cat"]))


def test_names() -> None:
    assert some(["a", "b", "c"]) == "a, b, c" and some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert shown(Path("a\udcff.png")) == "a\\udcff.png" and shown("ü") == "ü"
