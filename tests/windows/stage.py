"""A checkout as the .bat files see it, with fakes of Python and of the program, under Wine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BAT_FOLDER = Path(__file__).parents[2] / "scripts" / "windows"
PYTHONS = ("py", "python")
TIMEOUT_S = 60
BUSY_TRIES, BUSY_S = 4, 1.0


@dataclass(frozen=True)
class Call:
    """One start of a fake program."""

    program: str
    path: str
    line: str
    folder: str
    arguments: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Outcome:
    """code: exact exit code of the started command line. ``said``: both output streams. calls: in order."""

    code: int
    said: str
    calls: list[Call] = field(default_factory=list)

    @property
    def programs(self) -> list[str]:
        return [call.program for call in self.calls]

    def last(self, program: str) -> Call:
        return [call for call in self.calls if call.program == program][-1]


def windows_path(path: Path) -> str:
    """As Wine shows it: its drive Z: is the root folder."""
    return "Z:" + str(path).replace("/", "\\")


class Stage:
    """``root`` is the checkout. Every run starts one command line exactly as given, without a shell in between."""

    def __init__(self, root: Path, environment: Mapping[str, str]) -> None:
        self.root, self.environment = root, dict(environment)
        self.recorder = Path(environment["TMPDIR"]) / "recorder.exe"
        self.bin = root.parent / "bin"
        self.bin.mkdir(exist_ok=True)
        self.work = root.parent / "work"
        self.work.mkdir(exist_ok=True)
        for program in (*PYTHONS, "launch"):
            self.put(self.bin / f"{program}.exe")
        self.put(root / ".venv" / "Scripts" / "lora-rocm.exe")
        self.put(root / ".venv" / "Scripts" / "python.exe")
        shutil.copytree(BAT_FOLDER, root / "scripts" / "windows")

    def put(self, path: Path) -> None:
        """A fake program with that name."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.hardlink_to(self.recorder)

    def edit(self, name: str, old: str, new: str) -> None:
        """Break one of the copied .bat files, for negative controls."""
        path = self.root / "scripts" / "windows" / name
        text = path.read_bytes().decode("ascii")
        assert old in text
        path.write_bytes(text.replace(old, new).encode("ascii"))

    def bat(self, name: str) -> str:
        return windows_path(self.root / "scripts" / "windows" / name)

    def prefix_link(self, name: str, target: Path) -> None:
        """A drive (``e:``) or a share (``unc/server/share``) of the Wine prefix that is ``target``."""
        link = Path(self.environment["WINEPREFIX"]) / "dosdevices" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(target)

    def is_busy(self, code: int, said: str, log: Path) -> bool:
        """Whether Wine did not start a program that exists: ``launch`` itself, the named one, or the first Python."""
        if code == 1 and not log.exists():  # of wine: launch.exe ends with 0, or with 250 and more
            return True
        calls = [json.loads(row) for row in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
        found = [call["program"] for call in calls if call.get("path", "").startswith(windows_path(self.bin))]
        passed_over = "python" in found and "py" not in found and (self.bin / "py.exe").exists()
        # The folder's letters depend on the code page
        unknown = re.search(r"recognize '\"[^'\"]*\\\.venv\\Scripts\\([\w.-]+)\"", said)
        return passed_over or (unknown is not None and (self.root / ".venv" / "Scripts" / unknown[1]).exists())

    def run(
        self,
        line: str,
        *,
        folder: Path | None = None,
        stdin: bytes | int = b"",
        codes: Mapping[str, str] | None = None,
        says: Mapping[str, str] | None = None,
        **variables: str,
    ) -> Outcome:
        """Run a command line; ``codes`` and ``says`` are exit codes and words of the fake programs.

        A busy Wine sometimes cannot start a program that is there: then the line runs again.
        """
        log, said = self.root.parent / "log", ""
        (self.root.parent / "line").write_text(line, encoding="utf-8")
        environment: dict[str, str] = {
            **self.environment,
            "WINEPATH": windows_path(self.bin),
            "RECORDER_LOG": windows_path(log),
            "RECORDER_LINE": windows_path(self.root.parent / "line"),
            **{f"RECORDER_CODES_{name.replace('-', '_')}": value for name, value in (codes or {}).items()},
            **{f"RECORDER_SAYS_{name.replace('-', '_')}": value for name, value in (says or {}).items()},
            **variables,
        }
        given = {"stdin": stdin} if isinstance(stdin, int) else {"input": stdin}
        command = ["wine", windows_path(self.bin / "launch.exe")]
        for _ in range(BUSY_TRIES):
            for old in self.root.parent.glob("log*"):
                old.unlink()
            # Into a file: Wine's background processes would keep a pipe open for a second.
            with (self.root.parent / "said").open("w+b") as file:
                done = subprocess.run(
                    command,
                    env=environment,
                    cwd=folder or self.work,
                    stdout=file,
                    stderr=file,
                    timeout=TIMEOUT_S,
                    **given,
                )
                file.seek(0)
                said = file.read().decode("utf-8", "replace")
            if not self.is_busy(done.returncode, said, log):
                break
            time.sleep(BUSY_S)
        assert done.returncode == 0 and log.exists(), f"launch.exe: {done.returncode} {said}"
        entries: list[dict[str, Any]] = [json.loads(row) for row in log.read_text(encoding="utf-8").splitlines()]
        end = entries.pop()
        assert end["program"] == "launch", said
        for entry in entries:
            entry["environment"] = dict(row.split("=", 1) for row in entry["environment"] if not row.startswith("="))
        return Outcome(end["code"], said, [Call(**entry) for entry in entries])

    def double_click(self, name: str, dropped: str = "", **options: Any) -> Outcome:
        """As the Explorer does it. Wine has no CMDCMDLINE, so it is set; ``dropped`` is as the Explorer writes it."""
        line = f'C:\\windows\\system32\\cmd.exe /c ""{self.bat(name)}" {dropped}"'
        return self.run(line, CMDCMDLINE=line, **options)

    def prompt(self, name: str, arguments: str = "", **options: Any) -> Outcome:
        """As typed at a prompt or in a script: ``arguments`` are passed verbatim."""
        return self.run(f'cmd.exe /c ""{self.bat(name)}" {arguments}"', **options)
