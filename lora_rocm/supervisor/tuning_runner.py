"""Before a run, measures the attention backends if the recipe asks for it, and applies the measured choices.

The run directory gets a copy of the choices. A resumed run uses that copy; if it is no longer valid, the resume is
refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from lora_rocm.errors import LoraRocmError, MachineError, ResumeError, StorageError, UserError, WorkerDiedError
from lora_rocm.foundation.files import remove, write_atomic, write_json
from lora_rocm.foundation.json_text import parse_json
from lora_rocm.hardware.ranks import rank_of
from lora_rocm.hardware.settings import Attention
from lora_rocm.hardware.software_stack import stack_of
from lora_rocm.hardware.tuned_choice import Choice, Kind, Tuned, choice_from_json, store
from lora_rocm.processes.jobs import TuneAttentionJob
from lora_rocm.processes.row_runner import Row, run_rows
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.environment import plan
from lora_rocm.rules.rule import Situation
from lora_rocm.rules.tuned_rules import described, key_of, wants
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.selftest_runner import Notify

WAYS = ("sdpa", *get_args(Attention)[1:])
PACKAGES = ("flash", "aiter")
WORTH = 0.97
"""Another attention backend is chosen only if it takes at most this share of the time of torch's default."""
LIMIT_S, START_LIMIT_S = 120.0, 600.0
KINDS: tuple[Kind, ...] = ("attention", "products")


def without(situation: Situation) -> Situation:
    """Return the situation without measured choices.

    It is for processes of ``torchrun``, which have no common parent that could choose.

    Raises:
        UserError: the recipe names an attention package, which was not tested on this machine.
    """
    if situation.recipe is not None:
        _require_measurable(situation.recipe, "processes that torchrun starts use torch's own attention")
    return replace(situation, tuned=Tuned())


def ensure(
    run: RunDir, situation: Situation, accept_changes: bool, notify: Notify, module: str | None = None
) -> Situation:
    """Return the situation with the measured choices of this run, after storing them in the run directory.

    Raises:
        UserError: the attention backend that the recipe names is missing, or gives wrong results.
        MachineError: no attention backend is correct at the shapes of this recipe.
        ResumeError: the choices stored in the run are no longer valid.
    """
    stack, recipe = stack_of(situation.facts, situation.selection), situation.recipe
    if recipe is None or rank_of(os.environ).size > 1:
        if run.tuned.exists():
            notify("Processes started by torchrun cannot use the measured choices that this run began with.")
        return without(situation)
    # Which choices this run wants
    wanted = [kind for kind in KINDS if wants(kind, recipe)] if stack is not None else []
    if "attention" not in wanted:
        _require_measurable(
            recipe, "it needs a GPU and cannot be combined with runtime.deterministic or runtime.compile"
        )
    if stack is None or not wanted:
        if not any(wants(kind, recipe) for kind in KINDS):  # else the GPU is only not visible now
            _forget(run, notify)
        return replace(situation, tuned=Tuned())
    keys = {kind: key_of(kind, stack, recipe) for kind in wanted}
    # the keys that control the measurement; they may change on resume
    asked = recipe.runtime.model_dump(mode="json", include={"attention", "profile", "compile", "deterministic"})
    kept = _kept(run, asked, keys, accept_changes) if run.list_checkpoints() else None
    if kept is None:
        attention = situation.tuned.attention
        if "attention" in wanted and attention is None:
            attention = measure_attention(situation, recipe, keys["attention"], notify, module)
        kept = {"attention": attention, "products": situation.tuned.products}
        write_json(run.tuned, {"asked": asked, **{k: c and c.to_json() for k, c in kept.items()}}, run.path)
    products = kept["products"]
    if products is not None:
        write_atomic(run.table, products.chosen.encode("ascii"), run.path)
    return replace(situation, tuned=Tuned(kept["attention"], products, str(run.table) if products else ""))


def _require_measurable(recipe: Recipe, why: str) -> None:
    if recipe.runtime.attention in PACKAGES:
        raise unavailable(recipe.runtime.attention, why)


def unavailable(backend: str, why: str) -> UserError:
    """Return the error for an attention backend that the recipe names but that cannot be used."""
    return UserError(
        "attention-unavailable",
        f"This attention backend cannot be used here: {why}.",
        where=f"runtime.attention: {backend}",
        fix="Set runtime.attention to auto: torch's own attention needs no other package.",
    )


def _kept(
    run: RunDir, asked: Mapping[str, Any], keys: Mapping[Kind, Mapping[str, Any]], accept_changes: bool
) -> dict[Kind, Choice | None] | None:
    """Return the stored choices of a run with checkpoints, or None if there are none or the recipe now asks for others.

    asked: recipe values that control the measurement.
    keys: current conditions for each kind of choice.

    Raises:
        ResumeError: the choices were made on another GPU, driver or software, or are damaged.
    """
    try:
        value = parse_json(run.tuned.read_text(encoding="utf-8"))
        kept: dict[Kind, Choice | None] = {}
        for kind in KINDS:
            kept[kind] = None if value[kind] is None else choice_from_json(value[kind])
        same = value["asked"] == asked
    except FileNotFoundError:
        if accept_changes or not _in_force_before(run, keys):
            return None
        raise _refused(run, "The file with the measured choices of this run is missing.", "") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        if accept_changes:
            return None
        raise _refused(run, "The file with the measured choices of this run is damaged.", "") from None
    for kind, choice in kept.items() if same else ():
        if choice is not None and choice.key != keys[kind]:
            if accept_changes:
                return None
            what = f"This run uses {kind} measured on another GPU, driver or software, or with another recipe."
            raise _refused(run, what, _difference(choice.key, keys[kind]))
    return kept if same else None


def _in_force_before(run: RunDir, keys: Mapping[Kind, Mapping[str, Any]]) -> bool:
    """Whether the last start of a run used measured choices of these kinds, according to its environment file."""
    rules = {"attention": "measured-attention", "products": "tuned-products"}
    try:
        rows = parse_json(run.environment.read_text(encoding="utf-8"))["settings"]
        return any(row["rule"] == rules[kind] for row in rows for kind in keys)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    earlier = {part: values if isinstance(values := then.get(part), dict) else {} for part in now}
    changed = [
        f"{name}: {earlier[part].get(name)} then, {values.get(name)} now"
        for part, values in now.items()
        if isinstance(values, dict)
        for name in sorted({*values, *earlier[part]})
        if earlier[part].get(name) != values.get(name)
    ]
    return "; ".join(changed[:3])


def _refused(run: RunDir, what: str, where: str) -> ResumeError:
    return ResumeError(
        "resume-tuned-changed",
        what,
        where=f"{run.tuned}{': ' * bool(where)}{where}",
        fix="Undo the change, start a new run, or measure again and continue with --accept-changes.",
    )


def _forget(run: RunDir, notify: Notify) -> None:
    """Remove the choices of an earlier start, because the recipe no longer asks for any."""
    if run.tuned.exists():
        notify("The run no longer uses the measured choices that it began with: the recipe no longer asks for them.")
        with suppress(OSError):
            remove(run.tuned)


def measure_attention(
    situation: Situation, recipe: Recipe, key: Mapping[str, Any], notify: Notify, module: str | None = None
) -> Choice:
    """Try the attention backends in child processes, store the choice of the fastest correct one, and return it.

    Raises:
        UserError: the backend that the recipe names is missing, or gives wrong results.
        MachineError: no backend is correct.
    """
    asked, rows, ways = recipe.runtime.attention, list[Row](), backends_for(situation)
    if asked == "sdpa" and asked not in ways:
        raise unavailable(asked, "a fused kernel of torch failed the self-test of this GPU")
    ways = ways if asked == "auto" else (asked,)
    notify("Measuring attention at the shapes of this recipe ...")
    env = plan(replace(situation, tuned=Tuned())).applied_to(os.environ)
    job = TuneAttentionJob(recipe=recipe.model_dump(mode="json"), ways=tuple(ways), limit_s=LIMIT_S)
    died = ""
    try:
        run_rows(job, env, rows.append, start_limit_s=START_LIMIT_S, module=module)
    except WorkerDiedError as error:
        died = error.what.splitlines()[0]
    kept = [{name: row.get(name) for name in ("way", "seconds", "problem", "error", "shapes")} for row in rows]
    choice = Choice("attention", dict(key), fastest(kept), kept)
    if not choice.chosen:
        raise _none_right(asked, kept, died)
    notify(f"Attention: {choice.chosen}. {described(kept)}")
    try:
        store(Path(situation.app_dir), choice)
    except StorageError as error:
        notify(f"The measurement could not be stored, so the next run repeats it. {error}")
    return choice


def _none_right(asked: str, rows: Sequence[Row], died: str) -> LoraRocmError:
    if asked != "auto":
        return unavailable(asked, rows[0]["problem"] if rows else died)
    return MachineError(
        "no-attention",
        "No attention backend is correct on this GPU at the shapes of this recipe. Nothing was trained.",
        where=died or described(rows),
        fix="lora-rocm doctor lists known problems of this machine.",
    )


def backends_for(situation: Situation) -> tuple[str, ...]:
    """Return the attention backends to try on this machine.

    Backends that failed the self-test are excluded. If there are any, torch's own choice is excluded, too.
    """
    verdict, names = situation.verdict, ("flash", "efficient", "cudnn")
    failed = {name for name in names if verdict is not None and verdict.failed(f"attention.{name}.")}
    held_out = {name for name in names if f"attention-{name}-off" in situation.changes}
    own = failed or (verdict is not None and verdict.failed("attention.default."))
    out = {f"sdpa-{name}" for name in failed | held_out} | ({"sdpa"} if own else set())
    return tuple(way for way in WAYS if way not in out)


def fastest(rows: Sequence[Row]) -> str:
    """Return the fastest correct backend; "" if none is correct.

    Torch's own choice is returned if no other backend is clearly faster.
    """
    right = {row["way"]: row["seconds"] for row in rows if row["problem"] is None}
    if not right:
        return ""
    best = min(right, key=lambda backend: right[backend])
    return "sdpa" if "sdpa" in right and right[best] > WORTH * right["sdpa"] else best
