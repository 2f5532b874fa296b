"""Hostile and broken content in the configuration of every trainer: secrets, odd paths, bombs, halves, code.

The importer ends with a recipe or with an error with a code. It writes and prints no secret, and lists unknown keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lora_rocm.commands.import_config import import_config, outcomes_text
from lora_rocm.errors import UserError
from lora_rocm.importing.registry import MODULES
from lora_rocm.recipe.load import load_text

SECRETS = (
    "hf_AbCdEfGhIjKlMnOpQrStUvWx12", "sk-ant-api03-AbCdEfGh12345678", "github_pat_11ABCDEFG0AbCdEfGhIjKl",
    "0123456789abcdef0123456789abcdef01234567", "AKIAIOSFODNN7EXAMPLE", "glpat-AbCdEfGhIjKlMnOpQrSt",
    "https://me:s3cr3tpassw0rd@example.org/x", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcDEF123456",
)  # fmt: skip
WINDOWS = r"C:\Users\Zoë\new models\temp.safetensors"
SH, BAT, TOML, YAML, JSON, PY = (
    "  --{k} {v} \\\n",
    " --{k} {v} ^\r\n",
    "{k} = {v}\n",
    "{k}: {v}\n",
    ',\n"{k}": {v}',
    "{k}={v}, ",
)
WHOLE: dict[str, tuple[str, str, str, str]] = {
    "kohya": ("a.toml", 'network_module = "networks.lora"\ntrain_data_dir = "s"\n', TOML, ""),
    "kohya in sh": ("a.sh", "accelerate launch sdxl_train_network.py --network_module=networks.lora \\\n", SH, "\n"),
    "kohya in bat": ("a.bat",
                     "accelerate launch sdxl_train_network.py --network_module=networks.lora ^\r\n", BAT, "\r\n"),
    "onetrainer": ("a.json", '{"training_method": "LORA", "model_type": "STABLE_DIFFUSION_XL_10_BASE", '
                   '"base_model_name": "a", "concepts": [{"path": "x"}]', JSON, "\n}"),
    "ai-toolkit": ("a.yaml", "job: extension\nconfig:\n  name: x\n  process:\n  - type: sd_trainer\n"
                   "    network: {linear: 8}\n"
                   "    model: {name_or_path: a, is_flux: true}\n    train:\n", f"      {YAML}", ""),
    "simpletuner": ("config.json", '{"--model_type": "lora", "--model_family": "sdxl", "--lora_type": "standard"',
                    JSON, "\n}"),
    "musubi": ("a.sh", "accelerate launch zimage_train_network.py --dit a --network_module networks.lora_zimage \\\n",
               SH, "\n"),
    "diffusion-pipe": ("a.toml", 'output_dir = "x"\ndataset = "d.toml"\nmicro_batch_size_per_gpu = 1\n[model]\n'
                       'type = "sdxl"\ncheckpoint_path = "a"\n[adapter]\ntype = "lora"\nrank = 4\n', TOML, ""),
    "llama-factory": ("a.yaml", "model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\ndataset: x\n", YAML, ""),
    "axolotl": ("a.yaml", "base_model: a/b\nadapter: lora\nlora_r: 8\nmicro_batch_size: 2\n", YAML, ""),
    "unsloth": ("a.py", "from unsloth import FastLanguageModel\nmodel = FastLanguageModel.get_peft_model(m, r=8, ",
                PY, ")\n"),
    "trl": ("a.sh", "trl sft --model_name_or_path a/b --dataset_name x --use_peft \\\n", SH, "\n"),
    "torchtune": ("a.yaml", "model:\n  _component_: torchtune.models.llama3.lora_llama3_8b\n  lora_rank: 8\n"
                  "dataset:\n  _component_: torchtune.datasets.alpaca_dataset\n", YAML, ""),
    "peft": ("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "a/b", "r": 8', JSON, "\n}"),
}  # fmt: skip
"""Trainer -> (name of its file, the file's begin, a further setting's layout, the file's end)."""
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{above}'] * 9)}]\n" for above, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def content(trainer: str, pairs: Sequence[tuple[str, str]]) -> str:
    _, begin, form, end = WHOLE[trainer]
    return begin + "".join(form.format(k=key, v=value) for key, value in pairs) + end


def said(folder: Path, name: str, text: str | bytes) -> str:
    """Everything that the import of a file writes or prints; the recipe is one that lora-rocm accepts."""
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    try:
        found = import_config([path], (), None)
    except UserError as error:
        assert error.code.startswith("import-"), error.code
        return str(error)
    assert load_text(found.recipe, Path("r.yaml")).recipe
    return f"{found} {outcomes_text(found)}"


def test_every_trainer_is_here() -> None:
    assert {trainer.partition(" ")[0] for trainer in WHOLE} == {*MODULES}


@pytest.mark.parametrize("trainer", WHOLE)
def test_secrets_under_harmless_keys_are_written_nowhere(trainer: str, tmp_path: Path) -> None:
    keys = ("output_name", "some_key", "output_dir", "trigger_word", "run_name", "logging_dir", "name", "lr")
    for secret in SECRETS:
        text = content(trainer, [*((key, json.dumps(secret)) for key in keys), ("brand_new_key", "5")])
        found = said(tmp_path, WHOLE[trainer][0], text)
        assert secret not in found and "brand_new_key" in found


@pytest.mark.parametrize("trainer", WHOLE)
def test_odd_values_and_new_keys_are_listed(trainer: str, tmp_path: Path) -> None:
    path = f"'{WINDOWS}'" if WHOLE[trainer][0].endswith((".sh", ".toml")) else json.dumps(WINDOWS)
    odd = [("output_dir", path), ("seed", "9" * 400), ("learning_rate", "1e999"), ("lr", '"nan"'), ("a_new_key", "5")]
    text = content(trainer, [*odd, ("output_name", '"a\u202eb\u200b"'), ("note", f'"{"x" * 3000}"')])
    found = said(tmp_path, WHOLE[trainer][0], text)
    assert "a_new_key" in found and "\u202e" not in found.partition("outcome")[0]


def damages(trainer: str) -> Iterator[str | bytes]:
    """Damaged files of a trainer."""
    text = content(trainer, [("seed", "7"), ("output_name", '"x"')])
    yield from (text[: len(text) * cut // 8] for cut in range(1, 8, 2))
    yield from (text.replace("\n", "\r"), f"\ufeff{text}", text.encode("utf-16"), text + text, text.replace("  ", "\t"))
    name = WHOLE[trainer][0]
    if name.endswith(".yaml"):
        yield from (text + BOMB, f"{text}x: !!python/object/apply:os.abort []\n", f"{text}---\n{text}")
    if name.endswith(".json"):
        yield from (text.replace(",\n", ", // c\n"), f"[{text}, {text}]", text[:-1] + ', "d": ' + "[" * 500)
    if name.endswith((".sh", ".bat")):
        shell = ("--seed=$SEED", "--seed $(cat x)", "--note 'open", "<<EOF\nx\nEOF", "--a %B% && del x", "${A[@]}")
        yield from (f"{text}  {each}\n" for each in shell)


@pytest.mark.parametrize("trainer", WHOLE)
def test_damaged_files_end_with_a_recipe_or_a_code(trainer: str, tmp_path: Path) -> None:
    for damaged in damages(trainer):
        assert said(tmp_path, WHOLE[trainer][0], damaged)


def test_tokens_of_the_environment_and_of_other_commands(tmp_path: Path) -> None:
    _, begin, _, _ = WHOLE["kohya in sh"]
    for secret in SECRETS:
        before = f"export HF_TOKEN='{secret}'\nwandb login {secret}\n# {secret}\nKEY='{secret}'\n"
        found = said(tmp_path, "a.sh", f"{before}{begin}  --api_key '{secret}' --note $KEY --x ${{KEY}} --y 5\n")
        assert secret not in found and " y = 5" in found


CELLS = (
    "!pip install unsloth\n%%bash\nexport HF_TOKEN={secret}\n",
    "import os\nos.environ['WANDB_API_KEY'] = '{secret}'\nlogin('{secret}')\n",
    "from unsloth import FastLanguageModel\nm, t = FastLanguageModel.from_pretrained('a/b', token='{secret}')\n",
    "key = '{secret}'\nm = FastLanguageModel.get_peft_model(m, r=16, note=key)\n",
    "for i in range(3):\n    args = SFTConfig(learning_rate=1e-4 * i, run_name=f'{secret}-{i}', **extra)\n",
    "x = __import__('os').system('touch {mark}')\nSFTTrainer(args=SFTConfig(seed=eval('2'), hub_token='{secret}'))\n",
    "def f(:\n",
    "match x:\n  case 1: SFTConfig(seed=3)\n",
)


@pytest.mark.parametrize("secret", SECRETS)
def test_a_notebook_is_read_and_never_run(secret: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    cells = [{"cell_type": "markdown", "source": [f"# {secret}"]}]
    code = (each.replace("{secret}", secret).replace("{mark}", str(mark)) for each in CELLS)
    cells += [{"cell_type": "code", "source": source, "outputs": [{"text": secret}]} for source in code]
    found = said(tmp_path, "n.ipynb", json.dumps({"cells": cells, "metadata": {"key": secret}, "nbformat": 4}))
    assert secret not in found and not mark.exists()
    assert "n.ipynb:" in found and "lora.rank" in found, "what is a literal is taken, and the rest has its line"


@pytest.mark.parametrize(
    "text",
    ['{"cells": 3}', '{"cells": [null, {"cell_type": "code"}]}', '{"cells": [{"cell_type": "code", "source": 7}]}',
     '{"cells": [{"cell_type": "code", "source": ["from trl import SFTConfig", 5]}]}', "[]", '{"cells'],
)  # fmt: skip
def test_no_notebook_is_an_exception(text: str, tmp_path: Path) -> None:
    assert said(tmp_path, "n.ipynb", text)
