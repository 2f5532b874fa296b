"""The output of ``inspect`` for files and folders, also for files that are not models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_rocm.commands.inspect_file import inspect_text
from lora_rocm.errors import ModelError
from lora_rocm.model_files.models import model_of
from lora_rocm.model_files.readers import readers_of
from tests.command_line import command_line
from tests.judging import inspect
from tests.wording import Worded, mentions, phrase, saying, says, worded

ATTENTION = "down_blocks_1_attentions_0_transformer_blocks_{}_attn2_to_k"
TAGS = {
    "ss_tag_frequency": json.dumps({"10_cat": {"cat": 3, "sitting": 1}}),
    "ss_steps": "400",
    "ss_network_args": "{}",
}


def lora(path: Path, metadata: dict[str, str] | None = None) -> Path:
    tensors: dict[str, torch.Tensor] = {}
    for number, (rank, alpha) in enumerate([(4, torch.tensor(2.0)), (8, torch.tensor(4.0, dtype=torch.bfloat16))]):
        module = f"lora_unet_{ATTENTION.format(number)}"
        tensors[f"{module}.lora_down.weight"] = torch.zeros(rank, 2048, dtype=torch.float16)
        tensors[f"{module}.lora_up.weight"] = torch.zeros(640, rank, dtype=torch.float16)
        tensors[f"{module}.alpha"] = alpha
    name = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    tensors |= {f"{name}.lora_down.weight": torch.zeros(4, 768), f"{name}.lora_up.weight": torch.zeros(3072, 4)}
    tensors[f"{name}.alpha"] = torch.tensor(4.0)
    save_file(tensors, path, metadata)
    return path


def test_a_lora(tmp_path: Path) -> None:
    found = inspect(lora(tmp_path / "x.safetensors", TAGS))
    assert (found["title"], found["families"], found["trainable"]) == (
        worded("commands/a-lora-for-sdxl"),
        ["sdxl"],
        ["sdxl"],
    )
    adapter = found["adapter"]
    assert adapter["modules"] == {"lora_te1": {"mlp_fc1": 1}, "lora_unet": {"attn2_to_k": 2}}
    assert adapter["ranks"] == {"4": 2, "8": 1} and adapter["alpha"] == {"min": 2.0, "max": 4.0, "missing": 0}
    readers = dict(adapter["readers"])
    assert "at another strength" in readers.pop("diffusers"), "it takes one alpha for all"
    assert readers == dict.fromkeys(("comfyui", "forge", "a1111"), "reads it") | {"kohya": "read it"}
    assert found["metadata"] == {"ss_steps": "400", "tags": 2, "frequent_tags": ["cat", "sitting"]}
    text = inspect_text(found)
    for words in ("rank 4 (2), 8 (1)", "alpha 2 to 4", "lora.init_from", "model.family: sdxl"):
        assert words in text


def test_metadata_decide_where_names_do_not(tmp_path: Path) -> None:
    tensors = {"unet.mid_block.resnets.0.conv1.lora_A.weight": torch.zeros(4, 8, 3, 3)}
    save_file(tensors, tmp_path / "x.safetensors")
    assert inspect(tmp_path / "x.safetensors")["families"] == ["sd15", "sd2", "sdxl"]
    save_file(tensors, tmp_path / "x.safetensors", {"ss_base_model_version": "sd_v2"})
    assert inspect(tmp_path / "x.safetensors")["families"] == ["sd2"]
    assert inspect(tmp_path / "x.safetensors")["title"] == worded("commands/a-lora-for-stable-diffusion-2-x")


def test_a_file_whose_family_is_only_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"diffusion_model.joint_blocks.0.x_block.attn.qkv.lora_A.weight": torch.zeros(4, 8)}, path)
    found = inspect(path)
    assert (found["title"], found["trainable"]) == (worded("commands/a-lora-for-stable-diffusion-3"), [])
    assert says(inspect_text(found), "commands/not-trained-here")
    save_file({"a.hada_w1_a": torch.zeros(1), "a.dora_scale": torch.zeros(1)}, path, {"ss_tag_frequency": "[1]"})
    assert inspect(path)["title"] == worded("commands/a-loha-and-dora-for-a-model")
    save_file({"blob": torch.zeros(1)}, path)
    assert inspect(path)["title"] == worded("commands/a-file-that-is-not-known")


def test_a_file_put_together_from_two_families_is_said_to_start_no_run(tmp_path: Path) -> None:
    """As a run refuses it; each half alone can start one (the control)."""
    modules = {
        "z-image": "diffusion_model.layers.0.attention.to_q",
        "flux": "transformer.single_transformer_blocks.0.attn.to_q",
    }
    halves = {
        family: {f"{name}.lora_{factor}.weight": torch.zeros(2, 2) for factor in "AB"}
        for family, name in modules.items()
    }
    path = tmp_path / "x.safetensors"
    for family, half in halves.items():
        save_file(half, path)
        assert family in inspect(path)["trainable"] and says(inspect_text(inspect(path)), "commands/can-start-a-run")
    save_file(halves["z-image"] | halves["flux"], path)
    found, text = inspect(path), inspect_text(inspect(path))
    assert (found["families"], found["trainable"], found["adapter"]["readers"]) == ([], [], None)
    assert "FLUX.1 and Z-Image" in found["title"] and not mentions(text, "commands/can-start-a-run")
    assert says(text, "commands/no-run-starts-from-a-mixture-it", modules=modules["z-image"])


def test_what_a_run_cannot_use_though_its_family_is_trained(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for width in (768, 1024, 2048):
        unet = {"down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.weight": torch.zeros(1, width)}
        save_file(unet, path)
        text = inspect_text(inspect(path))
        assert says(text, "commands/this-part-alone-cannot-be-used-here") and not mentions(
            text, "commands/not-trained-here"
        )
    save_file({"lora_te1_text_model_x.a1.weight": torch.zeros(1), "lora_te2_x.b1.weight": torch.zeros(1)}, path)
    text = inspect_text(inspect(path))
    assert (
        "a GLoRA for SDXL" in text
        and says(text, "commands/no-run-starts-from-a-glora")
        and not mentions(text, "commands/not-trained-here")
    )
    save_file({"joint_blocks.0.x_block.attn.qkv.weight": torch.zeros(1)}, path)  # control
    assert says(inspect_text(inspect(path)), "commands/not-trained-here")


@pytest.mark.parametrize("width", [384, 128, 64])
def test_a_flux_model_with_more_inputs_is_named_and_not_said_to_be_trained(tmp_path: Path, width: int) -> None:
    tensors = {"double_blocks.0.img_attn.qkv.weight": torch.zeros(1), "img_in.weight": torch.zeros(1, width)}
    save_file({**tensors, "guidance_in.in_layer.weight": torch.zeros(1)}, tmp_path / "x.safetensors")
    found = inspect(tmp_path / "x.safetensors")
    title = {384: "a FLUX.1 Fill model", 128: "a FLUX.1 Depth or Canny model", 64: "a FLUX.1 dev or Kontext model"}
    assert (found["title"], found["families"]) == (title[width], ["flux"] if width == 64 else [])
    assert found["trainable"] == [], "the rest of it is missing"


def test_a_gguf_file_is_refused_as_by_a_run(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError) as caught:
        inspect(path)
    assert caught.value.code == "gguf-refused" and "damaged" not in str(caught.value)


def test_an_embedding(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for tensors, family in (
        ({"clip_l": torch.zeros(2, 768), "clip_g": torch.zeros(2, 1280)}, "sdxl"),
        ({"emb_params": torch.zeros(1, 768)}, "sd15"),
        ({"emb_params": torch.zeros(1, 1024)}, "sd2"),
    ):
        save_file(tensors, path)
        found = inspect(path)
        assert says(found["title"], "commands/an-embedding-for-s") and (found["families"], found["trainable"]) == (
            [],
            [],
        )
        seen = model_of({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        assert seen is not None and seen.family == family
    save_file({"clip_l": torch.zeros(2, 768)}, path)  # control
    assert inspect(path)["title"] == worded("commands/a-file-that-is-not-known")


def test_a_checkpoint_with_several_components(tmp_path: Path) -> None:
    dit = {"double_blocks.0.img_attn.qkv.weight": torch.zeros(1), "guidance_in.in_layer.weight": torch.zeros(1)}
    tensors = {f"model.diffusion_model.{name}": tensor for name, tensor in dit.items()}
    tensors["model.diffusion_model.double_blocks.0.img_attn.qkv.scale_weight"] = torch.zeros(1)
    tensors["vae.decoder.conv_in.weight"] = torch.zeros(1, 16, 1, 1)
    tensors["vae.decoder.mid.block_1.norm1.weight"] = torch.zeros(1)
    save_file(tensors, tmp_path / "x.safetensors")
    found = inspect(tmp_path / "x.safetensors")
    assert found["title"] == "a FLUX.1 dev or Kontext model" and found["families"] == ["flux"]
    assert found["quantised"] == worded("commands/comfyuis-scaled-fp8")
    assert list(found["components"]) == ["model.diffusion_model.", "vae."]


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    index: dict[str, Any] = {"_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderKL"], "x": [None, None]}
    (tmp_path / "model" / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    found = inspect(tmp_path / "model")
    assert found["title"] == "a FLUX.1 model (FluxPipeline)" and found["components"] == {"vae": "AutoencoderKL"}
    assert not found["trainable"] and says(inspect_text(found), "commands/the-weights-of-its-transformer-are-missing")
    assert says(inspect_text(found), "commands/vae-autoencoderkl-not-in-this-folder")
    (tmp_path / "modular").mkdir()
    index = {
        "_class_name": "AnimaModularPipeline",
        "vae": ["diffusers", "AutoencoderKLQwenImage", {"subfolder": "vae"}],
    }
    (tmp_path / "modular" / "modular_model_index.json").write_text(json.dumps(index), encoding="utf-8")
    found = inspect(tmp_path / "modular")
    assert found["families"] == ["anima"] and found["components"] == {"vae": "AutoencoderKLQwenImage"}
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "adapter_config.json").write_text('{"lora_alpha": 3}', encoding="utf-8")
    lora(tmp_path / "peft" / "adapter_model.safetensors")
    assert inspect(tmp_path / "peft")["adapter"]["alpha"] == {"min": 3, "max": 3, "missing": 0}
    (tmp_path / "state").mkdir()
    for name in ("state.json", "adapter.safetensors"):
        (tmp_path / "state" / name).write_bytes(b"")
    assert inspect(tmp_path / "state")["title"] == worded("commands/a-training-state-of-lora-rocm")
    around = tmp_path / "around"
    (around / "model").mkdir(parents=True)
    (around / "model" / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    file = lora(around / "x.safetensors")
    with pytest.raises(ModelError) as caught:
        inspect(around)
    assert str(around / "model") in caught.value.fix and str(file) in caught.value.fix


def component(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


DIT = {
    "single_transformer_blocks.0.proj_mlp.weight": torch.zeros(2, 2, dtype=torch.bfloat16),
    "time_text_embed.text_embedder.linear_1.weight": torch.zeros(2, dtype=torch.bfloat16),
}
T5 = "encoder.block.0.layer.1.DenseReluDense.wi_1.weight"


def test_a_component_folder_says_what_its_file_says_and_which_key_takes_it(tmp_path: Path) -> None:
    t5 = {T5: torch.zeros(10240, 1), "encoder.block.0.layer.0.SelfAttention.q.weight": torch.zeros(1)}
    folder = component(tmp_path / "te", {"architectures": ["T5EncoderModel"]}, t5)
    found, of_file = inspect(folder), inspect(folder / "model.safetensors")
    assert (
        found["title"] == worded("commands/the-text-encoder-t5-xxl-t5encodermodel")
        and of_file["title"] in found["title"]
    )
    assert all(found[name] == of_file[name] for name in ("tensors", "bytes", "dtypes", "quantised", "keys"))
    for each in (found, of_file):
        assert says(inspect_text(each), "commands/can-be-used-as-model-text-encoder")
    for config, words in (
        ({"quantization_config": {"quant_method": "gptq"}}, "supported (gptq)"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "can be used as"),
    ):
        assert words in inspect_text(inspect(component(folder, config, t5)))
    text = inspect_text(inspect(component(folder, {}, {**t5, "encoder.block.0.qweight": torch.zeros(1)})))
    assert says(text, "commands/quantised-gptq-or-awq") and "can be used" not in text


def test_a_whole_diffusers_folder_says_what_each_component_is(tmp_path: Path) -> None:
    index: dict[str, Any] = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    folder = component(tmp_path / "transformer", {"_class_name": "FluxTransformer2DModel"}, DIT)
    found = inspect(tmp_path)
    assert found["families"] == ["flux"] and found["parts"]["transformer"]["dtypes"] == {"BF16": 12}
    assert "FluxTransformer2DModel, a FLUX.1 schnell model, 2 tensors, 12 B, BF16" in inspect_text(found)
    without = json.dumps({**index, "vae": ["diffusers", "AutoencoderKL"]})
    (tmp_path / "model_index.json").write_text(without, encoding="utf-8")
    assert (
        says(inspect_text(inspect(tmp_path)), "commands/vae-not-in-this-folder") and not inspect(tmp_path)["trainable"]
    )
    (tmp_path / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    alone = inspect(folder)
    assert (alone["families"], alone["trainable"]) == (["flux"], [])
    assert says(inspect_text(alone), "commands/takes-the-whole-diffusers-folder-tmp-path", tmp_path=tmp_path)
    component(folder, {}, {"txtfusion.projector.weight": torch.zeros(1)})
    mixed = inspect(tmp_path)
    assert mixed["trainable"] == [] and "mixed: its transformer is a Krea 2 model" in inspect_text(mixed)
    wrong = component(tmp_path / "transformer", {"_class_name": "AutoencoderKL"}, DIT)
    for path in (wrong, tmp_path):
        text = inspect_text(inspect(path))
        assert says(text, "commands/mixed-its-config-is-of-autoencoderkl-its") and "can be" not in text
    (folder / "model.safetensors").unlink()
    assert says(inspect_text(inspect(tmp_path)), "commands/transformer-this-folder-has-a-config-json")


def test_the_peft_folder_of_an_image_model_says_as_much_as_its_export(tmp_path: Path) -> None:
    """Also for a text encoder, which has the same names in many models."""
    attention = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"
    modules = {"unet": attention, "text_encoder": "text_model.encoder.layers.0.mlp.fc1"}
    for component, module in modules.items():
        (tmp_path / component).mkdir()
        sides = {"A": (4, 2048), "B": (640, 4)}
        tensors = {f"base_model.model.{module}.lora_{f}.weight": torch.zeros(shape) for f, shape in sides.items()}
        save_file(tensors, tmp_path / component / "adapter_model.safetensors")
        (tmp_path / component / "adapter_config.json").write_text('{"lora_alpha": 4, "r": 4}', encoding="utf-8")
    found = inspect(tmp_path)
    assert found["families"] == ["sdxl"]
    row = readers_of(["base_model.model.x.lora_A.weight"], ["sdxl"])
    assert row is not None
    for component in modules:
        adapter = found["adapters"][component]
        assert adapter["readers"] == row.by_program and adapter["ranks"] == {"4": 1} and adapter["alpha"]["min"] == 4
    text = inspect_text(found)
    assert says(text, "commands/text-encoder-a-lora-for-the-text") and not any(
        word in text for word in ("unknown", "not known")
    )
    assert text.count(phrase("commands/comfyui-reads-nothing-of-it")) == 2 and text.count("rank 4 (1)") == 2


def test_folders_of_peft_adapters_and_of_transformers(tmp_path: Path) -> None:
    """The peft folder of a run, with one component and with two, and a model in two files of weights."""
    folder = tmp_path / "run" / "peft" / "model"
    folder.mkdir(parents=True)
    name = "base_model.model.model.layers.0.self_attn.{}_proj.lora_{}.weight"
    tensors = {name.format(layer, factor): torch.zeros(4, 4) for layer in "qv" for factor in "AB"}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"lora_alpha": 8, "r": 4}', encoding="utf-8")
    for path in (folder, folder.parent, folder / "adapter_model.safetensors"):
        found = inspect(path)
        assert (found["title"], found["trainable"]) == (worded("commands/a-lora-for-language-models"), ["causal-lm"])
        assert found["adapter"]["alpha"] == {"min": 8, "max": 8, "missing": 0}
    assert found["adapter"]["readers"]["vllm"] == found["adapter"]["readers"]["peft"] == "reads it"
    (folder.parents[1] / "recipe.yaml").touch()
    (folder.parents[1] / "events.jsonl").touch()
    assert says(inspect(folder.parents[1])["title"], "commands/a-run-directory-of-lora-rocm-peft")
    (folder.parent / "unet").mkdir()
    (folder.parent / "unet" / "adapter_config.json").write_text('{"lora_alpha": 8, "r": 4}', encoding="utf-8")
    lora(folder.parent / "unet" / "adapter_model.safetensors")
    found = inspect(folder.parent)
    assert found["title"] == worded("commands/peft-adapters-of-2-components") and found["families"] == []
    assert found["components"] == {
        "model": worded("commands/a-lora-for-language-models"),
        "unet": worded("commands/a-lora-for-sdxl"),
    }
    merged = tmp_path / "merged"
    merged.mkdir()
    for number, name in enumerate(("model.layers.0.self_attn.qkv_proj.weight", "model.embed_tokens.weight"), 1):
        save_file({name: torch.zeros(2, 4)}, merged / f"model-0000{number}-of-00002.safetensors")
    (merged / "config.json").write_text('{"architectures": ["Phi3ForCausalLM"]}', encoding="utf-8")
    with pytest.raises(ModelError, check=saying("commands/no-weights-that-are-read-with-it")) as caught:
        inspect(merged)
    assert "model-00001-of-00002.safetensors" in caught.value.fix, "nothing says that they belong together"
    parts = {str(number): f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    index = merged / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": parts}), encoding="utf-8")
    found = inspect(merged)
    assert (found["title"], found["tensors"]) == (worded("commands/a-language-model-phi3forcausallm"), 2)
    assert (found["families"], found["trainable"]) == (["causal-lm"], []), "its config says nothing of its size"
    text = inspect_text(inspect(merged / parts["1"]))
    assert not mentions(text, "commands/can-be-trained")
    (merged / parts["1"]).write_bytes((merged / parts["2"]).read_bytes())
    with pytest.raises(ModelError, check=saying("commands/hold-the-same-tensors")):
        inspect(merged)
    (merged / parts["1"]).unlink()
    with pytest.raises(ModelError, check=saying("commands/this-file-of-weights-is-missing")):
        inspect(merged)


@pytest.mark.parametrize(("name", "content", "words"), [
    ("x.safetensors", b"\x10\0\0\0\0\0\0\0{}", worded("commands/ends-inside-its-header")),
    ("x.gguf", b"GGUF\x03\0\0\0" + bytes(40), worded("commands/gguf")),
    ("x.safetensors", b"PK\x03\x04" + bytes(40), worded("commands/zip-archive")),
    ("x.safetensors", b"version https://git-lfs.github.com/spec/v1\n", worded("commands/the-pointer-of-git-lfs")),
    ("x.ckpt", b"", worded("commands/pickle")),
    ("x.safetensors", b"\x02\0\0\0\0\0\0\0xx", worded("commands/not-readable")),
    ("missing.safetensors", None, worded("commands/no-such-file-or-folder")),
    ("model/model_index.json", b"[1]", worded("commands/no-object")),
    ("model/config.json", b'{"_class_name": "X"}', worded("commands/a-config-json-of-x-and-no")),
    ("model/scheduler_config.json", b"{}", worded("commands/this-folder-of-a-scheduler-has-no")),
])  # fmt: skip
def test_what_is_no_model(tmp_path: Path, name: str, content: bytes | None, words: Worded) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        inspect(path.parent if "/" in name else path)
    assert says(caught.value.what, words) and str(tmp_path) in caught.value.where


def test_the_command(tmp_path: Path) -> None:
    path = lora(tmp_path / "x.safetensors")
    said = command_line("inspect", path, "--json")
    assert said.exit_code == 0 and json.loads(said.stdout) == inspect(path)
    assert says(command_line("inspect", path).stdout, "commands/a-lora-for-sdxl")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("builtin:tiny-sdxl", worded("commands/a-tiny-model-that-ships-with-the")),
        ("builtin:demo", worded("commands/data-that-ships-with-the-program")),
    ],
)
def test_what_ships_with_the_program_is_known(name: str, words: Worded) -> None:
    assert says(inspect(Path(name))["title"], words)


def test_what_is_no_model_is_called_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: {}", encoding="utf-8")
    (tmp_path / "a.png").write_bytes(b"x" * 99)
    for path, words in (("a.yaml", "is a recipe"), ("a.png", "not a .safetensors")):
        with pytest.raises(ModelError, match=words) as caught:
            inspect(tmp_path / path)
        assert caught.value.code == "not-a-model"
    with pytest.raises(ModelError, check=saying("commands/nothing-of-this-name-ships")) as unknown:
        inspect(Path("builtin:tiny"))
    assert "builtin:tiny-sdxl" in unknown.value.fix
    for name in ("recipe.yaml", "events.jsonl", "lora.safetensors"):
        (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "run" / name).touch()
    assert says(inspect(tmp_path / "run")["title"], "commands/a-run-directory-of-lora-rocm-lora")


CLAIMS = re.compile(r"reads? it|scale is 1|lora-rocm export lists|can start a run|can be (used|trained)")
DAMAGES: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "a factor is missing": lambda tensors: {k: v for k, v in tensors.items() if "0_attn2_to_k.lora_down" not in k},
    "all factors of one side are missing": lambda tensors: {k: v for k, v in tensors.items() if "lora_up" not in k},
    "one unknown module": lambda tensors: tensors | renamed(tensors, "lora_unet_down", "lora_unet_dawn"),
    "200 unknown modules": lambda tensors: tensors | copies(tensors, 200),
    "factors of two ranks": lambda tensors: {k: v[1:] if "lora_down" in k else v for k, v in tensors.items()},
    "whole numbers": lambda tensors: {k: v if k.endswith("alpha") else v.to(torch.int8) for k, v in tensors.items()},
    "some alphas": lambda tensors: {k: v for k, v in tensors.items() if k != f"lora_unet_{ATTENTION.format(0)}.alpha"},
    "an alpha of two numbers": lambda tensors: {k: v.repeat(2) if "alpha" in k else v for k, v in tensors.items()},
    "bundled biases": lambda tensors: tensors | {f"lora_unet_{ATTENTION.format(0)}.diff_b": torch.zeros(640)},
}


def renamed(tensors: dict[str, torch.Tensor], old: str, new: str) -> dict[str, torch.Tensor]:
    return {name.replace(old, new): tensor.clone() for name, tensor in tensors.items() if old in name}


def copies(tensors: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    found = {}
    for number in range(count):
        found |= renamed(tensors, "lora_unet_", f"other{number}.")
    return found


@pytest.mark.parametrize("damage", [None, *DAMAGES])
def test_nothing_beside_a_refusal_claims_that_the_file_is_of_use(tmp_path: Path, damage: str | None) -> None:
    """And the verdict comes first."""
    tensors = load_file(lora(tmp_path / "whole.safetensors"))
    path = tmp_path / "x.safetensors"
    save_file(DAMAGES[damage](tensors) if damage else tensors, path, {"ss_base_model_version": "sdxl_base_v1-0"})
    found = inspect(path)
    text = inspect_text(found)
    assert ("unusable" in found) == (not found["trainable"]) == (damage is not None), text
    second = text.splitlines()[1]
    assert second.strip() == (found["unusable"] if damage else worded("commands/can-start-a-run-with-family"))
    assert bool(CLAIMS.search(text.replace(str(path), ""))) is (damage is None), text
    assert len(text.splitlines()) < 20
    if damage:
        assert found["adapter"]["readers"] is None


@pytest.mark.parametrize("config", [True, False])
def test_a_peft_file_without_its_config_claims_no_scale(tmp_path: Path, config: bool) -> None:
    module = "base_model.model.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"
    tensors = {f"{module}.lora_A.weight": torch.zeros(4, 2048), f"{module}.lora_B.weight": torch.zeros(640, 4)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    if config:
        (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 4, "r": 4}', encoding="utf-8")
    found = inspect(tmp_path)
    text = inspect_text(found)
    assert bool(CLAIMS.search(text)) is config and bool(found["trainable"]) is config, text


@pytest.mark.parametrize("broken", [None, "unet", "text_encoder"])
def test_one_damaged_component_refuses_the_folder(tmp_path: Path, broken: str | None) -> None:
    modules = {
        "unet": "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k",
        "text_encoder": "text_model.encoder.layers.0.mlp.fc1",
    }
    for component, module in modules.items():
        (tmp_path / component).mkdir()
        width = 2048 if component == "unet" else 768
        tensors = {f"base_model.model.{module}.lora_A.weight": torch.zeros(4, width)}
        if component != broken:
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.zeros(640, 4)
        save_file(tensors, tmp_path / component / "adapter_model.safetensors")
        (tmp_path / component / "adapter_config.json").write_text('{"lora_alpha": 4, "r": 4}', encoding="utf-8")
    text = inspect_text(inspect(tmp_path))
    assert bool(CLAIMS.search(text)) is (broken is None), text


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["unknown.weight"], 2),
        (["encoder.conv_in.weight", "decoder.conv_in.weight"], 2),
        ([f"lora_unet_{ATTENTION.format(0)}.lora_down.weight", f"lora_unet_{ATTENTION.format(0)}.lora_up.weight"], 0),
    ],
)
def test_the_exit_code_says_whether_a_recipe_can_name_it(tmp_path: Path, names: list[str], code: int) -> None:
    shapes = {"down.weight": (4, 2048), "up.weight": (640, 4)}
    tensors = {
        name: torch.zeros(next((s for end, s in shapes.items() if name.endswith(end)), (3, 3))) for name in names
    }
    save_file(tensors, tmp_path / "x.safetensors")
    ended = command_line("inspect", tmp_path / "x.safetensors", "--json")
    assert ended.exit_code == code and json.loads(ended.stdout)["usable"] is (code == 0)
    assert command_line("inspect", tmp_path / "x.safetensors").exit_code == code


def test_what_is_no_model_can_be_looked_at(tmp_path: Path) -> None:
    assert command_line("inspect", "builtin:tiny-sdxl").exit_code == 0
    assert inspect(Path("builtin:demo"))["usable"] is True
