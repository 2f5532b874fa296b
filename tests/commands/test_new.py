"""``lora-rocm new``: a shipped recipe, copied and filled in from model, images or texts, and GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from lora_rocm.commands import new as command
from lora_rocm.commands.check import check
from lora_rocm.commands.new import NewRequest, NewResult
from lora_rocm.dataset.sources.given import CROP_COLUMN
from lora_rocm.dataset.sources.scan import scan
from lora_rocm.errors import LoraRocmError
from lora_rocm.planning.step_plan import SampleCost
from lora_rocm.recipe.load import load_recipe, shipped_recipes
from lora_rocm.recipe.schema import Recipe
from tests.command_line import command_line
from tests.commands.test_inspect_file import lora
from tests.commands.test_plan import GIB, net
from tests.judging import judge_here

DEMO_IMAGES = "builtin:demo"
TINY = "builtin:tiny-sdxl"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An empty current folder; the heavy children are answered here. "footprint" may be changed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lora_rocm.commands.inspect_file.judge_in_child", judge_here)
    answer: dict[str, Any] = {"footprint": net().to_json(), "precision": "bf16", "model_is_here": True}
    answer |= {"gpu": None, "encoders": []}
    monkeypatch.setattr("lora_rocm.processes.tool.run_for_json", lambda *_: answer)
    return answer


def photos(folder: Path, *sizes: tuple[int, int], caption: str = ".txt", name: str = "a cat {}") -> Path:
    folder.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        path = folder / f"{name.format(number)}.png"
        Image.new("RGB", size, (number, 0, 0)).save(path)
        if caption:
            path.with_suffix(caption).write_text("a photo of a cat", encoding="utf-8")
    return folder


def new(path: str | None = "my.yaml", **given: Any) -> NewResult:
    return command.new(NewRequest(Path(path) if path else None, **given))


def values(result: NewResult) -> dict[str, str]:
    return {value.key: value.value for value in result.values}


def recipe_of(result: NewResult) -> Recipe:
    return load_recipe(result.recipe).recipe


def code_of(**given: Any) -> str:
    before = sorted(Path().rglob("*"))
    with pytest.raises(LoraRocmError) as raised:
        new(**given)
    assert raised.value.exit_code == 2 and raised.value.where and raised.value.fix
    assert sorted(Path().rglob("*")) == before, "nothing is written"
    return raised.value.code


# The copy


@pytest.mark.parametrize("name", [path.stem for path in shipped_recipes().values()])
def test_a_plain_copy_has_the_bytes_of_the_recipe(name: str) -> None:
    shipped = shipped_recipes()[f"{name}.yaml"].read_bytes()
    result = new(None, source=name)
    assert result.recipe.read_bytes() == shipped
    named = new("brine.yaml", source=name)
    kept = [line for line in named.recipe.read_bytes().splitlines() if b"  name: " not in line]
    assert kept == [line for line in shipped.splitlines() if b"  name: " not in line]
    assert recipe_of(named).output.name == "brine" and values(named) == {"output.name": "brine"}
    assert result.source == name and result.values == () and result.error is None
    assert check(str(result.recipe), schema_only=True).error is None
    lines = result.recipe.read_text(encoding="utf-8").splitlines()
    assert all("<--" in lines[line.line - 1] and line.text in lines[line.line - 1] for line in result.open_lines)


def test_the_file_is_named_after_the_recipe_and_never_overwritten(tmp_path: Path) -> None:
    assert new(None, source="sdxl.yaml").recipe == Path("my-sdxl.yaml")
    Path("my-sdxl.yaml").write_text("mine", encoding="utf-8")
    assert code_of(path=None, source="sdxl") == "file-exists"
    assert code_of(path="my-sdxl.yaml", source="flux", images="nowhere") == "file-exists"
    assert Path("my-sdxl.yaml").read_text(encoding="utf-8") == "mine"
    Path("folder.yaml").mkdir()
    assert code_of(path="folder.yaml", source="sdxl") == "file-exists"
    assert new("Neue Rezepte/ä ö.yml", source="sdxl").recipe.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right there")
def test_a_link_to_nothing_is_not_followed(tmp_path: Path) -> None:
    Path("link.yaml").symlink_to(tmp_path / "target.yaml")
    assert code_of(path="link.yaml", source="sdxl") == "file-exists"
    assert not (tmp_path / "target.yaml").exists()


# What is seen


def test_images_model_and_card_are_filled_in_with_reasons_and_pass_check() -> None:
    photos(Path("Bilder ä"), (128, 128), (160, 96), (192, 128), (128, 192), caption=".caption")
    result = new(source="demo", images="Bilder ä", model=TINY, card="12GB")
    found, recipe = values(result), recipe_of(result)
    assert found["data.path"] == "Bilder ä" and recipe.model.name_or_path == TINY
    assert found["data.caption_extension"] == ".caption"
    assert found["data.resolution"] == "128" and found["train.epochs"] == "200"
    assert recipe.train.max_train_steps is None
    assert recipe.train.batch_size * recipe.train.gradient_accumulation_steps == 4, "as in demo.yaml"
    assert found["runtime.memory"] == "auto"
    lines = result.recipe.read_text(encoding="utf-8").splitlines()
    for value in result.values:
        line = lines[value.line - 1]
        name, is_list = value.key.rpartition(".")[2], value.key == "sample.prompts"  # its items follow
        assert line.strip().startswith(f"{name}:" if is_list else f"{name}: {value.value}") and line.endswith(value.why)
    shipped = shipped_recipes()["demo.yaml"].read_text(encoding="utf-8").splitlines()
    of_demo = sum(line.startswith(("    - ", "# ")) or "prompts:" in line for line in shipped)  # about the zibu
    assert len(set(shipped) - set(lines)) < 10 + of_demo, "the other lines keep their comments"
    checked = check(str(result.recipe), schema_only=True)
    assert checked.error is None and load_recipe(result.recipe).notices == ()


@pytest.mark.slow
@pytest.mark.parametrize("source", ["demo", None])
def test_the_result_passes_the_whole_check(source: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # with the real children
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    photos(Path("photos"), (1100, 1000), (900, 1300))
    result = new(source=source, images="photos", model=TINY, card="12GB")
    assert result.error is None and check(str(result.recipe)).error is None


def test_the_family_of_the_model_chooses_the_recipe() -> None:
    photos(Path("pics"), (1024, 1024))
    result = new(model=TINY, images="pics")
    assert result.source == "sdxl" and recipe_of(result).model.name_or_path == TINY
    assert result.notices, "there is no GPU here"


@pytest.mark.parametrize(
    ("sizes", "side"),
    [
        ([(2000, 3000)] * 4, 1024),
        ([(1024, 1024)] * 3 + [(300, 300)], 1024),
        ([(1024, 1024)] * 2 + [(800, 800)] * 2, 768),
        ([(300, 300)] * 4, 512),
        ([(1000, 700)] * 4, 832),
    ],
)
def test_the_resolution_is_the_recipes_unless_most_images_are_smaller(sizes: list[tuple[int, int]], side: int) -> None:
    photos(Path("pics"), *sizes)
    assert values(new(source="sdxl", images="pics"))["data.resolution"] == str(side)


@pytest.mark.parametrize(("count", "epochs"), [(3, 200), (40, 100), (1, 200)])
def test_epochs_follow_the_number_of_images(count: int, epochs: int) -> None:
    photos(Path("pics"), *[(64, 64)] * count)
    result = new(source="sdxl", images="pics")
    assert values(result)["train.epochs"] == str(epochs), "sdxl.yaml sees 4,000 images in 2,000 steps"
    recipe = recipe_of(result)
    steps = count * epochs // 2 if count % 2 == 0 else (count + 1) // 2 * epochs
    assert recipe.optim.lr_warmup_steps <= max(1, steps // 10)
    assert recipe.sample.every_n_steps <= max(250, steps) and recipe.output.save_every_n_steps <= max(250, steps)


def test_images_of_a_number_name_folder_count_as_often_as_they_are_seen() -> None:
    photos(Path("pics"))
    photos(Path("pics/10_cat"), *[(64, 64)] * 4)
    assert values(new(source="sdxl", images="pics"))["train.epochs"] == "100"


@pytest.mark.parametrize(
    ("name", "folder", "wanted"),
    [
        ("a cat on a mat {}", "pics", {"data.caption_fallback": "filename"}),
        ("IMG_{}", "pics", {"data.caption_fallback": "empty", "data.caption_dropout_rate": "0"}),
        ("IMG_{}", "pics/3_zwx", {"data.caption_fallback": "folder"}),
    ],
)
def test_images_without_captions(name: str, folder: str, wanted: dict[str, str]) -> None:
    Path("pics").mkdir()
    photos(Path(folder), *[(64, 64)] * 3, caption="", name=name)
    result = new(source="sdxl", images="pics")
    assert values(result).items() >= wanted.items() and "data.caption_extension" not in values(result)
    assert load_recipe(result.recipe).notices == ()


def test_several_kinds_of_caption_files_are_a_list() -> None:
    photos(Path("pics"), *[(64, 64)] * 3)
    photos(Path("pics"), (64, 64), caption=".tags", name="other {}")
    found = values(new(source="sdxl", images="pics"))
    assert found["data.caption_extension"] == "[.txt, .tags]" and found["data.caption_dropout_rate"] == "0.05"


def test_crops_and_masks_of_the_folder_are_read() -> None:
    """The second folder is the control: it has neither."""
    for folder in ("pics", "plain"):
        photos(Path(folder), *[(64, 64)] * 3)
    row = {"file_name": "a cat 1.png", CROP_COLUMN: [0, 0, 32, 64]}
    Path("pics", "metadata.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    Image.new("L", (64, 64), 255).save(Path("pics", "a cat 2-masklabel.png"))
    found, plain = (new(f"{folder}.yaml", source="sdxl", images=folder) for folder in ("pics", "plain"))
    (source,), (other,) = (recipe_of(result).data.resolved_sources() for result in (found, plain))
    assert (source.crop_column, source.mask_path) == (CROP_COLUMN, "beside")
    assert (other.crop_column, other.mask_path) == (None, None)
    samples = scan(recipe_of(found).data, copies=False).samples
    assert [sample.given.crop for sample in samples] == [None, (0, 0, 32, 64), None], "and the mask is no image"


def test_a_trigger_word_is_never_invented() -> None:
    photos(Path("5_zwx woman"), *[(64, 64)] * 3, caption="")
    assert "trigger_word" not in new("a.yaml", source="sdxl", images="5_zwx woman").recipe.read_text(encoding="utf-8")
    result = new("b.yaml", source="sdxl-character", images="5_zwx woman")
    assert "data.trigger_word" not in values(result)
    assert any(line.text.startswith("trigger_word:") for line in result.open_lines), "the recipe's, to be changed"


def test_unusable_images_are_named() -> None:
    photos(Path("pics"), *[(64, 64)] * 3)
    Path("pics/broken.png").write_bytes(b"x")
    assert any("broken.png" in notice for notice in new(source="sdxl", images="pics").notices)


# The GPU


def test_the_batch_is_the_fastest_that_fits_with_the_samples_per_update_of_the_recipe(here: dict[str, Any]) -> None:
    photos(Path("pics"), *[(1024, 1024)] * 8)
    here["footprint"] = replace(net(), work=SampleCost(3e12, 3e9, 300_000)).to_json()  # launches take most of the time
    chosen = {}
    for card in ("8GB", "16GB", "80GB"):
        result = new(f"{card}.yaml", source="flux", images="pics", card=card)
        train = recipe_of(result).train
        assert train.batch_size * train.gradient_accumulation_steps == 4 and result.error is None
        (memory,) = [value for value in result.values if value.key == "runtime.memory"]
        chosen[card] = (train.batch_size, memory.why)
    assert chosen["80GB"][0] > 1 and chosen["8GB"][1] != chosen["80GB"][1]
    assert "keep" in chosen["80GB"][1] and "keep" not in chosen["8GB"][1]


def test_batches_that_buckets_do_not_fill_are_not_chosen(here: dict[str, Any]) -> None:
    here["footprint"] = replace(net(), work=SampleCost(3e12, 3e9, 300_000)).to_json()
    photos(Path("pics"), (1024, 1024), (1400, 800), (800, 1400), (1300, 900), (900, 1300))
    assert recipe_of(new(source="flux", images="pics", card="80GB")).train.batch_size == 1


def test_a_card_that_is_too_small_is_an_error_of_the_result(here: dict[str, Any]) -> None:
    here["footprint"] = replace(net(), adapter_bytes=30 * GIB).to_json()
    result = new(source="sdxl", card="8GB")
    assert result.error is not None and result.error.code == "does-not-fit" and result.recipe.exists()
    ended = command_line("new", "other.yaml", "--from", "sdxl", "--card", "8GB", "--json")
    assert ended.exit_code == 2 and json.loads(ended.stdout)["error"]["code"] == "does-not-fit"


# Texts


def rows(path: str, count: int, **cells: Any) -> str:
    Path(path).write_text("".join(json.dumps(cells) + "\n" for _ in range(count)), encoding="utf-8")
    return path


MESSAGE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
PAIR = {"prompt": MESSAGE[:1], "chosen": MESSAGE[1:], "rejected": [{"role": "assistant", "content": "c"}]}


def test_texts_are_filled_in() -> None:
    table = rows("Gespräche 1.jsonl", 900, messages=MESSAGE)
    result = new(texts=table, model="builtin:tiny-llama")
    found, recipe = values(result), recipe_of(result)
    assert result.source == "llm-chat" and found["data.sources[0].dataset"] == table
    assert found["train.epochs"] == "2" and recipe.data.sources[0].dataset
    assert recipe.sample.every_n_steps == recipe.output.save_every_n_steps


def test_few_texts_are_seen_more_often() -> None:
    result = new(source="llm-qlora", texts=rows("rows.jsonl", 40, messages=MESSAGE))
    assert values(result)["train.epochs"] == "10" and recipe_of(result).sample.every_n_steps == 7


@pytest.mark.parametrize("count", [1, 6, 30, 90, 900, 20_000])
def test_a_run_leaves_files_to_choose_from(count: int) -> None:
    result = new("brine.yaml", texts=rows("rows.jsonl", count, messages=MESSAGE), model="builtin:tiny-llama")
    recipe = recipe_of(result)
    assert recipe.output.name == "brine" and recipe.train.epochs is not None
    per_epoch = -(-(count - round(count * recipe.data.validation_split)) // 16)
    steps, every = per_epoch * recipe.train.epochs, recipe.output.save_steps(per_epoch)
    assert 4 <= steps // every <= 10
    if count == 20_000:  # a long run keeps the intervals of the recipe
        assert "output.save_every_n_steps" not in values(result) and recipe.sample.every_n_epochs == 1
    else:
        (why,) = [value.why for value in result.values if value.key == "output.save_every_n_steps"]
        assert why and recipe.sample.round_steps(per_epoch) * 10 >= steps


def test_a_name_that_no_file_of_a_run_can_have_stays_the_recipes() -> None:
    assert recipe_of(new("peft.yaml", source="llm-chat")).output.name == "my-chat"


def test_pairs_get_the_recipe_for_pairs() -> None:
    result = new(texts=rows("pairs.jsonl", 50, **PAIR), model="builtin:tiny-llama")
    assert result.source == "llm-dpo" and recipe_of(result).objective.compares_pairs


def test_a_folder_of_texts_is_a_path() -> None:
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("some words", encoding="utf-8")
    assert recipe_of(new(source="llm-chat", texts="texts")).data.sources[0].path


# Words of the data in place of the recipe's


@pytest.mark.parametrize("source", ["demo", "sdxl"])
def test_prompts_are_captions_and_the_first_comment_names_the_images(source: str) -> None:
    folder = photos(Path("blobs"), (128, 128), (128, 128), (128, 128))
    captions = ["a blob, red: round", "a 'blob' on a hill", "a blob --w 64"]
    for path, caption in zip(sorted(folder.glob("*.txt")), captions, strict=True):
        path.write_text(caption, encoding="utf-8")
    result = new(source=source, images="blobs")
    recipe, shipped = recipe_of(result), load_recipe(shipped_recipes()[f"{source}.yaml"]).recipe
    prompts = recipe.sample.prompts
    assert prompts and set(prompts) <= set(captions[:2]) and len(prompts) <= len(shipped.sample.prompts)
    (why,) = [value.why for value in result.values if value.key == "sample.prompts"]
    text = result.recipe.read_text(encoding="utf-8")
    assert why in text and text.startswith("# LoRA of 3 images in blobs,") and source in text.splitlines()[0]
    assert "zibu on" not in text and not (source == "demo" and recipe.sample.control_prompts)
    assert (source == "demo") == ("lora-rocm demo" not in text and "Copy this file" not in text)


def test_prompts_stay_where_no_caption_fits_and_with_a_trigger_word() -> None:
    photos(Path("bare"), (128, 128), caption="", name="IMG_000{}")
    result = new("a.yaml", source="demo", images="bare")
    assert recipe_of(result).sample.prompts == load_recipe(shipped_recipes()["demo.yaml"]).recipe.sample.prompts
    assert any("sample.prompts" in notice for notice in result.notices)
    photos(Path("who"), (128, 128))
    found = new("b.yaml", source="sdxl-character", images="who")
    assert "sample.prompts" not in values(found) and "[trigger]" in found.recipe.read_text(encoding="utf-8")


def test_prompts_of_texts_are_their_first_messages() -> None:
    rows_ = [{"prompt": f"What is {number}?", "completion": "A number."} for number in range(30)]
    Path("pip.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows_), encoding="utf-8")
    result = new(source="demo-causal-lm", texts="pip.jsonl")
    recipe = recipe_of(result)
    assert recipe.sample.prompts == tuple(f"What is {number}?" for number in range(6))
    assert recipe.sample.control_prompts == () and result.notices
    text = result.recipe.read_text(encoding="utf-8")
    assert text.startswith("# LoRA of 30 texts in pip.jsonl,") and "foxes" not in text


# What cannot be used


def test_wrong_input_has_a_code_and_writes_nothing(tmp_path: Path) -> None:
    photos(Path("pics"), (64, 64))
    Path("empty").mkdir()
    Path("broken").mkdir()
    Path("broken/a.png").write_bytes(b"x")
    Path("broken.safetensors").write_bytes(b"x")
    Path("model.ckpt").write_bytes(b"x")
    lora(tmp_path / "lora.safetensors")
    save_file({"x": torch.zeros(1)}, "odd.safetensors")
    rows("pairs.jsonl", 3, **PAIR)
    rows("bad.jsonl", 3, nonsense=1)
    for given, code in (
        ({}, "recipe-unnamed"),
        ({"images": "pics"}, "recipe-unnamed"),
        ({"model": "someone/model"}, "recipe-unnamed"),
        ({"source": "sdxk"}, "no-shipped-recipe"),
        ({"source": "sdxl", "path": "x"}, "recipe-suffix"),
        ({"source": "sdxl", "images": "nowhere"}, "data-folder-missing"),
        ({"source": "sdxl", "images": "pics/a cat 0.png"}, "data-folder-missing"),
        ({"source": "sdxl", "images": "empty"}, "data-folder-empty"),
        ({"source": "sdxl", "images": "broken"}, "no-usable-images"),
        ({"source": "sdxl", "model": "nowhere.safetensors"}, "model-missing"),
        ({"source": "sdxl", "model": "./some/where"}, "model-missing"),
        ({"source": "sdxl", "model": "broken.safetensors"}, "weights-damaged"),
        ({"source": "sdxl", "model": "model.ckpt"}, "pickle-refused"),
        ({"source": "sdxl", "model": "lora.safetensors"}, "not-a-base"),
        ({"source": "sdxl", "model": "odd.safetensors"}, "not-a-base"),
        ({"source": "flux", "model": TINY}, "family-differs"),
        ({"source": "sdxl", "images": "pics", "texts": "bad.jsonl"}, "samples-differ"),
        ({"source": "sdxl", "texts": "bad.jsonl"}, "samples-differ"),
        ({"source": "llm-chat", "images": "pics"}, "samples-differ"),
        ({"source": "llm-chat", "texts": "pairs.jsonl"}, "no-usable-texts"),
        ({"source": "llm-chat", "texts": "bad.jsonl"}, "no-usable-texts"),
        ({"source": "llm-chat", "texts": "nowhere.jsonl"}, "dataset-missing"),
        ({"source": "sdxl", "card": "much"}, "card-unclear"),
        ({"source": "sdxl", "images": "\udcff"}, "name-not-text"),
    ):
        assert code_of(**given) == code, given


def test_a_model_of_two_families_or_of_a_part_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(families: tuple[str, ...], needed: tuple[str, ...] = ()) -> None:
        found = {"title": "x", "families": families, "trainable": [*families], "needed": [*needed]}
        monkeypatch.setattr("lora_rocm.commands.inspect_file.inspect", lambda *_: found)

    Path("x.safetensors").touch()
    judged(("sdxl", "flux"))
    assert code_of(model="x.safetensors") == "family-unclear"
    assert recipe_of(new(model="x.safetensors", source="flux")).model.family == "flux"
    judged(("flux",), ("model.vae",))
    assert code_of(path="b.yaml", model="x.safetensors") == "components-needed"
    judged(("sd2",))
    result = new("c.yaml", model="x.safetensors")
    assert result.source == "sd15" and recipe_of(result).model.family == "sd2"


def test_a_model_of_the_hub_is_taken_as_it_is() -> None:
    result = new(source="sdxl", model="someone/model")
    assert recipe_of(result).model.name_or_path == "someone/model"


# The command


def test_the_list_of_recipes() -> None:
    found = json.loads(command_line("recipes", "--json").stdout)["recipes"]
    text = command_line("recipes").stdout
    assert all(recipe["name"] in text and recipe["purpose"] in text for recipe in found) and len(found) > 10


def test_the_command_prints_each_value_with_its_reason() -> None:
    photos(Path("pics"), (64, 64))
    Path("b").mkdir()
    ended = command_line("new", "my.yaml", "--from", "sdxl", "--images", "pics")
    assert ended.exit_code == 0
    found = json.loads(command_line("new", "b/my.yaml", "--from", "sdxl", "--images", "pics", "--json").stdout)
    for value in found["values"]:
        assert (
            f"line {value['line']}: {value['key']}: {value['value']}" in ended.stdout and value["why"] in ended.stdout
        )
    assert found["next"] == "lora-rocm check b/my.yaml" and "lora-rocm check my.yaml" in ended.stdout
