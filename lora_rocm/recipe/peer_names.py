"""Other trainers' names and values with our equivalents (``peer_names.toml``), for suggestions and documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lora_rocm.foundation.tables import read_table
from lora_rocm.recipe.adapter_sections import ADAPTERS
from lora_rocm.recipe.optim_sections import OPTIMIZERS

NO_SUCH_OPTIMIZER = (
    "Write adamw with optim.learning_rate: 1.0e-4, or prodigy with 1.0: a rate for another optimizer, such as SGD, "
    "does not fit them."
)
PER_EPOCH = "multiply by the steps per epoch, which lora-rocm check prints"


@dataclass(frozen=True)
class Advice:
    """Advice for other trainers' names without a direct equivalent: the key needs another value, or does not exist."""

    names: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class TheirSampling:
    """Another program's distribution of noise levels, and ours. number: that program's key for the shift."""

    program: str
    name: str
    timestep_sampling: str
    shift: str
    number: str = ""

    @property
    def ours(self) -> str:
        """Return the keys of our recipe to write in its place."""
        given = f" (or its {self.number})" if self.number else ""
        return f"{self.timestep_sampling} with shift: {self.shift}{given}"


@dataclass(frozen=True)
class TheirOptimizer:
    """Names of an optimizer in other programs, and ours. note: how it differs, as a clause; may be empty."""

    names: tuple[str, ...]
    ours: str
    note: str = ""


@dataclass(frozen=True)
class PeerNames:
    """The tables of ``peer_names.toml``.

    same_value: our key with the same meaning and unit, keyed by the other trainers' name.
    units: unit of a value, keyed by a word in its key.
    number_formats: the other trainers' names of each format, keyed by our name.
    schedulers: the name to write in our recipe, keyed by the other trainers' name.
    optimizers: names without the module, _ and -, in lower case.
    samplings: distributions of the noise level.
    """

    same_value: Mapping[str, str]
    units: Mapping[str, str]
    number_formats: Mapping[str, tuple[str, ...]]
    schedulers: Mapping[str, str]
    optimizers: tuple[TheirOptimizer, ...]
    samplings: tuple[TheirSampling, ...]
    advice: tuple[Advice, ...]


@cache
def peer_names() -> PeerNames:
    """Return the tables of ``peer_names.toml``. See ``read_table`` for errors."""
    return read_table(Path(__file__).with_name("peer_names.toml"), PeerNames)


@cache
def advice() -> Mapping[str, str]:
    """Return the advice for each name of another trainer."""
    samplings = ". ".join(f"{row.program}'s {row.name} is {row.ours}" for row in peer_names().samplings)
    texts = {row: row.text.replace("{samplings}", samplings) for row in peer_names().advice}
    return {name: text for row, text in texts.items() for name in row.names}


def value_advice(key: str, value: object) -> str:
    """Return advice if ``value`` is another trainer's value for the dotted ``key``; empty if none is known."""
    if key == "optim.lr_warmup_steps":
        return _warmup_advice(value)
    if key == "data.resolution" or key.startswith("data.sources["):
        return _resolution_advice(key, value)
    if not isinstance(value, str):
        return ""
    plain = value.strip().lower()
    if key in ("output.dtype", "lora.weight_dtype", "train.mixed_precision"):
        own = next((own for own, theirs in peer_names().number_formats.items() if plain in theirs), "")
        own = "no" if key == "train.mixed_precision" and own == "fp32" else own
        return f"Write {own}." if own and own != plain else ""
    if key == "lora.type":
        own = {"locon": "lora", "dora": "lora", "diag-oft": "oft"}.get(plain, plain)
        return f"Write {own}." if own in ADAPTERS else advice()["lora_type"]
    if key == "optim.optimizer":
        return _optimizer_advice(plain)
    if key.startswith("objective."):
        return _objective_advice(key, plain)
    if key == "runtime.device" and plain.partition(":")[0] in ("cuda", "hip", "rocm"):
        return "Write gpu; on AMD cards too."
    if key.startswith("output.formats") and ("safetensors" in plain or "comfy" in plain or "kohya" in plain):
        return "Write kohya: a .safetensors file that ComfyUI, Forge and kohya's tools read."
    return peer_names().schedulers.get(plain, "") if key == "optim.lr_scheduler" else ""


def _objective_advice(key: str, plain: str) -> str:
    if key == "objective.loss_type":
        return {"mse": "Write l2.", "mae": "Write l1."}.get(plain, "")
    if key != "objective.timestep_sampling":
        return ""
    name = plain.replace("-", "_")
    known = [row for row in peer_names().samplings if row.name == name]
    if not known:
        return "Write logit-normal or uniform; a shift is objective.shift."
    return f"Write {'; '.join(f'for {row.program} {row.ours}' for row in known)}."


def optimizer_of(name: str) -> tuple[str, str] | None:
    """Return (our optimizer, difference) for another trainer's optimizer; None if we have no similar one."""
    plain = name.strip().rpartition(".")[2].lower()
    if plain in OPTIMIZERS:
        return plain, ""
    found = _their_optimizer(plain)
    return None if found is None else (found.ours, found.note)


def _their_optimizer(name: str) -> TheirOptimizer | None:
    plain = name.rpartition(".")[2].lower().replace("_", "").replace("-", "")
    return next((row for row in peer_names().optimizers if plain in row.names), None)


def _optimizer_advice(name: str) -> str:
    found = _their_optimizer(name)
    if found is None:
        return f"Write {name}." if name in OPTIMIZERS else ""
    return f"Write {'; '.join(filter(None, (found.ours, found.note)))}."


def _warmup_advice(value: object) -> str:
    try:
        share = float(value)  # type: ignore[arg-type]  # raises for anything but a number
    except (TypeError, ValueError):
        return ""
    return (
        f"lr_warmup_steps counts optimizer updates. Write lr_warmup_ratio: {share:g} for a share of the run."
        if 0 < share < 1
        else ""
    )


def _resolution_advice(key: str, value: object) -> str:
    if not key.endswith("resolution"):
        return ""
    sides = str(value).lower().replace("x", ",").split(",") if isinstance(value, str) else []
    if len(sides) == 2 and all(side.strip().isdecimal() and len(side) < 8 for side in sides):
        width, height = (int(side) for side in sides)
        return f"Write one number, the side of a square of the same area: {round((width * height) ** 0.5)}."
    return ""
