"""The caches while others write, delete and die: real processes on one folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lora_rocm.cache_store import maintenance
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode import Caches
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.rundir.run_context import RunContext
from tests.fake_encoders import FakeFamily
from tests.program import snapshot

CAPTIONS = 60
OLD_S = 0.8  # of an entry, where the cache is pruned all the time
FILLER = """
import sys, time
from pathlib import Path
import torch
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.encoded_cache.encode import Caches
from lora_rocm.rundir.run_context import RunContext
from tests.fake_encoders import FakeFamily

root, pause_s = Path(sys.argv[1]), float(sys.argv[2])
family = FakeFamily()
words = family.text_encoder.tensors_of

def slowly(caption):
    time.sleep(pause_s)
    return words(caption)

family.text_encoder.tensors_of = slowly
ignore = lambda *facts: None
repaired = []
encoding = Encoding(LatentCache(root), torch.device("cpu"), context=RunContext(repaired.append))
caches = Caches(encoding, family.encoders())
print("ready", flush=True)
sys.stdin.readline()
captions = [f"caption {number}" for number in range(int(sys.argv[3]))]
caches.fill_texts(captions)
for caption in captions:
    assert torch.equal(caches.text_lookup(caption)["embeds"], words(caption)["embeds"])
print(len(family.text_encoder.encoded), flush=True)
"""


def filler(root: Path, pause_s: float = 0.0, captions: int = CAPTIONS) -> subprocess.Popen[bytes]:
    """A process that is ready to fill; it begins with a line on its standard input."""
    place = Path(__file__).parents[2]
    started = subprocess.Popen(
        [sys.executable, "-c", FILLER, str(root), str(pause_s), str(captions)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=place,
        env={**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert started.stdout is not None
    assert started.stdout.readline().strip() == b"ready", started.stderr and started.stderr.read().decode()
    return started


def begin(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"go\n")
    process.stdin.flush()


def encoded(process: subprocess.Popen[bytes]) -> int:
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()
    return int(out)


def undisturbed(tmp_path: Path) -> dict[str, bytes]:
    """In this process: the cache's files depend on the captions alone."""
    family, cache = FakeFamily(), LatentCache(tmp_path / "undisturbed")
    encoding = Encoding(cache, torch.device("cpu"), context=RunContext(pytest.fail))
    caches = Caches(encoding, family.encoders())
    caches.fill_texts([f"caption {number}" for number in range(CAPTIONS)])
    assert len(family.text_encoder.encoded) == CAPTIONS
    return snapshot(tmp_path / "undisturbed")


def entries(root: Path) -> dict[str, bytes]:
    return {name: content for name, content in snapshot(root).items() if name.endswith(".safetensors")}


@pytest.mark.slow
def test_two_processes_fill_one_cache(tmp_path: Path) -> None:
    """Both succeed, and the cache equals the cache of one process: no second copies, no half files."""
    both = [filler(tmp_path / "cache", 0.002) for _ in range(2)]
    for process in both:
        begin(process)
    assert all(encoded(process) <= CAPTIONS for process in both)
    assert snapshot(tmp_path / "cache") == undisturbed(tmp_path)


@pytest.mark.slow
def test_a_killed_filler_is_gone_on_from(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    done = 0
    for _ in range(2):
        process = filler(root, 0.05)  # three seconds for all, so that it is seen at work on a busy machine too
        begin(process)
        while len(entries(root)) < done + 8:
            time.sleep(0.002)
        process.kill()
        process.communicate()
        done = len(entries(root))
        assert done < CAPTIONS
    process = filler(root)
    begin(process)
    assert encoded(process) == CAPTIONS - done
    assert entries(root) == undisturbed(tmp_path)


@pytest.mark.slow
def test_a_run_fills_while_the_cache_is_pruned(tmp_path: Path) -> None:
    """Everything that is pruned is encoded again; the run ends right."""
    root = tmp_path / "cache"
    process = filler(root, 0.03)
    begin(process)
    said: list[str] = []
    while process.poll() is None:
        if root.is_dir():
            found = maintenance.prune(root, said.append, older_than_days=OLD_S / maintenance.DAY_S, dry_run=False)
            said += [why for why, number in found.deleted.items() if number]
        time.sleep(0.05)
    assert encoded(process) > CAPTIONS and "unused" in said
    expected = undisturbed(tmp_path)
    assert all(expected[name] == content for name, content in entries(root).items())
