"""Start-up costs: encoding, a manifest of a million images, the time to the first step, a base's identity.

usage: python benchmarks/startup.py encode ROOT [--images 10000] [--side 1536] [--encode-s 0.06] [--vae] [--json FILE]
       python benchmarks/startup.py manifest ROOT [--images 1000000] [--json FILE]
       python benchmarks/startup.py first-step ROOT [--recipe recipes/demo.yaml] [--set KEY=VALUE]... [--json FILE]
       python benchmarks/startup.py side-by-side ROOT OLD NEW [--base full|tiny] [--rounds 5] [--set KEY=VALUE]...
       python benchmarks/startup.py identity ROOT [--gib 2] [--json FILE]

``encode`` makes photographs (JPEG, noise over a gradient; all files differ) under ROOT, and fills a cache with them by
``encoded_cache.prepare``. The lower bound is the encoder alone, called equally often, on pixels that are ready.
The encoder is a wait of fixed length, as a GPU is for the host. With ``--vae`` it is the built-in model's VAE on the
CPU, and the decoding threads and the encoder share the CPU cores.

``manifest`` makes tiny images and a cache entry for each, once, and reports two starts, each in a separate process:
one that reads everything, and one after it. Captions are empty, so there is one text entry. "Before" is after imports.

``first-step`` trains two steps, twice: the second start finds a warm cache.

``side-by-side`` writes an SDXL base of random numbers to disk (a diffusers folder, float16; full: 6.9 GB) and a few
images, and starts two checkouts in turns. Each checkout has its own caches, which an earlier start has filled, so that
caches are warm and digests cached. It reports the seconds from the command to the events of a start, and their ratio.

``identity`` writes a file of random numbers and reads it with and without hashing, from a warm page cache.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import io
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from lora_rocm.base_models.loading import WeightsVersion, builtin_folder
from lora_rocm.base_models.random_weights import PREFIX, RandomSource, random_source
from lora_rocm.base_models.safetensors_file import digest, read_hashed, read_tensors
from lora_rocm.cache_store.hash_memory import WEIGHTS_MEMORY, FileState, HashMemory, remembered_line
from lora_rocm.dataset.entry_spec import CAPTION, IMAGE, EntrySpec, TensorSpec
from lora_rocm.dataset.images.buckets import choose_bucket
from lora_rocm.encoded_cache.cache import LatentCache, entry_key, image_parts
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.encoded_cache.prepare import prepare
from lora_rocm.families.base import family_for
from lora_rocm.families.sdxl.family import LAYOUT
from lora_rocm.loader.batches import BatchPlan, loader, open_workers
from lora_rocm.model_files.header import read_header
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from tests.event_lines import read_events

CPU = torch.device("cpu")
SOME_KEY = "0" * 40
TINY = "builtin:tiny-sdxl"
STRUCTURES = {"full": "stabilityai/stable-diffusion-xl-base-1.0", "tiny": TINY}
START_LIMIT_S = 900.0
MARKS = ("start", "phase cache end", "phase load end", "step")


class Wait:
    """An encoder that takes a fixed time, during which the host is free. Its output depends on the pixels."""

    def __init__(self, entry: EntrySpec, seconds: float, fingerprint: str) -> None:
        self.entry, self.fingerprint, self._seconds = entry, fingerprint, seconds
        self.encoded = 0

    def in_tiles(self) -> None:
        return None

    def load(self, door: Any) -> Callable[[Mapping[str, Tensor | str]], dict[str, Tensor]]:
        return self._encode

    def _encode(self, inputs: Mapping[str, Tensor | str]) -> dict[str, Tensor]:
        (item,) = inputs.values()
        self.encoded += 1
        time.sleep(self._seconds)
        if isinstance(item, str):
            return {"prompt_embeds": torch.full((4, 4), float(len(item)))}
        small_CHW = item[:, ::8, ::8].contiguous()
        return {"latent_mean": torch.cat([small_CHW, small_CHW[:1]]), "latent_std": torch.ones_like(small_CHW)}


class Family:
    """The part of a family that ``prepare`` uses."""

    texts = None
    inpaints = False

    def __init__(self, image: Any, text: Any) -> None:
        self._encoders = [image, text]

    def encoders(self) -> list[Any]:
        return self._encoders

    def token_limits(self) -> list[Any]:
        return []


def fake_family(encode_s: float) -> Family:
    """Return a family with an image encoder that takes ``encode_s`` per image."""
    latents = {"latent_mean": TensorSpec("float32", "CHW"), "latent_std": TensorSpec("float32", "CHW")}
    texts = {"prompt_embeds": TensorSpec("float32", "SD")}
    image, text = EntrySpec("image", (IMAGE,), latents, True), EntrySpec("text", (CAPTION,), texts)
    return Family(Wait(image, encode_s, "wait-image"), Wait(text, 0.0, "wait-text"))


def recipe_for(folder: Path, resolution: int, model: str = TINY, **data: Any) -> Recipe:
    """Return a recipe over a folder of images."""
    section = {"path": str(folder), "resolution": resolution, "caption_fallback": "filename", **data}
    return recipe_from({"model": {"name_or_path": model}, "data": section, "train": {"max_train_steps": 1}})


def make_photographs(folder: Path, count: int, side: int) -> None:
    """Make JPEG files of ``side`` x 3/4 ``side`` with different bytes and equal decoding cost."""
    folder.mkdir(parents=True, exist_ok=True)
    height = side * 3 // 4
    slope_HW = np.add.outer(np.arange(height), np.arange(side)) % 256
    noise_HWC = np.random.default_rng(0).integers(0, 32, (height, side, 3))
    file = io.BytesIO()
    Image.fromarray((slope_HW[..., None] // 2 + noise_HWC).astype(np.uint8)).save(file, "JPEG", quality=90)
    for index in range(count):
        path = folder / f"an image number {index:07d}.jpg"
        if not path.exists():
            path.write_bytes(file.getvalue() + index.to_bytes(8, "little"))  # after the end of the image data


def encode(options: argparse.Namespace) -> dict[str, Any]:
    """Fill a cache, and time the encoder alone for comparison."""
    folder, cache = options.root / "photographs", options.root / "cache"
    make_photographs(folder, options.images, options.side)
    shutil.rmtree(cache, ignore_errors=True)
    recipe = recipe_for(folder, options.resolution)
    family: Any = family_for(recipe) if options.vae else fake_family(options.encode_s)
    image = next(encoder for encoder in family.encoders() if encoder.entry.inputs == (IMAGE,))
    floor_s = _floor_s(image, options)
    family = Family(image, fake_family(0.0).encoders()[1])
    process, seen = psutil.Process(), [0.0]
    began, encoding = time.perf_counter(), [0.0, 0.0]

    def watch(what: str, done: int, total: int, per_second: float) -> None:
        seen[0] = max(seen[0], process.memory_info().rss / 2**20)
        if what == "images":
            encoding[0], encoding[1] = encoding[0] or time.perf_counter(), time.perf_counter()

    prepared = prepare(recipe, family, Encoding(LatentCache(cache), CPU, watch))
    total_s = time.perf_counter() - began
    return {
        "images": len(prepared.items),
        "megapixels": round(options.side * (options.side * 3 // 4) / 1e6, 2),
        "threads of torch": torch.get_num_threads(),
        "floor s": round(floor_s, 2),
        "all s": round(total_s, 2),
        "images/s": round(len(prepared.items) / total_s, 1),
        "share of the floor": round(floor_s / total_s, 3),
        "share without scan and captions": round(floor_s / max(encoding[1] - encoding[0], 1e-9), 3),
        "most resident MiB": round(seen[0]),
    }


def _floor_s(image: Any, options: argparse.Namespace) -> float:
    """Return the time of the encoder alone on ready pixels, extrapolated from a part of the images."""
    from lora_rocm.encoded_cache.encode_session import plain_placement

    if not options.vae:
        return float(options.encode_s * options.images)
    height, width = options.resolution * 7 // 8 // 64 * 64, options.resolution * 9 // 8 // 64 * 64
    run, count = image.load(plain_placement(CPU)), min(options.images, 20)
    pixels_CHW = torch.rand(3, height, width) * 2 - 1
    run({IMAGE: pixels_CHW})
    began = time.perf_counter()
    for _ in range(count):
        run({IMAGE: pixels_CHW})
    return (time.perf_counter() - began) / count * options.images


def make_manifest(folder: Path, cache: Path, count: int) -> None:
    """Make tiny images without captions, 1000 per folder, with cached hashes and cache entries."""
    if (folder / "made").exists():
        return
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 100, 50)).save(file, "PNG")
    recipe = recipe_for(folder, 64, caption_fallback="empty")
    cut = choose_bucket(64, 64, 64, recipe.data.bucket_step, recipe.data.bucket_max_aspect, True, True)
    latents = {"latent_mean": torch.ones(4, 8, 8), "latent_std": torch.ones(4, 8, 8)}
    entry = LatentCache(cache).content_of("image", SOME_KEY, latents, "")
    for part in range(256):
        (cache / "image" / f"{part:02x}").mkdir(parents=True, exist_ok=True)
    with (cache / "hashes.jsonl").open("ab") as remembered:
        for index in range(count):
            path = folder / f"part {index // 1000:05d}" / f"image {index:07d}.png"
            if index % 1000 == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
            content = file.getvalue() + index.to_bytes(8, "little")
            path.write_bytes(content)
            sha256 = hashlib.sha256(content).hexdigest()
            remembered.write(remembered_line(FileState.of(path), sha256))
            key = entry_key("image", image_parts(sha256, cut, False), "wait-image")
            (cache / "image" / key[:2] / f"{key}.safetensors").write_bytes(
                entry.replace(SOME_KEY.encode(), key.encode())
            )
    (folder / "made").touch()


def manifest(options: argparse.Namespace) -> dict[str, Any]:
    """Run two starts, each in its own process; with ``--measure``, run one start in this process."""
    root = options.root / f"manifest {options.images}"
    folder, cache = root / "images", root / "cache"
    # the parent: make the images, start two measuring processes
    if not options.measure:
        made, began = (folder / "made").exists(), time.perf_counter()
        make_manifest(folder, cache, options.images)
        told = {} if made else {"making it s": round(time.perf_counter() - began, 1)}
        command = [sys.executable, __file__, "manifest", str(options.root), "--images", str(options.images)]
        runs = [json.loads(subprocess.check_output([*command, "--measure"])) for _ in range(2)]
        return {"images": options.images, **told, "first start": runs[0], "next start": runs[1]}
    # the measuring process: one start, up to the first batch
    gc.collect()
    process = psutil.Process()
    before_mib, times = process.memory_info().rss / 2**20, [("", time.perf_counter())]

    def mark(name: str) -> None:
        times.append((name, time.perf_counter()))

    recipe = recipe_for(folder, 64, caption_fallback="empty")
    family: Any = fake_family(0.0)
    family.sample_meta = lambda *sizes: {"time_ids": torch.zeros(6)}
    prepared = prepare(recipe, family, Encoding(LatentCache(cache), CPU))
    mark("items")
    plan = BatchPlan(prepared.items, 4, 1, 0)
    mark("plan")
    workers = open_workers(LatentCache(cache), prepared.entries, recipe.runtime)
    next(loader(plan, family, workers, 0, 1))
    mark("first batch")
    peak_mib, now_mib = most_resident_mib(), process.memory_info().rss / 2**20
    seconds = {name: round(at - before, 2) for (_, before), (name, at) in itertools.pairwise(times)}
    return {
        "seconds": seconds,
        "to the first batch s": round(times[-1][1] - times[0][1], 2),
        "images/s": round(len(prepared.items) / (times[1][1] - times[0][1])),
        "resident MiB before": round(before_mib),
        "resident MiB": round(now_mib),
        "most resident MiB": round(peak_mib),
        "bytes per image": round((now_mib - before_mib) * 2**20 / options.images),
        "bytes per image at most": round((peak_mib - before_mib) * 2**20 / options.images),
    }


def most_resident_mib() -> float:
    """Return the peak resident memory of this process; the present one if the system does not report the peak."""
    info, status = psutil.Process().memory_info(), Path("/proc/self/status")
    if not status.exists():
        return float(getattr(info, "peak_wset", info.rss) / 2**20)
    lines = status.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 2**10 for line in lines if line.startswith("VmHWM:"))


def first_step(options: argparse.Namespace) -> dict[str, Any]:
    """Run two steps twice; return seconds from the command to each event."""
    command = [sys.executable, "-m", "lora_rocm", "train", str(options.recipe)]
    keys = ["train.max_train_steps=2", "sample.every_n_steps=0", f"cache.dir={options.root / 'cache'}", *options.set]
    settings = [part for key in keys for part in ("--set", key)]
    told = {}
    for name in ("first", "warm"):
        run_dir = RunDir(options.root / f"run {name}")
        shutil.rmtree(run_dir.path, ignore_errors=True)
        began = time.time()
        subprocess.run([*command, *settings, "--run-dir", str(run_dir.path)], check=True, stdout=subprocess.DEVNULL)
        times = {"parent is ready": run_dir.environment.stat().st_mtime}
        for event in read_events(run_dir.events()):
            what = f"{event['type']} {event.get('phase', '')} {event.get('state', '')}".strip()
            times.setdefault(what, event["time"])
        wanted = ("parent is ready", "start", "phase cache begin", "phase cache end", "phase load end", "step", "end")
        told[name] = {what: round(times[what] - began, 2) for what in wanted}
    return told


def write_base(folder: Path, structure: str) -> None:
    """Write a diffusers folder of random float16 weights, once; its tokenizers are the tiny model's."""
    if (folder / "model_index.json").exists():
        return
    source: RandomSource = random_source(f"{PREFIX}{STRUCTURES[structure]}", LAYOUT)
    tiny = builtin_folder(TINY)
    for name in LAYOUT.parts:
        (folder / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(source.config_path(name), folder / name / "config.json")
        state = source.load(name, torch.float16, CPU).state_dict()
        stem = "model" if name.startswith("text") else "diffusion_pytorch_model"
        save_file(state, folder / name / f"{stem}.safetensors", {"format": "pt"})
    for name in LAYOUT.tokenizers:
        shutil.copytree(tiny / name, folder / name, dirs_exist_ok=True)
    (folder / "scheduler").mkdir(exist_ok=True)
    shutil.copy(source.config_path("scheduler"), folder / "scheduler" / "scheduler_config.json")
    shutil.copy(tiny / "model_index.json", folder / "model_index.json")  # written last: marks the base as complete


def side_by_side(options: argparse.Namespace) -> dict[str, Any]:
    """Start two checkouts in turns, each with its own caches."""
    root = options.root.absolute()
    write_base(root / options.base, options.base)
    make_photographs(root / "images", 4, 1024 if options.base == "full" else 128)
    # one recipe for both checkouts
    recipe = root / "recipe.yaml"
    sections = {
        "model": {"name_or_path": str(root / options.base)},
        "data": {"path": str(root / "images"), "resolution": 1024 if options.base == "full" else 128},
        "train": {"max_train_steps": 1000},
    }
    recipe.write_text(json.dumps(sections), encoding="utf-8")  # JSON is YAML
    # start them in turns
    checkouts = {"old": options.old.absolute(), "new": options.new.absolute()}
    found: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
    for number in range(options.rounds + 1):
        for name, checkout in checkouts.items():
            seconds = one_start(
                checkout, recipe, root / f"run {name}", [f"cache.dir={root / f'cache {name}'}", *options.set]
            )
            if number:  # the first round fills the caches
                found[name].append(seconds)
    # compare the medians
    medians = {
        name: {mark: round(statistics.median(each[mark] for each in starts), 2) for mark in MARKS}
        for name, starts in found.items()
    }
    ratio = medians["new"]["step"] / medians["old"]["step"]
    return {
        "base": options.base,
        "rounds": options.rounds,
        "median s": medians,
        "new / old": round(ratio, 4),
        "all s": found,
    }


def one_start(checkout: Path, recipe: Path, run_dir: Path, settings: Sequence[str]) -> dict[str, float]:
    """Return seconds from the command to each event up to the first step; then stop the run."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run = RunDir(run_dir)
    command = [sys.executable, "-m", "lora_rocm", "train", str(recipe), "--run-dir", str(run_dir)]
    command += [part for key in settings for part in ("--set", key)]
    began = time.time()
    path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH", ""))))
    child = subprocess.Popen(command, cwd=checkout, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL)
    times: dict[str, float] = {}
    while "step" not in times:
        if child.poll() is not None or time.time() - began > START_LIMIT_S:
            child.kill()
            raise SystemExit(f"{checkout} made no step: see {run_dir}")
        time.sleep(0.05)
        for event in read_events(run.events()) if run.events().exists() else ():
            what = f"{event['type']} {event.get('phase', '')} {event.get('state', '')}".strip()
            times.setdefault(what, round(event["time"] - began, 3))
    run.stop.touch()
    child.wait()
    return {mark: times[mark] for mark in MARKS}


def identity(options: argparse.Namespace) -> dict[str, Any]:
    """Return GB/s of each method to read a weights file, and the time to recall a cached digest."""
    path = options.root / "identity.safetensors"
    if not path.exists():
        options.root.mkdir(parents=True, exist_ok=True)
        count, numbers = int(options.gib * 64), torch.randn(1 << 23).half()
        save_file({f"layer {index}": numbers.roll(index) for index in range(count)}, path)
    header, size_gb = read_header(path), path.stat().st_size / 1e9
    ways: dict[str, Callable[[], object]] = {
        "read": lambda: read_tensors(header),
        "read and hash": lambda: read_hashed([header], lambda name: True, lambda name, tensor: None),
        "hash alone": lambda: digest([header]),
    }
    told: dict[str, Any] = {"GB": round(size_gb, 2), "processors": os.cpu_count()}
    for name, way in ways.items():
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - began)
        told[f"{name}, GB/s"] = round(size_gb / min(seconds), 2)
    memory = HashMemory(options.root / "memory", WEIGHTS_MEMORY)
    version = WeightsVersion("", (header.version,))
    memory.remember(version, digest([header]))
    began = time.perf_counter()
    HashMemory(options.root / "memory", WEIGHTS_MEMORY).recall(version)
    told["remembered, s"] = round(time.perf_counter() - began, 6)
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    # one parser per part
    of_encode = commands.add_parser("encode")
    of_encode.add_argument("root", type=Path)
    of_encode.add_argument("--images", type=int, default=10000)
    of_encode.add_argument("--side", type=int, default=1536)
    of_encode.add_argument("--resolution", type=int, default=1024)
    of_encode.add_argument("--encode-s", type=float, default=0.06, help="what the waiting encoder takes for an image")
    of_encode.add_argument("--vae", action="store_true", help="the built-in model's VAE on the CPU instead")
    of_manifest = commands.add_parser("manifest")
    of_manifest.add_argument("root", type=Path)
    of_manifest.add_argument("--images", type=int, default=1_000_000)
    of_manifest.add_argument("--measure", action="store_true", help="measure existing files, in this process")
    of_first = commands.add_parser("first-step")
    of_first.add_argument("root", type=Path)
    of_first.add_argument("--recipe", type=Path, default=Path("recipes/demo.yaml"))
    of_first.add_argument("--set", action="append", default=[])
    of_both = commands.add_parser("side-by-side")
    of_both.add_argument("root", type=Path)
    of_both.add_argument("old", type=Path, help="a checkout")
    of_both.add_argument("new", type=Path, help="another")
    of_both.add_argument("--base", choices=tuple(STRUCTURES), default="full")
    of_both.add_argument("--rounds", type=int, default=5)
    of_both.add_argument("--set", action="append", default=[])
    of_identity = commands.add_parser("identity")
    of_identity.add_argument("root", type=Path)
    of_identity.add_argument("--gib", type=float, default=2.0)
    for command in (of_encode, of_manifest, of_first, of_both, of_identity):
        command.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    # run the part, and write its figures
    parts: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "encode": encode, "manifest": manifest, "first-step": first_step, "side-by-side": side_by_side,
        "identity": identity,
    }  # fmt: skip
    figures = parts[options.command](options)
    text = json.dumps(figures, indent=1)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
