"""The sources that the probe reads. Tests can replace all of them.

Nothing here raises an error for a missing fact; the fact is recorded as ``Unread``. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lora_rocm.errors import StorageError
from lora_rocm.foundation.files import write_atomic
from lora_rocm.foundation.json_text import object_in
from lora_rocm.foundation.safe_path import without_current_folder
from lora_rocm.hardware.app_dir import app_dir
from lora_rocm.hardware.facts import NUMBERS, System, Unread

READ_BYTES = 1 << 16
KILL_WAIT_S = 2.0
# Variables that would hide or rename GPUs in the output of a tool.
HIDING = (
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HSA_OVERRIDE_GFX_VERSION",
)


class WindowsRegistry(Protocol):
    """Interface to the Windows registry below HKEY_LOCAL_MACHINE."""

    def values(self, key: str) -> dict[str, Any]:
        """Return the values of a registry key by name.

        Raises:
            OSError: the key is missing or may not be read.
        """

    def keys(self, key: str) -> list[str]:
        """Return the names of a key's subkeys.

        Raises:
            OSError: the key is missing or may not be read.
        """


class NoRegistry:
    """A registry without keys, for systems other than Windows."""

    def values(self, key: str) -> dict[str, Any]:
        raise FileNotFoundError(2, "there is no registry", key)

    def keys(self, key: str) -> list[str]:
        raise FileNotFoundError(2, "there is no registry", key)


def run_tool(command: Sequence[str], timeout_s: float) -> str:
    """Run a tool and return its standard output. On a timeout, the tool and its children are killed.

    Raises:
        OSError: the tool cannot be started, failed, or timed out (``TimeoutError``).
    """
    seen = {name: value for name, value in os.environ.items() if name not in HIDING}
    env = without_current_folder(seen) | {"LC_ALL": "C"}
    apart: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        apart = {"creationflags": subprocess.CREATE_NO_WINDOW}
    tool: subprocess.Popen[bytes] = subprocess.Popen(
        list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, **apart
    )
    try:
        output, errors = tool.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None
    finally:
        if tool.poll() is None:
            _kill_family(tool)
    if tool.returncode:
        said = errors.decode("utf-8", "replace").strip().splitlines()
        raise OSError(f"exit code {tool.returncode}" + (f": {said[-1][:200]}" if said else ""))
    return output.decode("utf-8", "replace")


def tool_lines(run: Callable[[Sequence[str], float], str], command: Sequence[str], timeout_s: float) -> list[str]:
    """Run a tool with ``run`` and return the lines that it prints; empty if the tool is missing, fails or times out."""
    try:
        return run(command, timeout_s).splitlines()
    except OSError:
        return []


def _kill_family(tool: subprocess.Popen[bytes]) -> None:
    """Kill a tool and its children by system commands, because psutil may not be installed yet."""
    command = ["taskkill", "/T", "/F", "/PID", str(tool.pid)]
    if sys.platform != "win32":
        command = ["sh", "-c", f"kill -9 -{tool.pid}"]  # it leads its own session and process group
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=KILL_WAIT_S)
    tool.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        tool.communicate(timeout=KILL_WAIT_S)


def _disk(path: Path) -> tuple[int, int]:
    usage = shutil.disk_usage(path)
    return usage.total, usage.free


def _no_memory_status() -> tuple[int, int, int]:
    raise OSError("only Windows reports it")


def _no_version(path: Path) -> str | None:
    return None


@dataclass(frozen=True)
class Sources:
    """The sources of facts. The defaults read this machine; tests replace them."""

    system: System
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path | None = None
    """Folder that replaces the root of the file system, or None. A drive letter becomes a folder in it."""
    site_packages: tuple[Path, ...] = field(default_factory=lambda: tuple(Path(entry) for entry in sys.path if entry))
    app_dir: Path | None = None
    """Folder where the output of tools is cached, or None for no cache."""
    run: Callable[[Sequence[str], float], str] = run_tool
    registry: WindowsRegistry = field(default_factory=NoRegistry)
    access: Callable[[Path, int], bool] = os.access
    disk: Callable[[Path], tuple[int, int]] = _disk
    """Function that returns (total, free) bytes of a path's file system."""
    memory_status: Callable[[], tuple[int, int, int]] = _no_memory_status
    """Function that returns three sizes on Windows: memory, available memory, and memory with the page file, in bytes.
    """
    file_version: Callable[[Path], str | None] = _no_version
    """Function that returns a DLL's version on Windows, from its version resource."""
    cpu_count: int = field(default_factory=lambda: os.cpu_count() or 1)
    python: str = sys.executable

    def path(self, text: str) -> Path:
        """Return a path on the machine. If ``root`` is set, the path is below it."""
        if self.root is None:
            return Path(text)
        if text[1:2] == ":":
            text = text[0] + text[2:]
        return self.root / text.replace("\\", "/").lstrip("/")


def this_machine() -> Sources:
    """Return the sources that read this machine."""
    system: System = {"win32": "windows", "darwin": "macos"}.get(sys.platform, "linux")  # type: ignore[assignment]
    folder = app_dir(os.environ, system)
    if system == "windows":
        from lora_rocm.hardware.probe.windows_api import RealRegistry, file_version, memory_status

        return Sources(
            system, app_dir=folder, registry=RealRegistry(), memory_status=memory_status, file_version=file_version
        )
    return Sources(system, app_dir=folder)


class ProbeReads:
    """Read operations of one probe. A fact that cannot be read is recorded in a list and becomes None."""

    def __init__(self, sources: Sources, again: bool = False) -> None:
        self.sources = sources
        self.again = again
        """Whether to retry tools that failed before."""
        self.unread: list[Unread] = []
        self.boot = ""
        """Identifier of this boot, part of the cache key of tool output."""

    def note(self, what: str, why: str | OSError) -> None:
        """Record a fact that could not be read."""
        reason = why if isinstance(why, str) else (why.strerror or str(why)).lower()
        self.unread.append(Unread(what, reason))

    def text(self, path: str, *, expected: bool = False, limit: int = READ_BYTES) -> str | None:
        """Return the text of a file, or None. A missing file is recorded as unread only if it is ``expected``."""
        try:
            with self.sources.path(path).open("rb") as file:
                return file.read(limit).decode("utf-8", "replace")
        except (FileNotFoundError, NotADirectoryError):
            if expected:
                self.note(path, "not there")
        except OSError as error:
            self.note(path, error)
        except ValueError:  # a zero byte in a name that was read from elsewhere
            self.note(path[:80].replace("\0", "?"), "no path")
        return None

    def line(self, path: str) -> str:
        """Return the stripped text of a small file; empty if it is missing."""
        return (self.text(path) or "").strip()

    def number(self, path: str) -> int | None:
        """Return the number in a file, or None if it is missing or not a number."""
        found = self.text(path)
        return None if found is None else self.parsed(found.strip(), path)

    def parsed(self, text: str, what: str) -> int | None:
        """Parse a decimal number, or a hexadecimal one with 0x.

        Other text is recorded as unread, and None is returned.
        """
        try:
            number = int(text, 0) if text.lower().startswith("0x") else int(text)
        except ValueError:
            number = -1
        if number in NUMBERS:
            return number
        self.note(what, f"not a number: {text[:40]!r}")
        return None

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; empty if it is missing."""
        try:
            return sorted(os.listdir(self.sources.path(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.note(folder, error)
            return []

    def exists(self, path: str) -> bool:
        """Whether a file or folder exists."""
        return os.path.exists(self.sources.path(path))

    def values(self, key: str) -> dict[str, Any]:
        """Return the values of a registry key by name; empty if the key is missing."""
        try:
            return self.sources.registry.values(key)
        except FileNotFoundError:
            return {}
        except OSError as error:
            self.note(rf"HKLM\{key}", error)
            return {}

    def run(self, tool: str, command: Sequence[str], timeout_s: float) -> str | None:
        """Return the output of a tool. If the tool fails, that is recorded and None is returned."""
        try:
            return self.sources.run(command, timeout_s)
        except OSError as error:
            self.note(tool, error)
            return None

    def ask(self, tool: str, command: Sequence[str], timeout_s: float, about: str) -> str | None:
        """Return the output of a slow tool, or None if it fails. The result is cached for this boot and for ``about``.

        Failures are cached too, so that a tool that hangs does not cost its timeout at every start.

        about: text on which the output depends, such as a driver version or a wheel.
        """
        key = "\n".join([self.boot, about, *command])
        known = recalled(self.sources.app_dir, tool, key)
        if known is not None and not (self.again and known.get("failed")):
            if known.get("failed"):
                self.note(tool, f"{known['failed']} (result of an earlier attempt; lora-rocm doctor tries again)")
            return known.get("said")
        before = len(self.unread)
        said = self.run(tool, command, timeout_s)
        failed = self.unread[-1].why if len(self.unread) > before else None
        remember(self.sources.app_dir, tool, {"key": key, "said": said, "failed": failed})
        return said


FORMAT, MAX_MEMORY_BYTES = 1, 1 << 24
MEMORY_FILE = "remembered.json"


def recalled(folder: Path | None, tool: str, key: str) -> dict[str, Any] | None:
    """Return the cached entry of a tool if it was stored under this key, else None. A damaged cache file is ignored."""
    entry = _entries(folder).get(tool)
    if not isinstance(entry, dict) or entry.get("key") != key:
        return None
    said, failed = entry.get("said"), entry.get("failed")
    return entry if isinstance(said, str) or isinstance(failed, str) else None


def remember(folder: Path | None, tool: str, entry: dict[str, Any]) -> None:
    """Store a tool's last output in the cache. If the file cannot be written, the next probe is only slower."""
    if folder is None:
        return
    text = json.dumps({"format": FORMAT, "tools": {**_entries(folder), tool: entry}})
    with contextlib.suppress(StorageError):
        write_atomic(folder / MEMORY_FILE, text.encode("utf-8"), read_back=False)


def _entries(folder: Path | None) -> dict[str, Any]:
    whole = {} if folder is None else object_in(folder / MEMORY_FILE, MAX_MEMORY_BYTES)
    tools = whole.get("tools") if whole.get("format") == FORMAT else None
    return tools if isinstance(tools, dict) else {}
