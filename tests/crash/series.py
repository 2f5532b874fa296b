"""Series of cuts and of failing disks over one variant of a run; each yields what became of every one of them."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.rundir.layout import RunDir
from lora_rocm.train.checkpoint import read_checkpoint
from tests.crash.lab import EXIT, HALF, KILLED, PASSING, VANISH, Call, Ended, Lab, differing, lose_power, results

WRITES = ("write", "writev", "pwrite")
WORDS = {
    "ENOSPC": "The disk is full",
    "EROFS": "not permitted here",
    "EACCES": "not permitted here",
    "EIO": "Reading or writing failed: Input/output error",
    "ESTALE": "not there any more",
    "gone": "not there any more",
}
"""The message that the user has to read, by disk fault."""


@dataclass(frozen=True)
class Straight:
    """The undisturbed run: its folder, what it left, the calls that it made, how long it took."""

    root: Path
    results: dict[str, bytes]
    calls: list[Call]
    seconds: float


@dataclass(frozen=True)
class Found:
    """One disturbed run.

    hits: the calls that were struck. wrong: the faults found; empty if there are none.
    cost_s: how much longer all its starts took together than the undisturbed run; None: it was not resumed, because
    another one was in the same state.
    """

    hits: tuple[str, ...]
    wrong: tuple[str, ...]
    cost_s: float | None = 0.0
    finished: bool = False


def undisturbed(lab: Lab, variant: str) -> Straight:
    """The run stays where it is until the next undisturbed one is made."""
    root = lab.folder / "undisturbed"
    shutil.rmtree(root, ignore_errors=True)
    ended = lab.train(root, variant)
    assert ended.code == 0, ended.text
    return Straight(root, results(root), lab.calls(), ended.seconds)


def exits(
    lab: Lab,
    variant: str,
    straight: Straight,
    mode: int,
    points: Sequence[int],
    faults: tuple[str, ...] = (),
    seen: set[str] | None = None,
) -> Iterator[Found]:
    """Cut at each of ``points``, and resume to the end.

    ``seen``: digests of the files left by cut runs that were resumed to their end. No state is resumed twice, because
    the next steps depend only on the state.
    """
    for at in points:
        with lab.root() as root:
            cut = lab.train(root, variant, at, mode, faults=faults)
            yield _gone_on(lab, root, variant, straight, [cut], faults, seen)


def power_cuts(
    lab: Lab,
    variant: str,
    straight: Straight,
    points: Sequence[int],
    faults: tuple[str, ...] = (),
    seen: set[str] | None = None,
) -> Iterator[Found]:
    """As ``exits``, but nothing is left that was not flushed to the disk."""
    for at in points:
        with lab.root() as root:
            cut = lab.train(root, variant, at, EXIT, faults=faults)
            lose_power(root, lab.calls())
            yield _gone_on(lab, root, variant, straight, [cut], (), seen)


def state_of(root: Path) -> str:
    """A digest of the names and bytes of all files that a later start goes by, but for the process's number in them."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if not any(part.startswith(PASSING) for part in parts) and path.suffix != ".html":
            name = re.sub(r"\.\d+(\.[0-9a-f]{8})?\.tmp", ".tmp", "/".join(parts))
            content = path.read_bytes() if path.is_file() and path.name != "environment.json" else b""
            digest.update(
                repr((name, path.is_dir(), hashlib.sha256(_placeless(content, root)).digest())).encode("utf-8")
            )
    return digest.hexdigest()


def _placeless(content: bytes, root: Path) -> bytes:
    return content.replace(os.fsencode(root), b"")


def chains(lab: Lab, variant: str, straight: Straight, number: int, generator: random.Random) -> Iterator[Found]:
    """Cut again and again at random points of the resumed runs, until one of them reaches its end."""
    for _ in range(number):
        with lab.root() as root:
            cuts = []
            for _ in range(12):
                at = generator.randint(1, len(straight.calls))
                cuts.append(lab.train(root, variant, at, generator.choice((EXIT, HALF))))
                if cuts[-1].code != KILLED:
                    break
            yield _gone_on(lab, root, variant, straight, cuts, ())


def _gone_on(
    lab: Lab,
    root: Path,
    variant: str,
    straight: Straight,
    cuts: list[Ended],
    faults: tuple[str, ...],
    seen: set[str] | None = None,
) -> Found:
    state = state_of(root) if seen is not None else ""
    if seen is not None and state in seen:
        return Found(tuple(cut.hit for cut in cuts), (), None)
    wrong = [f"a cut run ended with {cut.code}: {cut.text[-1500:]}" for cut in cuts if cut.code not in (KILLED, 0)]
    last = lab.train(root, variant, faults=faults)
    if last.code != 0:
        wrong.append(f"ended with {last.code}: {last.text[-1500:]}")
    wrong += [f"{name} differs" for name in differing(results(root), straight.results)]
    if seen is not None and not wrong:
        seen.add(state)
    cost_s = sum(ended.seconds for ended in (*cuts, last)) - straight.seconds
    return Found(tuple(cut.hit for cut in cuts), tuple(wrong), cost_s)


def failures(
    lab: Lab,
    variant: str,
    straight: Straight,
    mode: int,
    error: int,
    words: str,
    points: Sequence[int],
    faults: tuple[str, ...] = (),
) -> Iterator[Found]:
    """Let the disk fail at each of ``points``, check the files and the user's messages, repair it, and continue.

    A run may end well although a call failed, where the call was none that matters.
    """
    for at in points:
        with lab.root() as root:
            failed = lab.train(root, variant, at, mode, error, faults)
            wrong = _bring_back(root) if mode == VANISH else []
            wrong += _said(failed, words) + not_as_written(root, straight)
            again = _gone_on(lab, root, variant, straight, [], ())
            yield Found((failed.hit,), (*wrong, *again.wrong), again.cost_s, failed.code == 0)


def _bring_back(root: Path) -> list[str]:
    """Mount the drive again; a file written to its mount point meanwhile is a fault."""
    away, written = root.with_name(root.name + ".away"), []
    if away.exists():
        written = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
        shutil.rmtree(root, ignore_errors=True)
        away.rename(root)
    return [f"{name} was written where the drive had been" for name in written]


def after_start(straight: Straight) -> int:
    """The first call after the run has its recipe: until then its folders are made, wherever they are asked for."""
    return 1 + next(call.number for call in straight.calls if call.path.name == "recipe.yaml")


def _said(failed: Ended, words: str) -> list[str]:
    """Faults in the messages to the user."""
    if failed.code == 0:
        return []
    wrong = [] if failed.code == 3 else [f"exit code {failed.code}"]
    wrong += [f"{word!r} was said" for word in ("Traceback", "does not know", "a bug") if word in failed.text]
    wrong += [] if words in failed.text else ["not said what it is"]
    wrong += [] if "fix:" in failed.text and "/run" in failed.text else ["not said where, or how to fix it"]
    return [f"{what}: {failed.text[-1200:]}" for what in wrong]


def not_as_written(root: Path, straight: Straight) -> list[str]:
    """Checkpoints that count as valid and differ from the undisturbed run."""
    wrong, valid = [], []
    for updates, path in RunDir(root / "run").list_checkpoints():
        if read_checkpoint(path) is None:
            continue
        valid.append(updates)
        for file in path.iterdir():
            name = file.relative_to(root / "run").as_posix()
            if name in straight.results and file.read_bytes() != straight.results[name]:
                wrong.append(f"{name} is taken for valid and is not what was written")
    return wrong


def controls(lab: Lab, variant: str, straight: Straight) -> Iterator[tuple[str, list[Found]]]:
    """The same cuts over a program that is wrong on purpose: a resume elsewhere in the data; files not flushed."""
    saved = next(call.number for call in straight.calls if call.name == "rename" and call.path.name == "step-00000002")
    points = (saved + 16,)
    yield "position", list(exits(lab, variant, straight, EXIT, points, ("position",)))
    yield "in-place", list(power_cuts(lab, variant, straight, points, ("in-place",)))
