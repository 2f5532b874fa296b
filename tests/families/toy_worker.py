"""The training child that knows the toy families too: ``python -m tests.families.toy_worker RUN_DIR ...``."""

from __future__ import annotations

import sys

from lora_rocm.train import worker
from tests.families.toy_families import TOYS


def main(arguments: list[str] | None = None) -> int:
    return worker.main(arguments, TOYS)


if __name__ == "__main__":
    sys.exit(main())
