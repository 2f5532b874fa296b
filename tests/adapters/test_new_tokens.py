"""New tokens: their vectors are trained together with a LoRA, and nothing else of the text encoders is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_rocm.adapters import new_tokens
from lora_rocm.adapters.attach import inject
from lora_rocm.dataset.entry_spec import CAPTION
from lora_rocm.encoded_cache.encode_session import plain_placement
from lora_rocm.errors import AdapterError, UserError
from lora_rocm.export.metadata import RunFacts
from lora_rocm.families.base import family_for
from lora_rocm.families.common import clip
from lora_rocm.recipe.adapter_sections import NewToken
from lora_rocm.rundir.layout import RunDir, embeddings_of
from lora_rocm.train.usable import require_startable
from tests.event_lines import read_events
from tests.lora_files import write_as_forecast
from tests.tiny_models import tiny_recipe
from tests.tiny_sd import SHALLOW_SD, write_tiny_sd
from tests.train.runs import CPU, bytes_of, make_recipe, start, write_material

TOKENS = [{"token": "<Toy>", "vectors": 2, "init": "red cat"}, {"token": "glib", "init": "dog"}]
PROMPT = "a photo of <toy>, small GLIB glibly"
COMPONENTS = {"text_encoder": ("tokenizer", "clip_l"), "text_encoder_2": ("tokenizer_2", "clip_g")}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_material(tmp_path_factory.mktemp("tokens"))
    for caption in sorted((folder / "images").glob("*.txt")):
        caption.write_text("a <toy>, glib cat", encoding="utf-8")
    return folder


def recipe_of(material: Path, **lora: Any) -> Any:
    more = {"optim": {"embedding_learning_rate": 1e-2}, "train": {"max_train_steps": 2, "ema_decay": 0.5}}
    lora = {"targets": r"mid_block\..*\.to_q", "new_tokens": TOKENS, **lora}
    return make_recipe(material, lora=lora, **more, output={"save_every_n_steps": 1, "dtype": "fp32"})


@pytest.fixture(scope="module")
def run(material: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    assert start(recipe_of(material), run_dir)
    return RunDir(run_dir)


def files_of(run: RunDir) -> dict[str, dict[str, Tensor]]:
    return {path.stem: load_file(path) for path in sorted(embeddings_of(run.lora).iterdir())}


def test_a_run_trains_the_vectors_and_its_lora_has_nothing_of_the_text_encoders(run: RunDir, material: Path) -> None:
    found, recipe = files_of(run), recipe_of(material)
    assert {name: [list(t.shape) for t in tensors.values()] for name, tensors in found.items()} == {
        "Toy": [[2, 48], [2, 32]],
        "glib": [[1, 48], [1, 32]],
    }
    family = family_for(recipe)
    model = family.load(torch.float32, CPU)
    inject(family, model, recipe.lora, 0)
    for component, (_, key) in COMPONENTS.items():
        before = new_tokens.layers_of(model)[component].rows_ND
        after = torch.cat([found["Toy"][key], found["glib"][key]])
        assert (after - before).abs().amax(dim=1).min() > 1e-4, "every vector was trained"
        assert (after - before).abs().max() < 0.1, "and from its start on"
    assert all(name.startswith("lora_unet_") for name in load_file(run.lora))
    (event,) = [event for event in read_events(run.events()) if event["type"] == "export"]
    assert event["embeddings"] == ["lora-embeddings/Toy.safetensors", "lora-embeddings/glib.safetensors"]
    assert len(list(embeddings_of(run.checkpoint_lora(1)).iterdir())) == 2


def test_a_stopped_run_goes_on_to_the_same_bytes(run: RunDir, material: Path, tmp_path: Path) -> None:
    assert not start(recipe_of(material), tmp_path / "run", stop_at=1)
    assert start(recipe_of(material), tmp_path / "run")
    assert bytes_of(tmp_path / "run") == bytes_of(run.path)
    for path in embeddings_of(run.lora).iterdir():
        assert path.read_bytes() == (embeddings_of(RunDir(tmp_path / "run").lora) / path.name).read_bytes()


def test_the_seal_of_the_base_is_that_without_new_tokens(material: Path) -> None:
    recipe = recipe_of(material, train_text_encoder=True)
    family, seals = family_for(recipe), []
    for tokens in (recipe.lora.new_tokens, ()):
        model = family.load(torch.float32, CPU)
        adapter = inject(family, model, recipe.lora.model_copy(update={"new_tokens": tokens}), 0)
        door = plain_placement(CPU)
        door.place(model.components["text_encoder"], "text_encoder")
        seals.append({name.replace(".base_layer.", "."): sent for name, sent in door.fingerprints().items()})
        assert any(name.startswith("text_encoder.") for name in adapter.parameters)
    assert seals[0] == seals[1]


def conditioning(family: Any, model: Any, prompt: str) -> tuple[Tensor, ...]:
    encode = family.encoders()[1].load(plain_placement(CPU))
    batch = {name: tensor[None] for name, tensor in encode({CAPTION: prompt}).items()}
    with torch.no_grad():
        return tuple(family.prompt_arguments(model, batch).values())


def loaded(recipe: Any, run: RunDir) -> tuple[Any, Any]:
    """The base with the tokens of a run's embedding files."""
    tokens = new_tokens.tokens_next_to(run.lora)
    lora = recipe.lora.model_copy(update={"new_tokens": tokens})
    family = family_for(recipe.model_copy(update={"lora": lora}))
    model = family.load(torch.float32, CPU)
    new_tokens.insert(family, model, tokens)
    new_tokens.start(family, model, tokens)
    return family, model


def by_rules_of_uis(pipeline: Any, files: dict[str, dict[str, Tensor]], number: int) -> Tensor:
    """A1111's and ComfyUI's rule: a name in the prompt is read as its vectors, which take the places of tokens."""
    component, (tokenizer, key) = list(COMPONENTS.items())[number]
    encoder, tokenizer = getattr(pipeline, component), getattr(pipeline, tokenizer)
    ids, vectors = [tokenizer.bos_token_id], dict[int, Tensor]()
    for piece in ("a photo of", "Toy", ", small", "glib", "glibly"):
        if piece in files:
            rows = files[piece].get(key, next(iter(files[piece].values())))
            vectors |= {len(ids) + at: row for at, row in enumerate(rows)}
            ids += [0] * len(rows)
        else:
            ids += tokenizer(piece, add_special_tokens=False).input_ids
    ids += [tokenizer.eos_token_id]
    ids += [tokenizer.pad_token_id] * (77 - len(ids))

    def fixed(module: nn.Module, args: Any, embedded_BSD: Tensor) -> Tensor:
        for at, vector in vectors.items():
            embedded_BSD[0, at] = vector
        return embedded_BSD

    hook = encoder.get_input_embeddings().register_forward_hook(fixed)
    with torch.no_grad():
        states_BSD: Tensor = encoder(torch.tensor([ids]), output_hidden_states=True).hidden_states[-2]
    hook.remove()
    return states_BSD


def test_other_programs_read_the_files_to_the_same_conditioning(run: RunDir, material: Path) -> None:
    family, model = loaded(recipe_of(material), run)
    prompt_BSD, pooled_BD = conditioning(family, model, PROMPT)
    pipeline = StableDiffusionXLPipeline.from_pretrained(material / "model", local_files_only=True)
    files = files_of(run)
    states = [by_rules_of_uis(pipeline, files, number) for number in range(2)]
    torch.testing.assert_close(torch.cat(states, dim=-1), prompt_BSD)
    for component, (tokenizer, key) in COMPONENTS.items():
        parts = {"text_encoder": getattr(pipeline, component), "tokenizer": getattr(pipeline, tokenizer)}
        for token, name in (("<toy>", "Toy"), ("glib</w>", "glib")):
            pipeline.load_textual_inversion(files[name][key], token=token, **parts)
    with torch.no_grad():
        theirs = pipeline.encode_prompt(PROMPT.replace("GLIB ", "glib</w> "), do_classifier_free_guidance=False)
    torch.testing.assert_close(prompt_BSD, theirs[0])
    torch.testing.assert_close(pooled_BD, theirs[2])
    other = conditioning(family, model, PROMPT.replace("<toy>", "toy"))[0]
    assert not torch.allclose(other, prompt_BSD), "control: the token makes a difference"


def test_the_file_of_sd15_is_read_by_diffusers_and_starts_a_token(tmp_path: Path) -> None:
    base = write_tiny_sd(tmp_path / "model", unet=SHALLOW_SD)
    lora = {"rank": 2, "targets": "attention", "new_tokens": [TOKENS[0]]}
    recipe = tiny_recipe(base, model={"family": "sd15"}, lora=lora)
    family = family_for(recipe)
    model = family.load(torch.float32, CPU)
    adapter = inject(family, model, recipe.lora, 0)
    with torch.no_grad():
        new_tokens.layers_of(model)["text_encoder"].rows_ND.normal_()
    facts = RunFacts(steps=1, epochs=1, num_epochs=1)
    write_as_forecast("kohya", tmp_path / "lora.safetensors", family, adapter, recipe, facts)
    path = tmp_path / "lora-embeddings" / "Toy.safetensors"
    assert list(load_file(path)) == ["emb_params"]
    (prompt_BSD,) = conditioning(family, model, PROMPT)
    pipeline = StableDiffusionPipeline.from_pretrained(base, local_files_only=True)
    pipeline.load_textual_inversion(str(path), token="<toy>", local_files_only=True)
    with torch.no_grad():
        theirs, _ = pipeline.encode_prompt(PROMPT, CPU, 1, do_classifier_free_guidance=False)
    torch.testing.assert_close(prompt_BSD, theirs)
    # Another run starts from the file; a resumed one no longer needs it.
    again = NewToken(token="<other>", vectors=2, init_from=str(path))
    fresh = family.load(torch.float32, CPU)
    later = recipe.lora.model_copy(update={"new_tokens": (again,)})
    inject(family, fresh, later, 0)
    assert torch.equal(new_tokens.layers_of(fresh)["text_encoder"].rows_ND, load_file(path)["emb_params"])
    path.unlink()
    inject(family, family.load(torch.float32, CPU), later, 0, resumed=True)


def test_what_cannot_start_a_token_is_refused(material: Path, tmp_path: Path) -> None:
    recipe, path = recipe_of(material), tmp_path / "x.safetensors"
    family = family_for(recipe)
    model = family.load(torch.float32, CPU)
    new_tokens.insert(family, model, recipe.lora.new_tokens[:1])
    for tensors in ({"clip_l": torch.zeros(1, 32), "clip_g": torch.zeros(1, 48)}, {"clip_l": torch.zeros(2, 32)}, {}):
        save_file(tensors, path)
        with pytest.raises(AdapterError) as caught:
            new_tokens.start(family, model, [NewToken(token="<toy>", vectors=2, init_from=str(path))])
        assert caught.value.code == "embedding-unfit" and "[2, " in caught.value.what
    save_file({"clip_l": torch.zeros(2, 32), "clip_g": torch.ones(2, 48)}, path)  # control
    new_tokens.start(family, model, [NewToken(token="<toy>", vectors=2, init_from=str(path))])
    for token, files in ({"init_from": str(path)}, [path]), ({"init": "cat"}, []):  # ``check`` remembers their versions
        asked = recipe_of(material, new_tokens=[{"token": "<toy>", "vectors": 2, **token}])
        skeletons = {name: family.skeleton(name) for name in family.all_components}
        assert require_startable(family_for(asked), asked, skeletons, torch.float32) == files
    with pytest.raises(AdapterError) as caught:
        new_tokens.start(family, model, [NewToken(token="<toy>", vectors=2, init="<toy>")])
    assert caught.value.code == "token-init-empty"


def test_the_embeddings_beside_a_lora_are_found_and_missed(tmp_path: Path) -> None:
    lora, folder = tmp_path / "x.safetensors", tmp_path / "x-embeddings"
    assert new_tokens.tokens_next_to(lora) == ()
    wanted = (NewToken(token="<toy>", init="cat"),)
    with pytest.raises(AdapterError) as caught:
        new_tokens.tokens_next_to(lora, wanted)
    assert caught.value.code == "embedding-missing" and "toy.safetensors" in str(caught.value.where)
    folder.mkdir()
    save_file({"emb_params": torch.zeros(32)}, folder / "glib.safetensors")
    save_file({"emb_params": torch.zeros(2, 32)}, folder / "toy.safetensors", {new_tokens.TOKEN_FIELD: "<toy>"})
    found = [(token.token, token.vectors) for token in new_tokens.tokens_next_to(lora, wanted)]
    assert found == [("<toy>", 2), ("glib", 1)]
    save_file({"x": torch.zeros(2000, 4)}, folder / "lora.safetensors", {new_tokens.TOKEN_FIELD: "a b"})
    with pytest.raises(AdapterError) as caught:
        new_tokens.tokens_next_to(lora)
    assert caught.value.code == "embedding-unfit"


def test_a_token_of_the_vocabulary_is_refused(material: Path) -> None:
    source = family_for(recipe_of(material)).source
    with pytest.raises(UserError) as caught:
        clip.tokenizer_of(source, "tokenizer", [NewToken(token="Zibu", init="cat")])
    assert caught.value.code == "token-known" and "<Zibu>" in caught.value.fix
    tokenizer = clip.tokenizer_of(
        source, "tokenizer", [NewToken(token="<a>", init="cat"), NewToken(token="<a>b", init="cat")]
    )
    ids = clip.token_ids(tokenizer, "<a>b <A> <a>")
    assert ids[1:4].tolist() == [-2, -1, -1] and ids.argmax() == 4
