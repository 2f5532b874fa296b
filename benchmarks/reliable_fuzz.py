"""Endless damaged files: recipes, images, captions, weights, LoRAs, cache entries, checkpoints, logs, and more.

    python benchmarks/reliability.py fuzz [--minutes 20] [--seed 0] [--target NAME]...
    python benchmarks/reliability.py fuzz --case NAME:SEED:NUMBER [--keep FILE]     one case again, with its traceback

Each case is a function of (target, seed, number). It runs in a child process of bounded memory (Linux), which records
the present case and is ended if a case takes too long. A finding is an unexpected exception, a case longer than
DEADLINE_S, or a child that died. The exit code is 0 if there is none.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fuzz_runs import SCRATCH
from benchmarks.fuzz_targets import TARGETS, Target, read

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 20.0
MEMORY_BYTES = 6 << 30  # address space: torch alone reserves some of it
MAX_FINDINGS_OF_A_KIND = 3
SOME_S = 2.0


def main(argv: list[str]) -> int:
    """Run the command line above; print cases per target and per second, and every finding with its reproduction."""
    parser = argparse.ArgumentParser(prog="reliability.py fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", choices=[target.name for target in TARGETS])
    parser.add_argument("--case", metavar="NAME:SEED:NUMBER")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="with --case: write the damaged file here")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    targets = [target for target in TARGETS if not arguments.target or target.name in arguments.target]
    if arguments.case:
        return again(arguments.case, arguments.keep)
    if arguments.child:
        return child(arguments.child, targets, arguments.seed, arguments.start, arguments.seconds)
    return fuzz(targets, arguments.seed, arguments.minutes * 60)


def content_of(target: Target, seed: int, number: int) -> bytes:
    """Return the damaged file of a case."""
    return target.make(random.Random(f"{target.name}:{seed}:{number}"))


def again(case: str, keep: Path | None) -> int:
    """Run one case in this process, without catching its exception."""
    name, seed, number = case.split(":")
    target = next(target for target in TARGETS if target.name == name)
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    with tempfile.TemporaryDirectory() as folder:
        read_sound(folder)
        content = content_of(target, int(seed), int(number))
        if keep:
            keep.write_bytes(content)
        print(f"{case}: {read(target, content, Path(folder))}")
    return 0


def read_sound(folder: str) -> None:
    """Set the folder in which the targets make sound files."""
    SCRATCH[:] = [str(Path(folder) / "sound")]


def child(notes: Path, targets: list[Target], seed: int, start: int, seconds: float) -> int:
    """Run cases until the time is over; write one line of JSON per finding, and the counts every few seconds."""
    limit_memory()
    sys.path.insert(0, str(ROOT))
    os.environ["HF_HUB_OFFLINE"] = "1"
    counts: collections.Counter[str] = collections.Counter()
    spent: collections.Counter[str] = collections.Counter()
    number, end, told = start, time.monotonic() + seconds, 0.0
    place_of_case = notes.with_name(f"{notes.name}.at")
    with (
        tempfile.TemporaryDirectory() as folder,
        notes.open("ab", buffering=0) as file,
        place_of_case.open("wb", buffering=0) as at,
        _no_network(),
    ):
        place = os.getcwd()
        os.chdir(folder)
        read_sound(folder)
        for target in targets:  # does slow things once: imports, and making the sound files
            with contextlib.suppress(Exception):
                read(target, content_of(target, seed, -1), Path(folder))
        # run cases of all targets in turn
        while time.monotonic() < end:
            for target in targets:
                at.seek(0)
                at.write(f"{target.name}:{seed}:{number}".ljust(80).encode())
                faulthandler.dump_traceback_later(DEADLINE_S, exit=True, file=sys.stderr)
                began = time.monotonic()
                try:
                    outcome = read(target, content_of(target, seed, number), Path(folder))
                except Exception as error:  # edge: every exception is a finding
                    outcome = "finding"
                    _note(file, {"case": f"{target.name}:{seed}:{number}", "what": _kind(error)})
                counts[f"{target.name} {outcome}"] += 1
                spent[target.name] += time.monotonic() - began
            number += 1
            # report the counts
            if time.monotonic() - told > SOME_S or time.monotonic() >= end:
                told = time.monotonic()
                _note(file, {"counts": dict(counts), "spent": dict(spent)})
        faulthandler.cancel_dump_traceback_later()
        os.chdir(place)
    return 0


def limit_memory() -> None:
    """Limit the address space, if the system can. A case that needs more raises MemoryError, which is a finding."""
    process = psutil.Process()
    if hasattr(process, "rlimit"):
        process.rlimit(psutil.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


@contextlib.contextmanager
def _no_network() -> Any:
    """Raise if reading a file uses the network or starts a process; the attempt is a finding."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system"):
            raise RuntimeError(f"{event} while a file was read")

    watching = [True]
    sys.addaudithook(watch)
    try:
        yield
    finally:
        watching.clear()


def _note(file: Any, value: dict[str, Any]) -> None:
    file.write(json.dumps(value).encode() + b"\n")


def _kind(error: BaseException) -> str:
    """Return the exception and its origin; findings with the same text are counted together."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if str(ROOT) in frame.filename]
    frame = next((frame for frame in reversed(frames) if "lora_rocm" in Path(frame.filename).parts), frames[-1])
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {ascii(str(error))[:120]}"


def fuzz(targets: list[Target], seed: int, seconds: float) -> int:
    """Run child processes in sequence until the time is over."""
    findings: dict[str, list[str]] = {}
    counts: collections.Counter[str] = collections.Counter()
    spent: collections.Counter[str] = collections.Counter()
    start, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes.jsonl"
        while (left := began + seconds - time.monotonic()) > 0:
            notes.write_bytes(b"")
            code, said, at = _run_child(notes, targets, seed, start, left)
            lines = [json.loads(line) for line in notes.read_bytes().splitlines()]
            for line in lines:
                if "case" in line:
                    findings.setdefault(line["what"], []).append(line["case"])
            summary = next((line for line in reversed(lines) if "counts" in line), {"counts": {}, "spent": {}})
            counts.update(summary["counts"])
            spent.update(summary["spent"])
            if code == 0:
                break
            if not at:
                print(f"the child did not start: {said[-2000:]}")
                return 1
            findings.setdefault(_death(code, said), []).append(at)
            start = int(at.rpartition(":")[2]) + 1
    _tell(targets, counts, spent, findings, time.monotonic() - began)
    return 1 if findings else 0


def _run_child(notes: Path, targets: list[Target], seed: int, start: int, seconds: float) -> tuple[int, str, str]:
    """Return (exit code, standard error, last case)."""
    words = [sys.executable, str(ROOT / "benchmarks" / "reliability.py"), "fuzz", "--child", str(notes)]
    words += ["--seed", str(seed), "--start", str(start), "--seconds", str(seconds)]
    words += [word for target in targets for word in ("--target", target.name)]
    environ = {**os.environ, "TMPDIR": str(notes.parent), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    place = notes.parent / f"{notes.name}.at"
    at = place.read_text(encoding="utf-8").strip() if place.exists() else ""
    return done.returncode, done.stderr.decode("utf-8", "replace"), at


def _death(code: int, said: str) -> str:
    if "Timeout (" in said:
        ours = [line.strip() for line in said.splitlines() if "lora_rocm" in line]
        return f"longer than {DEADLINE_S:.0f} s, in {ours[0] if ours else 'a library'}"
    return f"the process ended with {code}: {said.strip().splitlines()[-1:] or ''}"


def _tell(
    targets: list[Target],
    counts: collections.Counter[str],
    spent: collections.Counter[str],
    findings: dict[str, list[str]],
    seconds: float,
) -> None:
    total = sum(counts.values())
    print(f"{total} cases in {seconds:.0f} s, {total / seconds:.0f} a second")
    for target in targets:
        parts = {outcome: counts[f"{target.name} {outcome}"] for outcome in ("read", "refused", "finding")}
        number = sum(parts.values())
        rate = number / spent[target.name] if spent[target.name] else 0.0
        print(
            f"  {target.name:14} {number:8} cases, {rate:6.0f} a second: "
            + ", ".join(f"{n} {o}" for o, n in parts.items())
        )
    print(f"{len(findings)} kinds of findings")
    for what, cases in sorted(findings.items()):
        print(f"  {len(cases)} x {what}")
        for case in cases[:MAX_FINDINGS_OF_A_KIND]:
            print(f"      python benchmarks/reliability.py fuzz --case {case}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
