"""Resume of a run: finds and loads its checkpoint, and compares its recipe, data and base model with the run's."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.training_adapter import NAME as TRAINING_ADAPTER
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import ResumeError
from lora_rocm.families.base import ModelFamily
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.recipe.comparison import fingerprint
from lora_rocm.rundir.checkpoint_record import Position
from lora_rocm.train.base_seal import Seals, broken
from lora_rocm.train.checkpoint import Checkpoint, latest_valid, read_checkpoint
from lora_rocm.train.context import Data, StartContext
from lora_rocm.train.session import Session

RECIPE_DIFFERS = "The recipe differs from the checkpoint's in a key that may not change."
DATA_DIFFER = "The training data differ from the checkpoint's: samples, captions, or the encoders that encode them."
BASE_DIFFERS = "The base model differs from the checkpoint's."
ADAPTER_DIFFERS = "The training adapter (model.training_adapter) differs from the checkpoint's."


def find_checkpoint(session: Session, chosen: Path | None) -> Checkpoint | None:
    """The checkpoint to resume from: the chosen one, or the newest valid one. Damaged ones are reported and skipped.

    Raises:
        ResumeError: the chosen checkpoint is damaged.
    """
    run_dir = session.run_dir
    if session.rank == 0:
        run_dir.discard_unfinished(of_parent=False)
    if chosen is not None:
        checkpoint = read_checkpoint(chosen)
        if checkpoint is None:
            raise ResumeError(
                "checkpoint-damaged", "This checkpoint is damaged.", where=str(chosen), fix="Use --resume latest."
            )
        return checkpoint
    found, damaged = latest_valid(run_dir)
    for path in damaged:
        session.context.notice(f"The checkpoint {path.name} is damaged and was skipped.")
    return found


def require_same_base_and_data(
    start: StartContext, data: Data, family: ModelFamily, checkpoint: Checkpoint, seals: Seals
) -> Seals:
    """Refuse a checkpoint with a different base, data or recipe; return the base seals for the next checkpoint.

    Raises:
        ResumeError: recipe, data or base model differ from the checkpoint's.
    """
    facts, before = checkpoint.facts, checkpoint.facts.get("base_seals")
    compared = [("recipe", fingerprint(start.recipe), RECIPE_DIFFERS)]
    if before is None:
        start.context.notice(
            "The checkpoint was written by an earlier version, which named base and images differently: whether they "
            "are the same was not checked."
        )
    else:
        compared += [("data", data.identity(), DATA_DIFFER), ("base", family.base_facts()["identity"], BASE_DIFFERS)]
    found = [(key, what, "") for key, now, what in compared if facts[key] != now]
    for name in broken(before or {}, seals):
        own = name.startswith(TRAINING_ADAPTER)
        found.append(("training-adapter", ADAPTER_DIFFERS, "") if own else ("base", BASE_DIFFERS, f", {name}"))
    for key, what, more in found:
        if not start.accept_changes:
            raise ResumeError(
                f"resume-{key}-changed",
                what,
                where=f"{checkpoint.path}{more}",
                fix="Undo the change, start a new run, or continue anyway with --accept-changes.",
            )
    return seals if found else {**(before or {}), **seals}


def restore(checkpoint: Checkpoint, transfer: DeviceTransfer, adapter: Adapter, optimizer: GatedOptimizer) -> Position:
    """Load a checkpoint's tensors through the checked transfer, and return the run's position."""

    def sent(part: str) -> dict[str, Tensor]:
        return {
            name: transfer.send_checked(tensor, f"{part} {name}")
            for name, tensor in checkpoint.part_to_resume(part).items()
        }

    adapter.load(sent("adapter"))
    optimizer.load(sent("optimizer"), sent("ema") if optimizer.ema else None)
    return checkpoint.position
