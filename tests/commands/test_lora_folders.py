"""LoRA folders of other programs, and copies into them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_rocm.commands import lora_folders
from lora_rocm.commands.lora_folders import chosen_folder, copy_lora, found_lora_folders, remember_folder
from lora_rocm.errors import StorageError, UserError


def test_the_folders_of_the_programs_are_found(tmp_path: Path) -> None:
    places = [
        "ComfyUI/models/loras",
        "Documents/ComfyUI_windows_portable/ComfyUI/models/loras",
        "stable-diffusion-webui-forge/models/Lora",
        "Desktop/webui_forge_cu121/webui/models/Lora",
    ]
    for place in [*places, "notes/models/loras", "ComfyUI/models/vae"]:
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "forge.txt").write_text("no folder", encoding="utf-8")
    assert set(found_lora_folders(tmp_path)) == {(tmp_path / place).resolve() for place in places}
    assert found_lora_folders(tmp_path / "nobody") == []
    near = {(tmp_path / place).resolve() for place in (places[0], places[2])}
    assert set(found_lora_folders(tmp_path / "nobody", [tmp_path])) == near


def test_a_copy_never_replaces_anything(tmp_path: Path) -> None:
    source = tmp_path / "lora.safetensors"
    source.write_bytes(b"x" * 10_000_000)
    folder = tmp_path / "größe"
    folder.mkdir()
    assert copy_lora(source, folder, "a b.safetensors").read_bytes() == source.read_bytes()
    (folder / "link.safetensors").symlink_to(tmp_path / "nowhere")
    source.write_bytes(b"other")
    for name in ("a b.safetensors", "link.safetensors"):
        with pytest.raises(UserError) as caught:
            copy_lora(source, folder, name)
        assert caught.value.code == "file-exists"
    assert (folder / "a b.safetensors").stat().st_size == 10_000_000 and not (tmp_path / "nowhere").exists()


def test_a_full_disk_leaves_no_incomplete_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "lora.safetensors"
    source.write_bytes(b"x")

    def full(path: Path, pieces: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "no space")

    monkeypatch.setattr(lora_folders, "write_pieces", full)
    with pytest.raises(StorageError):
        copy_lora(source, tmp_path, "copy.safetensors")
    assert not (tmp_path / "copy.safetensors").exists()


@pytest.mark.parametrize("place", ["models/loras", "models/Lora", "ComfyUI/models/loras", "webui/models/Lora"])
def test_the_folder_of_a_program_stands_for_its_lora_folder(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path / "home"))
    program = tmp_path / "a program ü"
    (program / place).mkdir(parents=True)
    remember_folder(program)
    assert chosen_folder() == program / place


def test_the_choice_is_remembered_while_its_folder_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path / "home"))
    folder = tmp_path / "loras ü"
    folder.mkdir()
    assert chosen_folder() is None
    remember_folder(folder)
    assert chosen_folder() == folder
    folder.rmdir()
    assert chosen_folder() is None
    for wrong in (folder, Path("relative")):
        with pytest.raises(UserError) as caught:
            remember_folder(wrong)
        assert caught.value.code == "no-folder"
