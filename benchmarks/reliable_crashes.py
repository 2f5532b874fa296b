"""A killed run must give the bytes of the undisturbed one: cuts at every write, power cuts, and real kills.

Cuts happen in child processes that are forked from a warmed process, by a shim that counts calls (tests/crash). Kills
hit ``lora-rocm train`` as a user starts it, at random moments (tests/test_kill.py).
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tests.crash import lab, series
from tests.test_kill import KINDS, MOMENTS, RECIPES, endure

FAULTS_SHOWN = 10


def main(argv: list[str]) -> int:
    """Print the figures; return 0 if no byte differed and both negative controls were caught."""
    parser = argparse.ArgumentParser(prog="reliability.py crashes", description=__doc__)
    parser.add_argument("--stride", type=int, default=1, help="cut at every n-th call only")
    parser.add_argument("--chains", type=int, default=10, help="runs of each variant that are cut again and again")
    parser.add_argument("--kills", type=int, default=0, help="real kills at random moments (minutes)")
    parser.add_argument("--samples", choices=[*RECIPES], default="images", help="what the killed runs train on")
    parser.add_argument("--variant", type=int, help="one variant only, by its number")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    different = 0
    with tempfile.TemporaryDirectory(prefix="crashes ") as folder:
        if why := lab.why_not():
            print(f"no cuts: {why}")
        elif options.stride:
            different += _cuts(Path(folder), options)
        if options.kills:
            different += _kills(Path(folder) / "kills", options.kills, options.seed, options.samples)
    print(f"different: {different}")
    return 1 if different else 0


def _cuts(folder: Path, options: argparse.Namespace) -> int:
    place = lab.Lab(folder / "lab").started()
    names = list(lab.VARIANTS)
    names = names if options.variant is None else [names[options.variant]]
    generator, different, started, total = random.Random(options.seed), 0, time.perf_counter(), 0
    try:
        for name in names:
            straight = series.undisturbed(place, name)
            points = range(1, len(straight.calls) + 1, options.stride)
            writes = [call.number for call in straight.calls if call.name in series.WRITES][:: options.stride]
            lasting = [call.number for call in straight.calls if not call.passing][:: options.stride]
            seen: set[str] = set()
            print(f"{name}: {len(straight.calls)} calls, {straight.seconds:.2f} s undisturbed")
            for what, found in (
                ("exit before a call", series.exits(place, name, straight, lab.EXIT, points, (), seen)),
                ("exit in the middle of a write", series.exits(place, name, straight, lab.HALF, writes, (), seen)),
                ("power cut before a call", series.power_cuts(place, name, straight, lasting, (), seen)),
                ("cut again and again", series.chains(place, name, straight, options.chains, generator)),
            ):
                runs, wrong = _tell(what, found)
                total, different = total + runs, different + wrong
        different += _controls(place)
    finally:
        place.close()
    print(f"{len(names)} variants, {total} disturbed runs, {time.perf_counter() - started:.0f} s")
    return different


def _tell(what: str, found: Iterable[series.Found]) -> tuple[int, int]:
    """Print a series with the cost of its cuts; return (runs, runs with an error)."""
    results = list(found)
    wrong = [one for one in results if one.wrong]
    cuts = sum(sum(bool(hit) for hit in one.hits) for one in results)
    costs = [one.cost_s for one in results if one.cost_s is not None]
    cost_s = statistics.median(costs) if costs else 0.0
    print(
        f"  {what}: {len(results)} runs, {cuts} cuts, gone on from {len(costs)} different states, "
        f"{len(wrong)} different, median cost {cost_s:.2f} s",
        flush=True,
    )
    for one in wrong[:FAULTS_SHOWN]:
        print(f"    {', '.join(one.hits)}: {'; '.join(one.wrong)}")
    return len(results), len(wrong)


def _controls(place: lab.Lab) -> int:
    """Run the series on deliberately wrong programs; return the number of faults that it missed."""
    missed = 0
    name = next(iter(lab.VARIANTS))
    straight = series.undisturbed(place, name)
    for fault, found in series.controls(place, name, straight):
        caught = sum(bool(one.wrong) for one in found)
        print(f"  negative control, {fault}: {caught} of {len(found)} cuts found it")
        missed += not caught
    return missed


def _kills(folder: Path, number: int, seed: int, samples: str) -> int:
    """Kill real runs; print the moments and the cost of each restart."""
    folder.mkdir()
    generator = random.Random(seed)
    kills = [(MOMENTS[n % len(MOMENTS)], generator.choice(KINDS)) for n in range(number)]
    rounds = [kills[start : start + len(MOMENTS)] for start in range(0, number, len(MOMENTS))]
    started = time.perf_counter()
    try:
        log = endure(folder, rounds, seed, samples)
    except AssertionError as error:
        print(f"  DIFFERENT: {error}")
        return 1
    for count, entry in enumerate(log, start=1):
        print(f"  kill {count:2}: {entry}")
    costs = [entry["cost_s"] for entry in log if entry["hit"] and entry["cost_s"] is not None]
    hits = sum(entry["hit"] for entry in log)
    print(
        f"{number} kills ({hits} hit a run that went on), {len(rounds)} runs, all bytes equal; a restart costs "
        f"{statistics.median(costs):.1f} s in the median, {max(costs):.1f} s at most; "
        f"{time.perf_counter() - started:.0f} s in all"
    )
    return 0
