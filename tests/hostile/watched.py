"""A process that reads hostile files under an audit hook, and reports every other action.

    python -m tests.hostile.watched FOLDER

All imports are done, and sound files are read, before the hook is installed. Then the files in FOLDER/hostile
are read; FOLDER/own is the only place where anything may be written. One JSON object on standard output: actions that
no reader may take, the results of the reads, and the rise of peak memory in bytes. It has the same for ``misbehave``,
the control.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_rocm.base_models.meta_components import meta_copy
from lora_rocm.errors import LoraRocmError
from tests.hostile.attacks import MARK

STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "pty.spawn")
NETWORK = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request")
CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.symlink", "os.truncate", "os.chmod")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """The audit hook: it only records, so that the attacked code runs as usual."""

    def __init__(self, folder: Path) -> None:
        self.hostile, self.own = str(folder / "hostile"), str(folder / "own")
        self.seen: list[str] = []
        self.on = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        self.on = False  # actions in here do not count as events
        try:
            if self._is_wrong(event, arguments):
                self.seen.append(f"{event} {arguments!r:.200}")
        finally:
            self.on = True

    def _is_wrong(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event in STARTS or event in NETWORK:
            return True
        if event == "pickle.find_class":
            return not _copies_a_module()
        if event in ("compile", "exec", "import", "ctypes.dlopen"):
            code = arguments[0] if arguments else None
            text = f"{arguments!r} {getattr(code, 'co_filename', '')} {getattr(code, 'co_consts', '')}"
            return MARK in text or self.hostile in text
        if event == "open":
            path, mode, flags = arguments
            writes = bool((flags or 0) & WRITING) or any(letter in (mode or "") for letter in "wax+")
            return writes and not self._may_write(path)
        return event in CHANGES and not self._may_write(arguments[0])

    def _may_write(self, path: Any) -> bool:
        if isinstance(path, int) or path in (None, os.devnull):
            return True
        return os.path.abspath(os.fsdecode(path)).startswith(self.own)


def _copies_a_module() -> bool:
    """Whether the pickle was written a moment ago by the only function that copies modules through pickle."""
    frames = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe()))
    return any(code is meta_copy.__code__ for code in frames)


def readers(folder: Path) -> dict[str, Callable[[Path], Any]]:
    """The readers for the files of each kind, by the first part of their names."""
    import torch

    from lora_rocm.adapters.lora_files.lora_reader import read_lora
    from lora_rocm.base_models.loading import BaseSource
    from lora_rocm.commands.status import status
    from lora_rocm.dataset.images.image_io import UnreadableImage, decode, read_header
    from lora_rocm.dataset.rows import hf_datasets
    from lora_rocm.dataset.sources.sample_image import load_image
    from lora_rocm.dataset.sources.scan import scan
    from lora_rocm.families.base import family_for
    from lora_rocm.families.common.clip import load_tokenizer
    from lora_rocm.recipe.load import load_recipe
    from lora_rocm.recipe.schema import DataSection
    from lora_rocm.recipe.source_sections import DataSource
    from lora_rocm.report.report import write_report
    from lora_rocm.rundir.layout import RunDir

    family = family_for(load_recipe("demo.yaml").recipe)
    components = {"unet": family.source.skeleton("unet")}

    def as_image(path: Path) -> None:
        with contextlib.suppress(UnreadableImage):
            read_header(path)
            decode(path.read_bytes())

    def as_model(path: Path) -> None:
        changed = family.recipe.model.model_copy(update={"name_or_path": str(path)})
        other = family_for(family.recipe.model_copy(update={"model": changed}))
        with contextlib.suppress(LoraRocmError):
            load_tokenizer(path / "tokenizer")
        source: BaseSource = other.source
        for name in ("vae", "text_encoder"):
            source.load(name, torch.float32, torch.device("cpu"))

    def as_folder(path: Path) -> None:
        found = scan(DataSection(path=str(path), resolution=8, bucket_step=8))
        for sample in found.samples:
            load_image(sample)

    def as_dataset(path: Path) -> None:
        (source,) = DataSection(sources=(DataSource(dataset=str(path)),)).resolved_sources()
        for row, _ in hf_datasets.rows_of(source):
            with contextlib.suppress(hf_datasets.UnreadableCell):
                hf_datasets.image_in(row)

    def as_run(path: Path) -> None:
        copy = Path(shutil.copytree(path, Path(tempfile.mkdtemp(dir=folder / "own")) / "run"))
        status(RunDir(copy))
        write_report(RunDir(copy))

    return {
        "recipe": load_recipe,
        "image": as_image,
        "lora": lambda path: read_lora(family, components, path),
        "model": as_model,
        "folder": as_folder,
        "dataset": as_dataset,
        "run": as_run,
    }


def forget_peak() -> None:
    """Count the peak of memory from here on (Linux alone can)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes() -> int:
    """The most memory that this process has had since then; 0 where the system does not report it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def read_all(folder: Path, known: dict[str, Callable[[Path], Any]]) -> dict[str, str]:
    """The result of reading each file of a folder: "read", or the code of the refusal."""
    ended = {}
    for path in sorted(folder.iterdir()):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                known[path.name.partition("-")[0]](path)
                ended[path.name] = "read"
            except LoraRocmError as error:
                ended[path.name] = error.code
    return ended


def main() -> None:
    """Read the sound files, then the others under the hook."""
    folder = Path(sys.argv[1])
    known = readers(folder)
    sound = read_all(folder / "sound", known)
    forget_peak()
    before = peak_bytes()
    watch = Watch(folder)
    sys.addaudithook(watch)
    watch.on = True
    ended = read_all(folder / "hostile", known)
    told = {"seen": list(watch.seen), "sound": sound, "ended": ended, "grown_bytes": peak_bytes() - before}
    watch.seen.clear()
    misbehave(folder)
    watch.on = False
    control = {"control_seen": watch.seen, "control_grown_bytes": peak_bytes() - before}
    sys.stdout.write(json.dumps({**told, **control}) + "\n")


def misbehave(folder: Path) -> None:
    """Each thing that the hook is there to see."""
    import pickle
    import socket
    import subprocess

    from tests.hostile.attacks import payload, pickled

    exec(compile(payload(folder), "x", "exec"))
    pickle.loads(pickled(folder))
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    with contextlib.suppress(OSError), socket.socket() as other:
        other.settimeout(0.2)
        other.connect(("127.0.0.1", 9))
    (folder / "outside").write_text("x", encoding="utf-8")
    os.rename(folder / "outside", folder / "moved")
    block = bytearray(700 << 20)
    block[::4096] = b"x" * len(block[::4096])


if __name__ == "__main__":
    main()
