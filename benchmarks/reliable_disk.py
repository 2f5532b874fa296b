"""A disk that fails at every call of a run: full, read-only, broken, gone; and a small one that really is full.

Each run must end with exit code 3 and a sentence (or end well, if the call did not matter). No checkpoint may count
as valid if it differs from the bytes written. Once the disk works again, the same command must give the bytes of the
undisturbed run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.crash import lab, series

FAULTS_SHOWN = 10
SERIES = (
    ("full from a call on", lab.FAIL_FROM, "ENOSPC", 1),
    ("full at one call", lab.FAIL_ONCE, "ENOSPC", 1),
    ("read-only from a call on", lab.FAIL_FROM, "EROFS", 4),
    ("not permitted at one call", lab.FAIL_ONCE, "EACCES", 4),
    ("an error of the device at one call", lab.FAIL_ONCE, "EIO", 4),
    ("an error of the device from a call on", lab.FAIL_FROM, "EIO", 4),
    ("a stale network drive from a call on", lab.FAIL_FROM, "ESTALE", 4),
    ("the folder is gone from a call on", lab.VANISH, "gone", 4),
)
"""(description, mode, error, factor of the stride)."""


def main(argv: list[str]) -> int:
    """Print the figures; return 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(prog="reliability.py disk", description=__doc__)
    parser.add_argument("--stride", type=int, default=1, help="fail at every n-th call only")
    parser.add_argument("--variant", type=int, default=1, help="number of the run (1: from empty caches)")
    parser.add_argument("--series", type=int, help="one series only, by its number")
    options = parser.parse_args(argv)
    if why := lab.why_not():
        print(f"not possible here: {why}")
        return 0
    name = list(lab.VARIANTS)[options.variant]
    chosen = SERIES if options.series is None else SERIES[options.series : options.series + 1]
    with tempfile.TemporaryDirectory(prefix="disk ") as folder:
        place = lab.Lab(Path(folder) / "lab").started()
        try:
            straight = series.undisturbed(place, name)
            print(f"{name}: {len(straight.calls)} calls")
            wrong = sum(_one(place, name, straight, *row, options.stride) for row in chosen)
        finally:
            place.close()
    print(f"wrong: {wrong}")
    return 1 if wrong else 0


def _one(
    place: lab.Lab, name: str, straight: series.Straight, what: str, mode: int, error: str, times: int, stride: int
) -> int:
    started = time.perf_counter()
    first = series.after_start(straight) if mode == lab.VANISH else 1
    points = range(first, len(straight.calls) + 1, stride * times)
    number = lab.ERRORS.get(error, 0)
    found = list(series.failures(place, name, straight, mode, number, series.WORDS[error], points))
    wrong = [one for one in found if one.wrong]
    ended_well = sum(one.finished for one in found)
    print(
        f"  {what}: {len(found)} runs, {len(found) - ended_well} ended with exit code 3, {ended_well} ended well, "
        f"{len(wrong)} wrong; {time.perf_counter() - started:.0f} s",
        flush=True,
    )
    for text, count in Counter(text for one in wrong for text in one.wrong).most_common(FAULTS_SHOWN):
        print(f"    {count} x {text}")
    for one in wrong[:FAULTS_SHOWN]:
        print(f"    {', '.join(one.hits)}: {'; '.join(text.splitlines()[0] for text in one.wrong)}")
    return len(wrong)
