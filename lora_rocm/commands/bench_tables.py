"""Format the figures of a benchmark as aligned text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lora_rocm.foundation.units import count_text, size_text

Row = Mapping[str, Any]
DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
BOTH_WAYS = "both at once"
ONE_WAY = ("host to device", "device to host")


def aligned(lines: Sequence[Sequence[str]], left: int) -> list[str]:
    """Pad columns to equal width. The first ``left`` columns are left-aligned, all others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def transfer_table(rows: Sequence[Row], link: Row | None) -> list[str]:
    """Return a table of copy rates in GB/s (10^9 bytes per second) by direction and size.

    With a known PCIe link, the last column is the share of its bandwidth.
    """
    sizes = sorted({row["size_bytes"] for row in rows})
    of_the_bus = ["of the bus"] if link else []
    lines = [["GB/s", "", *(size_text(size).replace(".0 ", " ") for size in sizes), *of_the_bus]]
    for copy, memory in _distinct((row["copy"], row["memory"]) for row in rows):
        by_size = {row["size_bytes"]: row for row in rows if (row["copy"], row["memory"]) == (copy, memory)}
        cells = [_cell(by_size.get(size), 1e9) for size in sizes]
        lines.append([copy, memory, *cells, *([_share(copy, by_size, link)] if link else [])])
    return aligned(lines, left=2)


def _share(copy: str, by_size: Mapping[int, Row], link: Row) -> str:
    rates = [row["per_second"] for row in by_size.values() if row["per_second"]]
    if copy not in (*ONE_WAY, BOTH_WAYS) or not rates:
        return ""
    allowed = link["gb_per_s"] * 1e9 * (2 if copy == BOTH_WAYS else 1)
    return f"{max(rates) / allowed:.0%}"


def best_over_bus(rows: Sequence[Row]) -> float:
    """Return the rate of the fastest one-way copy between host and device, in bytes per second."""
    return max((row["per_second"] or 0.0 for row in rows if row["copy"] in ONE_WAY), default=0.0)


def compute_table(rows: Sequence[Row], group: str, variants: Sequence[str]) -> list[str]:
    """Return a table of TFLOP/s by shape and dtype for one group of operations. Several variants get a column each."""
    of_group = [row for row in rows if row["group"] == group]
    dtypes = [name for name in DTYPE_NAMES if any(row["dtype"] == name for row in of_group)]
    columns = [(dtype, variant) for dtype in dtypes for variant in variants]
    titles = [f"{DTYPE_NAMES[dtype]} {variant}".strip() for dtype, variant in columns]
    lines = [["TFLOP/s", "", "", *titles]]
    for name, way, shape in _distinct((row["name"], row["way"], tuple(row["shape"])) for row in of_group):
        same = {
            (row["dtype"], row["variant"]): row
            for row in of_group
            if (row["name"], row["way"], tuple(row["shape"])) == (name, way, shape)
        }
        cells = [_cell(same.get(column), 1e12) for column in columns]
        lines.append([name, way, "x".join(map(str, shape)), *cells])
    return aligned(lines, left=3)


def loader_table(rows: Sequence[Row]) -> list[str]:
    """Return a table of batches per second by number of workers, read from the cache and from the images."""
    lines = [["read from", "workers", "samples/s", "batches/s", "first batch"]]
    for row in rows:
        batches = {**row, "per_second": row["per_second"] and row["per_second"] / row["batch_size"]}
        first = f"{row['first_s']:.2f} s" if row.get("first_s") is not None else "-"
        lines.append([row["source"], str(row["workers"]), _cell(row, 1), _cell(batches, 1), first])
    return aligned(lines, left=1)


def best_workers_text(rows: Sequence[Row]) -> str:
    """Return a recommendation for ``runtime.workers``: the fastest stable number when batches come from the cache.

    Only the cache matters, because training reads from it.
    """
    stable = [row for row in rows if row["source"] == "cache" and row["per_second"]]
    if not stable:
        return "Nothing could be read from the cache."
    best = max(stable, key=lambda row: row["per_second"])
    return f"Training reads from the cache: fastest and stable here is runtime.workers: {best['workers']}."


def problems(rows: Sequence[Row]) -> list[str]:
    """Return one line per reason for missing figures, with the rows that it affects."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row["problem"]:
            found.setdefault(row["problem"], []).append(title(row))
    return [f"{'; '.join(_distinct(titles))}: {problem}" for problem, titles in found.items()]


def title(row: Row) -> str:
    """Return the title of a row."""
    if "copy" in row:
        return f"{row['copy']} ({row['memory']}, {size_text(row['size_bytes'])})"
    if "source" in row:
        return f"{row['source']} with {count_text(row['workers'], 'worker')}"
    return " ".join([row["name"], row["way"], DTYPE_NAMES[row["dtype"]], row["variant"]]).strip()


def _cell(row: Row | None, unit: float) -> str:
    if row is None:
        return ""
    if row["per_second"] is None:
        return "-"
    value = row["per_second"] / unit
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


PART_NAMES = {
    "loading": "loader, host",
    "copy": "copies to the device",
    "check": "check of the copies",
    "wait": "waiting for the verdict, host",
}


def step_table(row: Row) -> list[str]:
    """Return a table with the rate, peak memory and parts of a training step.

    The times of the parts do not add up to the step time, because the host works ahead of the device.
    """
    parts = [
        [f"part: {PART_NAMES[name]}, ms", f"{1e3 * seconds:.2f}", f"{seconds / row['median_s']:.1%}"]
        for name, seconds in row["parts_s"].items()
    ]
    lines = [
        ["ms per step, median", f"{1e3 * row['median_s']:.1f}", ""],
        ["ms per step, 95th percentile", f"{1e3 * row['p95_s']:.1f}", ""],
        ["samples/s", f"{row['samples_per_s']:.2f}", ""],
        ["peak memory", size_text(row["memory_bytes"]), ""],
    ]
    return aligned([*lines, *parts], left=1)
