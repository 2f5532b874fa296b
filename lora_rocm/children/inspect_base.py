"""Child process of ``lora-rocm inspect``: ``python -m lora_rocm.children.inspect_base JOB.json``.

It checks for which model families a path is a base model, and prints one JSON object (``Judgements``) or an error
event.
"""

from __future__ import annotations

import sys

from lora_rocm.children.json_child import answer
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.processes.jobs import InspectJob, Judgements
from lora_rocm.train.usable import judged


def main(registry: FamilyRegistry = FAMILIES) -> int:
    """Check the job's path, print the result, and return the exit code."""

    def found(job: InspectJob) -> Judgements:
        return Judgements({name: judged(job.path, registry[name], registry) for name in job.families})

    return answer(InspectJob, found)


if __name__ == "__main__":
    sys.exit(main())
