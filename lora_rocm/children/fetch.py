"""Child process that asks the hub for a model, or downloads it: ``python -m lora_rocm.children.fetch JOB.json``.

It is a separate process, so that a download can be cancelled at any time. It does not import torch. It prints one
JSON object (``HubOffer`` or ``Fetched``) or an error event.
"""

from __future__ import annotations

import json
import sys

from lora_rocm.base_models.hub import fetch
from lora_rocm.base_models.hub_offer import offer
from lora_rocm.errors import LoraRocmError
from lora_rocm.processes.hub_jobs import Fetched, FetchJob, HubOffer, OfferJob
from lora_rocm.processes.job_file import to_json
from lora_rocm.processes.jobs import job_of

JOBS: tuple[type[OfferJob | FetchJob], ...] = (OfferJob, FetchJob)


def main() -> int:
    """Do the job, print its answer, and return the exit code."""
    try:
        found, code = to_json(_done(job_of(*JOBS))), 0
    except LoraRocmError as error:
        found, code = {"type": "error", **error.to_event()}, error.exit_code
    sys.stdout.write(json.dumps(found) + "\n")
    return code


def _done(job: OfferJob | FetchJob) -> HubOffer | Fetched:
    return offer(job.repo) if isinstance(job, OfferJob) else Fetched(str(fetch(job.repo, job.patterns)))


if __name__ == "__main__":
    sys.exit(main())
