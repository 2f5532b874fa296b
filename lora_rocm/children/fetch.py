"""Child process of a download from the hub: ``python -m lora_rocm.children.fetch JOB.json``.

It is a process of its own, so that a download can be cancelled at any time. It prints the folder, or an error event.
"""

from __future__ import annotations

import sys

from lora_rocm.base_models.hub import fetch
from lora_rocm.children.json_child import answer
from lora_rocm.processes.jobs import Fetched, FetchJob


def main() -> int:
    """Download the files of the job, print the folder, and return the exit code."""
    return answer(FetchJob, lambda job: Fetched(str(fetch(job.repo, job.patterns))))


if __name__ == "__main__":
    sys.exit(main())
