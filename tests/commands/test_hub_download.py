"""Offers and downloads of the hub, by a local server that imitates it, in real child processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.base_models.hub_offer import offer
from lora_rocm.commands import hub_download
from lora_rocm.commands.hub_download import download_base, offered
from lora_rocm.errors import LoraRocmError, StoppedError
from lora_rocm.model_files.hub_cache import hub_cache, snapshot_of

COMMIT = "0123456789012345678901234567890123456789"
CONTENT: dict[str, bytes] = {
    "model_index.json": b"{}",
    "unet/config.json": b"{}",
    "unet/diffusion_pytorch_model.fp16.safetensors": b"u" * 600_000,
    "unet/diffusion_pytorch_model.safetensors": b"U" * 1_200_000,
    "vae/config.json": b"{}",
    "vae/diffusion_pytorch_model.fp16.safetensors": b"v" * 100_000,
    "tokenizer/vocab.json": b"{}",
    "safety_checker/config.json": b"{}",
    "safety_checker/model.safetensors": b"s" * 100,
    "README.md": b"a card",
}
WANTED = [name for name in CONTENT if not name.startswith(("safety", "README")) and not name.endswith("l.safetensors")]


@dataclass
class Hub:
    """A server like the hub. ``asked``: (method, file) of the requests of files.

    ``cuts``: how many answers break off. ``waits``: whether large files wait for ``go``.
    """

    endpoint: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    cuts: int = 0
    waits: bool = False
    go: threading.Event = field(default_factory=threading.Event)
    token: str = "hf_right"


def handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:  # noqa: C901  # a class with its answers
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, body: bool) -> None:
            path = self.path.partition("?")[0]
            repo = next((name for name in ("someone/open", "someone/gated", "someone/odd") if name in path), None)
            if repo is None:
                return self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, body)
            files = {"model.ckpt": b"x"} if repo == "someone/odd" else CONTENT
            if "/tree/" in path:
                tree = [{"type": "file", "path": n, "size": len(c), "oid": _oid(n)} for n, c in files.items()]
                return self._send(200, json.dumps(tree).encode(), {}, body)
            if "/api/models/" in path:
                siblings = [{"rfilename": n, "size": len(c), "blobId": _oid(n)} for n, c in files.items()]
                card = {"license": "other", "license_name": "a-licence", "license_link": "https://example.org/l"}
                gated = "auto" if repo == "someone/gated" else False
                info = {"id": repo, "sha": COMMIT, "siblings": siblings, "gated": gated, "cardData": card}
                return self._send(200, json.dumps(info).encode(), {}, body)
            name = path.partition(f"/resolve/{COMMIT}/")[2] or path.partition("/resolve/main/")[2]
            hub.asked.append((self.command, name))
            if repo == "someone/gated" and self.headers.get("Authorization") != f"Bearer {hub.token}":
                code = 403 if self.headers.get("Authorization") else 401
                return self._send(code, b"", {"X-Error-Code": "GatedRepo"}, body)
            return self._file(name, files[name], body)

        def _file(self, name: str, content: bytes, body: bool) -> None:
            known = {"X-Repo-Commit": COMMIT, "ETag": f'"{_oid(name)}"', "Accept-Ranges": "bytes"}
            begin, total = 0, len(content)
            if (asked := self.headers.get("Range")) is not None:
                begin = int(asked.removeprefix("bytes=").partition("-")[0])
            status = 206 if asked is not None else 200
            if status == 206:
                known["Content-Range"] = f"bytes {begin}-{total - 1}/{total}"
            if body and total > 50_000 and hub.waits:
                self._begin(status, total - begin, known)
                self.wfile.write(content[begin : begin + 50_000])
                self.wfile.flush()
                hub.go.wait(30)
                self.wfile.write(content[begin + 50_000 :])
                return None
            if body and total > 50_000 and hub.cuts > 0:
                hub.cuts -= 1
                self._begin(status, total - begin, known)
                self.wfile.write(content[begin : begin + 30_000])
                self.close_connection = True
                return None
            return self._send(status, content[begin:], known, body)

        def _begin(self, status: int, size: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(size))
            self.end_headers()

        def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
            self._begin(status, len(content), headers)
            if body:
                self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    return Handler


def _oid(name: str) -> str:
    return name.encode().hex().ljust(40, "0")[:40]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(made))
    server.daemon_threads = True
    made.endpoint = f"http://127.0.0.1:{server.server_port}"
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub home"))
    monkeypatch.setenv("HF_ENDPOINT", made.endpoint)
    # Offers are asked in this process, which is faster; downloads are real child processes
    constants = {
        "HF_HUB_OFFLINE": False,
        "ENDPOINT": made.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": made.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(hub_cache()),
    }
    for name, value in constants.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", made.endpoint)
    monkeypatch.setattr(hub_download, "ask", lambda job, answer, env: offer(job.repo))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield made
    made.go.set()
    server.shutdown()
    server.server_close()


def code_of(call: Any) -> str:
    with pytest.raises(LoraRocmError) as caught:
        call()
    return caught.value.code


def test_an_offer_names_files_sizes_and_terms(hub: Hub) -> None:
    found = offered("someone/open")
    assert [file.name for file in found.files] == sorted(WANTED) and found.num_bytes == 700_008
    assert found.missing_bytes == found.num_bytes and found.may_download and not found.has_terms and not found.has_token
    assert (found.licence, found.licence_address) == ("a-licence", "https://example.org/l")
    assert not hub.asked, "nothing is downloaded"
    assert code_of(lambda: offered("someone/else")) == "hub-unknown"
    assert code_of(lambda: offered("someone/odd")) == "hub-no-model"
    assert code_of(lambda: offered("../x")) == "hub-unknown"


def test_terms_have_to_be_accepted_first(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = offered("someone/gated")
    assert not found.may_download and not found.has_token
    assert code_of(lambda: download_base(found, lambda done, total: None)) == "hub-gated"
    monkeypatch.setenv("HF_TOKEN", "hf_other")  # terms are not accepted with this account: 403
    found = offered("someone/gated")
    assert not found.may_download and found.has_token
    assert code_of(lambda: download_base(found, lambda done, total: None)) == "hub-gated"
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert offered("someone/gated").may_download
    assert not any("hf_right" in path.read_text("utf-8", "replace") for path in _files()), "a token is never stored"


def test_a_download_reports_its_bytes_and_survives_a_cut(hub: Hub) -> None:
    found, steps = offered("someone/open"), list[tuple[int, int]]()
    hub.cuts = 2
    folder = download_base(found, lambda done, total: steps.append((done, total)))
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {*WANTED}
    assert all((folder / name).read_bytes() == CONTENT[name] for name in WANTED)
    assert steps[-1] == (found.num_bytes, found.num_bytes) and [*steps] == sorted(steps)
    assert offered("someone/open").missing_bytes == 0
    # Again: nothing is fetched
    hub.asked.clear()
    download_base(found, lambda done, total: None)
    assert not [name for method, name in hub.asked if method == "GET"]


def test_a_cancelled_download_leaves_nothing_half_written_and_goes_on_later(hub: Hub) -> None:
    found = offered("someone/open")
    hub.waits = True

    def stop(done: int, total: int) -> None:
        if (folder / "unet/config.json").exists() and any(len(CONTENT[name]) > 50_000 for name in _got(hub)):
            raise StoppedError("cancelled", "")

    folder = snapshot_of("someone/open", COMMIT)
    assert code_of(lambda: download_base(found, stop)) == "cancelled"
    assert not [path for path in _files() if path.name.endswith(".incomplete")]
    kept = {name for name in WANTED if (folder / name).exists()}
    hub.waits = False
    hub.go.set()
    hub.asked.clear()
    assert download_base(found, lambda done, total: None) == folder
    assert kept and not kept & _got(hub) and all((folder / name).exists() for name in WANTED)


def test_a_full_disk_is_said_before_the_download(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = offered("someone/open")
    monkeypatch.setattr(hub_download, "SPARE_BYTES", 1 << 60)
    assert code_of(lambda: download_base(found, lambda done, total: None)) == "disk-full"
    assert not [name for method, name in hub.asked if method == "GET"]


def test_a_disk_that_fills_up_is_no_fault_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_rocm.base_models import hub as hub_module

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub_module, "snapshot_download", full)
    assert code_of(lambda: hub_module.fetch("someone/open", ["*"])) == "disk-full"


def test_without_a_network_it_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a real child process."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert code_of(lambda: offered("someone/open")) == "hub-unreachable"


def _got(hub: Hub) -> set[str]:
    """The files that were downloaded."""
    return {name for method, name in list(hub.asked) if method == "GET"}


def _files() -> list[Path]:
    return [path for path in hub_cache().parent.rglob("*") if path.is_file()]
