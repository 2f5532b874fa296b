"""``lora-rocm`` with the faulty worker: ``python -m tests.hangs.drive train RECIPE ...``."""

from __future__ import annotations

from lora_rocm.supervisor import worker_process

worker_process.WORKER = "tests.hangs.faulty_worker"

from lora_rocm.cli import app  # noqa: E402 - everything that names the worker comes after it is renamed

app()
