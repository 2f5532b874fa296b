"""The main function of a heavy child that is asked for one JSON object (``processes.tool.run_for_json``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lora_rocm.errors import LoraRocmError


def answer(found_of: Callable[[Any], Mapping[str, object]]) -> int:
    """Read the JSON file that the first argument names, and write what ``found_of`` makes of it as one JSON object.

    An error is written as an error event. Returns the exit code.
    """
    try:
        found, code = found_of(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), 0
    except LoraRocmError as error:
        found, code = {"type": "error", **error.to_event()}, error.exit_code
    sys.stdout.write(json.dumps(found) + "\n")
    return code
