"""``lora-rocm fork``: create a run from a checkpoint of another one, and train it."""

from __future__ import annotations

from lora_rocm.commands import train
from lora_rocm.commands.output import Output
from lora_rocm.commands.run_request import RunRequest
from lora_rocm.commands.start_run import RunResult, render
from lora_rocm.supervisor.fork import ForkRequest, create_fork


def fork(
    request: ForkRequest, output: Output, *, gpus: int | None = None, supervised: bool = True, start: bool = True
) -> int:
    """Create a fork, train it unless ``start`` is false, and return the exit code.

    Raises:
        LoraRocmError: the fork is refused and nothing was created, or its training failed.
    """
    made = create_fork(request)
    output.notify(f"Forked from {made.origin.text}")
    continued = RunRequest.continuing(made.run_dir.path, supervised=supervised, gpus=gpus)
    if start:
        return train.train(continued, output)
    result = RunResult(made.run_dir.path, "prepared", 0, again=continued.resume_command(made.run_dir))
    return output.show(result, render(result))
