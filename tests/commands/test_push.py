"""Publishing a LoRA: the folder, the card, the upload to a fake hub, and every fault."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from ruamel.yaml import YAML

from lora_rocm.commands.push import PushOptions, push, render
from lora_rocm.errors import LoraRocmError
from lora_rocm.families.registry import FAMILIES
from lora_rocm.model_files.header import read_header
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.choose_run_dir import open_recipe
from tests.commands.published_run import (
    SECRET_CAPTION,
    SECRET_FOLDER,
    lora_bytes,
    write_published_run,
    write_text_adapter,
)

REPO = "me/zibu"
BASE = "stabilityai/stable-diffusion-xl-base-1.0"


@dataclass
class FakeHub:
    """The hub's library. It records its calls. ``fails``: method -> the exception that it raises."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    fails: dict[str, Exception] = field(default_factory=dict)
    uploaded: dict[str, bytes] = field(default_factory=dict)

    def _called(self, name: str, options: dict[str, Any]) -> None:
        self.calls.append((name, options))
        if name in self.fails:
            raise self.fails[name]

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        self._called("create_repo", options)
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"me/{repo_id}")

    def upload_folder(self, *, repo_id: str, folder_path: Path, **options: Any) -> Any:
        self._called("upload_folder", {"repo_id": repo_id, **options})
        files = [path for path in Path(folder_path).rglob("*") if path.is_file()]
        self.uploaded = {path.relative_to(folder_path).as_posix(): path.read_bytes() for path in files}
        return SimpleNamespace(repo_url=f"https://huggingface.co/{repo_id}")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda **_: fake)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_abcdefghijklmnop")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return fake


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return write_published_run(tmp_path / "Läufe 1" / "run")


def dry(source: Path, folder: Path, **options: Any) -> tuple[dict[str, Any], str]:
    """The front matter and the card of a dry run."""
    push(source, REPO, PushOptions(dry_run=True, output=folder, **options))
    _, front, card = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return YAML(typ="safe").load(front), card


def code_of(work: Callable[[], object]) -> str:
    with pytest.raises(LoraRocmError) as raised:
        work()
    return raised.value.code


def answer(status: int) -> HfHubHTTPError:
    return HfHubHTTPError("no", response=SimpleNamespace(headers={}, request=None, status_code=status))  # type: ignore[arg-type]


def test_a_dry_run_writes_the_folder_without_network_and_token(run_dir: RunDir, tmp_path: Path) -> None:
    front, card = dry(run_dir.path, tmp_path / "out", base_model=BASE, license="openrail++")
    assert front["base_model"] == BASE and front["license"] == "openrail++" and front["instance_prompt"] == "zibu"
    assert {"lora", "text-to-image", "template:diffusion-lora", "sdxl"} <= set(front["tags"])
    assert front["pipeline_tag"] == "text-to-image" and front["library_name"] == "diffusers"
    shown = {row["output"]["url"]: row["text"] for row in front["widget"]}
    assert shown == {"images/00.png": "a zibu", "images/01.png": "a <b>zibu</b> & co"}, "not the control prompts"
    assert all((tmp_path / "out" / place).is_file() for place in shown)
    for program in ("**ComfyUI:**", "**Forge and A1111:**", "**diffusers:**", "`<lora:", BASE, REPO):
        assert program in card
    assert "| steps | 40 |" in card and "rank 16" in card and "<b>" not in card


def test_a_license_in_words_is_in_the_text(tmp_path: Path) -> None:
    run_dir = write_published_run(tmp_path / "run", "output.license=CC BY 4.0")
    front, card = dry(run_dir.path, tmp_path / "out")
    assert front["license"] == "other" and "CC BY 4.0" in card


def test_nothing_private_is_published(run_dir: RunDir, tmp_path: Path) -> None:
    recipe = run_dir.recipe.read_text(encoding="utf-8")
    private = "a zibu from /home/zoe/lora/x with hf_abcdefghijklmnop"
    run_dir.recipe.write_text(recipe.replace("- a zibu\n", f"- {private}\n"), encoding="utf-8")
    assert private in open_recipe(run_dir.path, FAMILIES)[1].sample.prompts
    info = PngInfo()
    info.add_text("parameters", SECRET_CAPTION)
    Image.new("RGB", (8, 8), "red").save(run_dir.samples_at(40) / "00.png", pnginfo=info)
    dry(run_dir.path, tmp_path / "out")
    written = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    for text in (SECRET_CAPTION, SECRET_FOLDER, "hf_abcdef", "zoe", "Zoë", "ot_config", "thumbnail", "Läufe", "demo"):
        assert text.encode() not in written, text
    assert b"base.safetensors" in written and b"0x" + b"ab" * 32 in written


def test_the_copy_has_the_tensors_of_the_file(run_dir: RunDir, tmp_path: Path) -> None:
    dry(run_dir.path, tmp_path / "out")
    given, copy = read_header(run_dir.lora), read_header(tmp_path / "out" / run_dir.lora.name)
    assert copy.shapes == given.shapes and copy.metadata["ss_network_dim"] == "4"
    data = [header.path.read_bytes()[min(each.begin for each in header.tensors.values()) :] for header in (given, copy)]
    assert data[0] == data[1]


def test_a_lora_file_alone_is_published_with_what_its_header_says(tmp_path: Path) -> None:
    (tmp_path / "other.safetensors").write_bytes(lora_bytes(rank=8))
    front, card = dry(tmp_path / "other.safetensors", tmp_path / "out")
    assert "base_model" not in front and "widget" not in front and "sdxl" in front["tags"]
    assert "| 8 |" in card and "BASE_MODEL" in card


def test_a_language_model_is_published_where_peft_and_vllm_search_it(tmp_path: Path) -> None:
    folder = write_text_adapter(tmp_path / "peft" / "model", rank=24)
    front, card = dry(folder, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md", "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_bytes())
    assert config["base_model_name_or_path"] == "base" and config["r"] == 24
    assert front["pipeline_tag"] == "text-generation" and front["library_name"] == "peft"
    assert "--max-lora-rank 32" in card and "PeftModel.from_pretrained" in card and "diffusers" not in card


def test_a_new_repository_is_private_unless_asked(run_dir: RunDir, hub: FakeHub) -> None:
    found = push(run_dir.path, "zibu", PushOptions())
    assert hub.calls[0] == ("create_repo", {"private": True, "repo_type": "model", "exist_ok": False})
    assert hub.calls[1][1]["repo_id"] == REPO and found.is_private and found.url == f"https://huggingface.co/{REPO}"
    assert hub.uploaded.keys() == {file.name for file in found.files} and "README.md" in hub.uploaded
    assert found.url in render(found) and found.folder is None
    hub.calls.clear()
    assert not push(run_dir.path, REPO, PushOptions(public=True)).is_private and not hub.calls[0][1]["private"]
    hub.calls.clear()
    assert push(run_dir.path, REPO, PushOptions(update=True)).is_private is None
    assert [name for name, _ in hub.calls] == ["upload_folder"]


@pytest.mark.parametrize(
    ("method", "error", "code"),
    [
        ("create_repo", LocalTokenNotFoundError("no"), "push-no-token"),
        ("create_repo", answer(401), "push-no-token"),
        ("create_repo", answer(403), "push-forbidden"),
        ("create_repo", answer(409), "push-exists"),
        ("create_repo", answer(503), "push-refused"),
        ("create_repo", OfflineModeIsEnabled("no"), "push-offline"),
        ("create_repo", ConnectionError("no"), "push-offline"),
        ("upload_folder", TimeoutError("no"), "push-offline"),
        ("upload_folder", answer(500), "push-refused"),
        ("upload_folder", ValueError("Invalid metadata in README.md.\n- license"), "push-card"),
        ("upload_folder", RuntimeError("Error while uploading"), "push-refused"),
    ],
)
def test_a_failure_of_the_hub_has_a_code(
    method: str, error: Exception, code: str, run_dir: RunDir, hub: FakeHub
) -> None:
    hub.fails[method] = error
    with pytest.raises(LoraRocmError) as raised:
        push(run_dir.path, REPO, PushOptions())
    assert raised.value.code == code and raised.value.fix
    assert ("--update" in raised.value.fix) == (method == "upload_folder" or code == "push-exists")


def test_an_update_of_a_missing_repository_has_a_code(run_dir: RunDir, hub: FakeHub) -> None:
    hub.fails["upload_folder"] = answer(404)
    assert code_of(lambda: push(run_dir.path, REPO, PushOptions(update=True))) == "push-missing"


def test_token_and_network_are_checked_before_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert code_of(lambda: push(tmp_path, REPO, PushOptions())) == "push-offline"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert code_of(lambda: push(tmp_path, REPO, PushOptions())) == "push-no-token"


def flip(run_dir: RunDir) -> None:
    content = bytearray(run_dir.lora.read_bytes())
    content[-1] ^= 1
    run_dir.lora.write_bytes(content)


def fall_behind(run_dir: RunDir) -> None:
    """Let the file be of an earlier step than the run."""
    result = json.loads(run_dir.result.read_bytes())
    result["exports"][0] |= {"updates": 20, "checkpoint": "other"}
    run_dir.result.write_text(json.dumps(result), encoding="utf-8")


FAULTS: dict[str, tuple[Callable[[RunDir], object], str]] = {
    "a flipped bit": (flip, "weights-damaged"),
    "cut short": (lambda run: os.truncate(run.lora, 1000), "weights-damaged"),
    "deleted": (lambda run: run.lora.unlink(), "weights-damaged"),
    "not finished": (lambda run: run.result.unlink(), "push-unfinished"),
    "of an earlier step": (fall_behind, "push-unfinished"),
    "no recipe": (lambda run: run.recipe.unlink(), "run-without-recipe"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_or_unfinished_run_is_not_published(name: str, run_dir: RunDir, hub: FakeHub) -> None:
    harm, code = FAULTS[name]
    harm(run_dir)
    assert code_of(lambda: push(run_dir.path, REPO, PushOptions())) == code
    assert hub.calls == []


def test_a_damaged_file_is_not_published(tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "x.safetensors"
    file.write_bytes(lora_bytes()[:-4])
    assert code_of(lambda: dry(file, out)) == "weights-damaged"
    file.write_bytes(b"not one")
    assert code_of(lambda: dry(file, out)) == "weights-damaged"
    assert code_of(lambda: dry(tmp_path / "nowhere", out)) == "no-run"
    (tmp_path / "empty").mkdir()
    assert code_of(lambda: dry(tmp_path / "empty", out)) == "push-not-lora"
    assert not out.exists()


def test_a_damaged_preview_is_left_away(run_dir: RunDir, tmp_path: Path) -> None:
    (run_dir.samples_at(40) / "00.png").write_bytes(b"\x89PNG\r\n\x1a\n torn")
    front, _ = dry(run_dir.path, tmp_path / "out")
    assert [row["output"]["url"] for row in front["widget"]] == ["images/01.png"]


def test_a_full_disk_leaves_nothing(run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, pieces: object) -> None:
        raise OSError(errno.ENOSPC, "full", str(path))

    monkeypatch.setattr("lora_rocm.model_files.public_metadata.write_pieces", full)
    assert code_of(lambda: dry(run_dir.path, tmp_path / "out")) == "disk-full"
    assert [path.name for path in tmp_path.iterdir()] == ["Läufe 1"]


def test_a_copy_that_reads_back_differently_is_noticed(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad(path: Path, pieces: Any) -> None:
        content = bytearray(b"".join(pieces))
        content[-1] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr("lora_rocm.model_files.public_metadata.write_pieces", bad)
    assert code_of(lambda: dry(run_dir.path, tmp_path / "out")) == "written-differs"


@pytest.mark.parametrize(
    ("repo", "options", "code"),
    [
        ("me/my/zibu", PushOptions(), "push-name"),
        ("zoë/x", PushOptions(), "push-name"),
        ("me/a--b", PushOptions(), "push-name"),
        ("me/" + "x" * 100, PushOptions(), "push-name"),
        (REPO, PushOptions(dry_run=True), "push-output"),
        (REPO, PushOptions(output=Path(__file__)), "push-output"),
        (REPO, PushOptions(output=Path(__file__).parent), "push-output"),
        (REPO, PushOptions(public=True, update=True), "push-update"),
        (REPO, PushOptions(base_model="C:\\x"), "push-base"),
        (REPO, PushOptions(base_model="models/x.safetensors"), "push-base"),
        (REPO, PushOptions(license="my own"), "push-license"),
    ],
)
def test_wrong_options_have_codes(repo: str, options: PushOptions, code: str, tmp_path: Path) -> None:
    assert code_of(lambda: push(tmp_path, repo, options)) == code
