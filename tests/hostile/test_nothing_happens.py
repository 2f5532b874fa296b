"""Reading hostile files does nothing but read: no program, no network, no file elsewhere, no gigabytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from lora_rocm.base_models.loading import builtin_folder
from lora_rocm.rundir.layout import RunDir
from tests.hostile import attacks
from tests.supervisor.fake_run import write_whole_run

MAX_GROWN_BYTES = 512 << 20
"""Above what the process had after the sound files. Without the guards one alias bomb alone takes four gigabytes."""
RECIPE = "model: {name_or_path: builtin:tiny-sdxl}\ndata: {path: pics}\ntrain: {max_train_steps: 1}\n"


def make_folder(root: Path) -> None:
    """``sound`` and ``hostile`` with files of each kind, and ``own`` for permitted writes."""
    for name in ("sound", "hostile", "own"):
        (root / name).mkdir(parents=True)
    hostile, sound = root / "hostile", root / "sound"
    make_texts(sound, hostile)
    make_images(sound, hostile)
    make_weights(sound, hostile)
    make_data(sound, hostile)
    write_whole_run(RunDir(sound / "run-a"))
    shutil.copytree(sound / "run-a", hostile / "run-a")
    for path in (hostile / "run-a" / "samples").rglob("*.png"):
        path.write_bytes(attacks.eps(hostile))
    (hostile / "run-a" / "recipe.yaml").write_text("a: !!python/object/apply:os.system [x]", encoding="utf-8")


def make_texts(sound: Path, hostile: Path) -> None:
    (sound / "recipe-a.yaml").write_text(RECIPE, encoding="utf-8")
    code = json.dumps(attacks.payload(hostile))
    recipes = {
        "apply": f"a: !!python/object/apply:builtins.exec [{code}]",
        "new": f"a: !!python/object/new:os.system [{code}]",
        "module": "a: !!python/module:antigravity x",
        "twice": "m: &m {" + "a: ," * 4000 + "}\nl: [" + "*m," * 4000 + "]",
        "laughs": "a: &a [x,x,x,x,x,x,x,x]\n"
        + "".join(f"{b}: &{b} [{f'*{a},' * 9}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)),
        "merge": "a: &a {b: 1}\nc:\n  <<: *a\n",
    }
    for name, text in recipes.items():
        (hostile / f"recipe-{name}.yaml").write_text(text, encoding="utf-8")


def make_images(sound: Path, hostile: Path) -> None:
    bombs = {
        "giant.png": attacks.png_of(65_535, 65_535),
        "text.png": attacks.png_of(8, 8, attacks.chunk(b"zTXt", b"k\0\0" + attacks.zeros(200))),
        "profile.png": attacks.png_of(8, 8, attacks.chunk(b"iCCP", b"k\0\0" + attacks.zeros(200))),
        "chunks.png": attacks.png_of_chunks(150_000),
        "giant.jpg": attacks.jpeg_of(65_535, 65_535),
        "exif.jpg": attacks.jpeg_with_exif(600),
        "giant.gif": attacks.gif_of(65_535, 65_535),
        "giant.tif": attacks.tiff_of(2**31 - 1, 2**31 - 1),
        "script.eps": attacks.eps(hostile),
        "script.png": attacks.eps(hostile),
        "pickle.png": attacks.pickled(hostile),
        "empty.png": attacks.png_of(13_000, 13_000),  # under the limit, with no pixels
    }
    for name, content in bombs.items():
        (hostile / f"image-{name}").write_bytes(content)
    for kind in ("png", "jpeg", "gif", "tiff", "webp"):
        (sound / f"image-a.{kind}").write_bytes(attacks.image(kind.upper()))
    (sound / "image-large.png").write_bytes(attacks.png_full_of_zeros(4000))


def make_weights(sound: Path, hostile: Path) -> None:
    for name, content in attacks.LYING_WEIGHTS.items():
        (hostile / f"lora-{name}.safetensors").write_bytes(content)
    for suffix in (".ckpt", ".bin", ".pt", ".safetensors"):
        (hostile / f"lora-pickle{suffix}").write_bytes(attacks.pickled(hostile))
        (hostile / f"model-pickle{suffix}").write_bytes(attacks.pickled(hostile))
    model = Path(shutil.copytree(builtin_folder("builtin:tiny-sdxl"), sound / "model-a"))
    for name in ("code", "pickles"):
        shutil.copytree(model, hostile / f"model-{name}")
    for config in (hostile / "model-code").rglob("*.json"):
        found = json.loads(config.read_bytes())
        if isinstance(found, dict) and config.name.endswith("config.json"):
            auto = {"AutoModel": "evil.Model", "AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Tok", "evil.Tok"]}
            more = {"auto_map": auto, "trust_remote_code": True, "custom_pipeline": "evil"}
            config.write_text(json.dumps({**found, **more}), encoding="utf-8")
            (config.parent / "evil.py").write_text(attacks.payload(hostile), encoding="utf-8")
    for weights in (hostile / "model-pickles").rglob("*.safetensors"):
        stem = "pytorch_model" if weights.stem == "model" else weights.stem
        weights.with_name(f"{stem}.bin").write_bytes(attacks.pickled(hostile))
        weights.unlink()


def make_data(sound: Path, hostile: Path) -> None:
    table = datasets.Dataset.from_dict({"image": [attacks.image()], "text": ["x"]})
    table.save_to_disk(str(sound / "dataset-a"))
    shutil.copytree(sound / "dataset-a", hostile / "dataset-code")
    for name in ("dataset-code.py", "dataset_code.py", "__init__.py"):
        (hostile / "dataset-code" / name).write_text(attacks.payload(hostile), encoding="utf-8")
    for place in (sound / "dataset-b", hostile / "dataset-readme"):
        place.mkdir()
        table.to_parquet(str(place / "train.parquet"))
    config = "---\nconfigs:\n- config_name: default\n  data_files: http://127.0.0.1:9/x.parquet\n---\n"
    (hostile / "dataset-readme" / "README.md").write_text(config, encoding="utf-8")
    (hostile / "dataset-readme" / "dataset-readme.py").write_text(attacks.payload(hostile), encoding="utf-8")
    for place in (sound / "folder-a", hostile / "folder-a"):
        place.mkdir()
        (place / "a.png").write_bytes(attacks.image())
        (place / "a.txt").write_text("a caption", encoding="utf-8")
    (hostile / "folder-a" / "b.eps").write_bytes(attacks.eps(hostile))
    (hostile / "folder-a" / "b.png").write_bytes(attacks.png_of(65_535, 65_535))
    (hostile / "folder-a" / "sitecustomize.py").write_text(attacks.payload(hostile), encoding="utf-8")


def watched(root: Path) -> dict[str, Any]:
    """The report of the process with the hook."""
    environ = {
        **os.environ,
        **dict.fromkeys(("HF_HOME", "TMPDIR", "TEMP", "TMP", "LORA_ROCM_HOME", "XDG_CACHE_HOME"), str(root / "own")),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.watched", str(root)],
        env=environ,
        cwd=root / "own",
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("watched")
    make_folder(root)
    return watched(root)


def test_hostile_files_are_only_read(told: dict[str, Any]) -> None:
    assert told["seen"] == []
    assert set(told["sound"].values()) == {"read"}, told["sound"]  # every refusal is because of the content
    ended = told["ended"]
    assert {name for name in ended if name.startswith("recipe-")} and all(
        code == "recipe-invalid" for name, code in ended.items() if name.startswith("recipe-")
    )
    assert {ended[f"model-pickle{suffix}"] for suffix in (".ckpt", ".bin", ".pt")} == {"pickle-refused"}
    assert ended["model-pickles"] == "pickle-refused" and ended["model-code"] == "read"
    assert all(code != "read" for name, code in ended.items() if name.startswith("lora-"))
    assert ended["dataset-readme"] == ended["dataset-code"] == ended["folder-a"] == ended["run-a"] == "read"
    assert told["grown_bytes"] < MAX_GROWN_BYTES


def test_the_hook_sees_what_it_is_there_for(told: dict[str, Any]) -> None:
    kinds = {seen.split()[0] for seen in told["control_seen"]}
    assert kinds >= {"compile", "exec", "pickle.find_class", "subprocess.Popen", "socket.connect", "open", "os.rename"}
    assert sys.platform != "linux" or told["control_grown_bytes"] > MAX_GROWN_BYTES
