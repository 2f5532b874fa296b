"""A light child that reports rows, crashes and hangs according to the variable FAKE_ROWS: a list of (fields,
outcome).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from lora_rocm.errors import UserError
from tests.supervisor.wire import LineWriter

HANGS_S = 600.0


def main() -> int:
    job = json.loads(Path(sys.argv[-1]).read_text(encoding="utf-8"))
    with open(os.environ["FAKE_LOG"], "a", encoding="utf-8") as log:
        log.write(json.dumps(job) + "\n")
    rows = [row for row in json.loads(os.environ["FAKE_ROWS"]) if row[0].get("way") in (None, *job.get("ways", ()))]
    writer = LineWriter()
    for number, (fields, outcome) in enumerate(rows):
        if number < job["start"]:
            continue
        if outcome == "error":
            writer.write("error", **UserError("gone", "The model is gone.").to_event())
            return 2
        if outcome == "early":
            os._exit(9)
        writer.write("begin", number=number, limit_s=job["limit_s"], fields=fields)
        if outcome == "hang":
            time.sleep(HANGS_S)
        if outcome == "crash":
            os.abort()
        writer.write("row", number=number, **{"problem": None, **fields, **outcome})
    return 0


if __name__ == "__main__":
    sys.exit(main())
