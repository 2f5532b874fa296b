"""``lora-rocm env --shell cmd`` read by a real cmd (Wine's)."""

from __future__ import annotations

import subprocess
from pathlib import Path

from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.environment_text import described
from tests.commands.test_env import ROWS
from tests.hardware.situations import situation


def test_cmd_reads_every_value_as_it_is(wine_environment: dict[str, str], tmp_path: Path) -> None:
    rows = tuple(row for row in ROWS if row.value.isascii())
    lines = described(situation("cpu-only"), EnvPlan(rows), "cmd", explain=True).splitlines()
    batch = "\r\n".join(["@echo off", *lines, "set LR_TEST_", ""])
    (tmp_path / "plan.bat").write_bytes(batch.encode())
    done = subprocess.run(
        ["wine", "cmd", "/c", "plan.bat"], cwd=tmp_path, env=wine_environment, capture_output=True, timeout=120
    )
    found = dict(line.split("=", 1) for line in done.stdout.decode().splitlines() if "=" in line)
    assert found == {row.variable: row.value for row in rows if row.value}, "an empty value unsets"
