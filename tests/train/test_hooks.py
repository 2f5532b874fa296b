"""When hooks are due, and a held-out loss that is the same whenever it is asked."""

from __future__ import annotations

import copy
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_rocm.families.objectives.base import Prediction
from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train.held_out import VALIDATION_POSITIONS
from lora_rocm.train.hooks import CallEvery, Save, TensorBoard, Validation
from lora_rocm.train.loop import SaveClock, Trainer
from tests.event_lines import read_events
from tests.supervisor.fake_run import event, listening, step_fields
from tests.telemetry.trees import read_as
from tests.train.test_loop import Corruptor, Rig, batches
from tests.wording import says

NUMBERS = {"loss": 1.0, "learning_rate": 0.1, "grad_norm": 2.0, "step_s": 0.1, "loss_scale": 1.0}


def held_out(rig: Rig) -> Validation:
    def three_batches():  # type: ignore[no-untyped-def]
        stream = batches(accumulation=1)(100)
        return (next(stream) for _ in range(3))

    family: Any = rig.trainer.family
    family.fixed_draw = lambda batch, seeds, place: family.draw(batch, seeds)
    return Validation(2, three_batches)


def losses(rig: Rig) -> list[float]:
    return [event["loss"] for event in rig.of_type("validation")]


def test_call_every() -> None:
    hook = CallEvery(3, lambda updates: None)
    assert [updates for updates in range(1, 10) if hook.due(updates)] == [3, 6, 9]
    assert not any(CallEvery(0, lambda updates: None).due(updates) for updates in range(1, 10))


def test_the_held_out_loss_falls_and_does_not_disturb_training() -> None:
    watched = Rig()
    watched.trainer.hooks = [held_out(watched)]
    watched.fit(40)
    plain = Rig().fit(40)
    assert len(losses(watched)) == 20 and losses(watched)[-1] < losses(watched)[0]
    for name, weight in plain.weights().items():
        assert weight.equal(watched.weights()[name])


def test_the_held_out_loss_is_a_function_of_the_weights() -> None:
    rig = Rig()
    hook = held_out(rig)
    hook.act(rig.trainer)
    hook.act(rig.trainer)
    assert losses(rig)[0] == losses(rig)[1]
    rig.fit(3)
    hook.act(rig.trainer)
    assert losses(rig)[2] != losses(rig)[0]  # negative control


def test_a_watched_family_is_asked_in_place_of_the_one_in_training() -> None:
    rig = Rig()
    hook = held_out(rig)
    hook.act(rig.trainer)
    watched: Any = copy.copy(rig.trainer.family)

    def predict(*args: Any) -> Prediction:
        found = rig.trainer.family.predict(*args)
        return replace(found, measures={"half": torch.full((len(found.prediction),), 0.5)})

    watched.predict = predict
    replace(hook, watched=watched).act(rig.trainer)
    (plain,), (found,) = rig.of_type("validation"), rig.of_type("watched")
    assert found["loss"] == plain["loss"] and found["measures"] == {"half": 0.5} and plain["measures"] == {}


def test_a_held_out_pass_says_that_it_gets_on_and_when_it_waits_for_the_loader() -> None:
    rig, activities = Rig(), list[str]()
    rig.trainer.context = replace(rig.trainer.context, beat=activities.append)
    held_out(rig).act(rig.trainer)
    batch = ["loader", *["validation"] * len(VALIDATION_POSITIONS)]
    assert activities == [*batch * 3, "loader"]


def test_a_corrupted_held_out_batch_is_sent_again() -> None:
    clean, hit = Rig(), Rig(copy=Corruptor({2}, ("unpinned",)))
    for rig in (clean, hit):
        held_out(rig).act(rig.trainer)
    assert losses(hit) == losses(clean) and hit.trainer.transfer.failures == 1


def test_a_checkpoint_comes_by_steps_and_when_the_clock_asks_and_not_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every update takes 20 s of a made-up clock, and a checkpoint is asked for every minute and every seventh step."""
    saved: list[int] = []
    now = [0.0]
    monkeypatch.setattr(
        "lora_rocm.train.loop.time", SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    )
    clock = SaveClock(minutes=1.0)
    rig = Rig(hooks=[Save(7, clock, saved.append)])
    real = rig.trainer._update

    def update(work: Any) -> Any:
        now[0] += 20.0
        return real(work)

    rig.trainer.clock, rig.trainer._update = clock, update  # type: ignore[method-assign]
    rig.fit(16)
    assert saved == [4, 7, 11, 14]  # asked at the third, known to all at its verdict, written after the next
    off = Rig(hooks=[Save(0, None, saved.append)]).fit(5)
    assert len(saved) == 4 and off.trainer.position.updates == 5


def test_checkpoints_are_called_with_confirmed_updates(tmp_path: Path) -> None:
    called: list[int] = []
    rig = Rig(hooks=[CallEvery(2, called.append)])
    rig.fit(5)
    assert called == [2, 4] and isinstance(rig.trainer, Trainer)


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    said: list[str] = []
    writer = TensorBoard(RunDir(tmp_path).tensorboard, listening(said))
    writer(event("step", **step_fields(1, loss_scale=1.0, optimizer={"prodigy_d": 1e-4})))
    writer(event("notice", text="nothing to plot"))
    writer(event("end", reason="done", updates=1, exit_code=0))
    (file,) = RunDir(tmp_path).tensorboard.iterdir()
    assert b"step/loss" in file.read_bytes() and b"step/grad_norm" in file.read_bytes()
    assert b"step/prodigy_d" in file.read_bytes()
    assert read_events(RunDir(tmp_path).events()) == [] and said == []


def test_tensorboard_gets_the_readings_of_the_gpu_that_are_new(tmp_path: Path) -> None:
    said: list[str] = []
    run_dir = RunDir(tmp_path)
    supervisor = EventWriter(run_dir.events("supervisor"))
    supervisor.write(read_as(power_w=None, temperatures_c={"old": 1.0}))
    writer = TensorBoard(run_dir.tensorboard, listening(said), run_dir.events("supervisor"))
    supervisor.write(read_as(updates=1))
    supervisor.close()
    writer(event("step", **step_fields(1)))
    writer(event("end", reason="done", updates=1, exit_code=0))
    (file,) = run_dir.tensorboard.iterdir()
    assert b"telemetry/gpu0/power_w" in file.read_bytes() and b"temperature_junction_c" in file.read_bytes()
    assert b"temperature_old_c" not in file.read_bytes() and said == []


def test_tensorboard_does_without_a_supervisor(tmp_path: Path) -> None:
    said: list[str] = []
    for name in ("none", "folder"):
        place = tmp_path / name
        place.mkdir()
        if name == "folder":
            (place / "events.supervisor.jsonl").mkdir()
        writer = TensorBoard(place / "tensorboard", listening(said), RunDir(place).events("supervisor"))
        writer(event("step", **step_fields(1)))
        writer(event("end", reason="done", updates=1, exit_code=0))
        (file,) = (place / "tensorboard").iterdir()
        for _ in range(100):  # another thread writes it
            if b"step/loss" in file.read_bytes():
                break
            time.sleep(0.1)
        assert b"step/loss" in file.read_bytes()
    assert len(said) == 1 and says(said[0], "train/no-readings-of-the-gpu-for-tensorboard")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("gone", [False, True])
def test_no_run_ends_for_tensorboard(tmp_path: Path, gone: bool) -> None:
    """Its folder is a file from the start, or is taken away while its thread writes."""
    folder, said, before = tmp_path / "tensorboard", list[str](), set(threading.enumerate())
    if not gone:
        folder.write_text("in the way", encoding="utf-8")
    writer = TensorBoard(folder, listening(said))
    for updates in range(1, 40):
        if gone and updates == 3:
            shutil.rmtree(folder)
        writer(event("step", **step_fields(updates)))
        time.sleep(0.001)
    writer(event("end", reason="done", updates=39, exit_code=0))
    for thread in set(threading.enumerate()) - before:
        thread.join(10)  # it ends with an error, which must not count for a later test
    assert len(said) == 1 and str(folder) in said[0] and says(said[0], "train/training-goes-on")
