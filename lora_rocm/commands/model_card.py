"""The model card that ``lora-rocm push`` writes: front matter, files, how to load them, and the training settings."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ruamel.yaml import YAML

from lora_rocm import __version__
from lora_rocm.commands.publication import LoraFile, Publication
from lora_rocm.families.spec import FamilySpec
from lora_rocm.foundation.redact import Private
from lora_rocm.foundation.terminal_text import one_line
from lora_rocm.foundation.units import number_text
from lora_rocm.model_files.readers import PROGRAMS, VLLM_RANKS
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.trigger import trigger_words, with_prompts_filled_in
from lora_rocm.report.figures import Figures
from lora_rocm.rundir.event_types import DataEvent, StartEvent
from lora_rocm.rundir.run_view import RunView

BASE = "BASE_MODEL"
"""Placeholder for the base model in examples if its hub id is not known."""
IDENTIFIER, OTHER_LICENSE = re.compile(r"[a-z0-9.+-]*"), "other"
MARKS = re.compile(r"([\\`*_{}\[\]#|~])")
DIFFUSERS = """\
```python
import torch
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{base}", torch_dtype=torch.bfloat16).to("cuda")
pipeline.load_lora_weights("{repo}", weight_name="{file}")
pipeline({prompt}).images[0].save("out.png")
```"""
PEFT_TEXT = """\
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(model, "{repo}")
```"""
PEFT_IMAGE = """\
```python
from peft import PeftModel

pipeline.{component} = PeftModel.from_pretrained(pipeline.{component}, "{repo}", subfolder="{folder}")
```"""


@dataclass(frozen=True)
class CardFacts:
    """Facts for a model card that are not in the publication.

    Attributes:
        repo: name of the repository.
        license: license in the front matter; empty if it is not known.
        previews: (place in the repository, prompt) of each preview.
        private: removes paths and tokens from texts.
    """

    repo: str
    license: str
    previews: Sequence[tuple[str, str]]
    private: Private


def is_identifier(license_id: str) -> bool:
    """Whether a license is empty or is written like the hub's identifiers, such as apache-2.0 and openrail++."""
    return IDENTIFIER.fullmatch(license_id) is not None


def card_text(found: Publication, facts: CardFacts, spec: FamilySpec | None) -> str:
    """Return the README.md of a repository."""
    clean = facts.private.text
    recipe = None if found.recipe is None else with_prompts_filled_in(found.recipe)
    triggers = [clean(word) for word in trigger_words(recipe)] if recipe is not None else []
    parts = [f"---\n{_front_matter(found, facts, spec, triggers)}---", f"# {_escaped(clean(found.title))}"]
    title = spec.title if spec is not None else "a model that is not known"
    base = f" Base model: [{found.base_model}](https://huggingface.co/{found.base_model})." if found.base_model else ""
    parts.append(f"{_escaped(found.files[0].kind)} for {_escaped(title)}.{base}")
    if not is_identifier(facts.license):
        parts.append(f"License: {_escaped(clean(facts.license))}")
    if recipe is not None and recipe.output.description:
        parts.append(_escaped(clean(recipe.output.description)))
    if triggers:
        parts.append(f"Trigger: {', '.join(map(_code, triggers))}")
    parts += ["## Files", _files_table(found.files), "## Use"]
    parts += _uses(found, facts, spec, [clean(prompt) for _, prompt in facts.previews] or triggers)
    parts += ["## Training", _table(("setting", "value"), _settings(found, recipe, spec, clean))]
    parts.append(f"Written by lora-rocm {__version__}.")
    return "\n\n".join(parts) + "\n"


def _front_matter(found: Publication, facts: CardFacts, spec: FamilySpec | None, triggers: Sequence[str]) -> str:
    is_text = spec is not None and spec.trains_on_texts
    by_diffusers = any(file.is_for("diffusers") for file in found.files)
    tags = ["lora", "text-generation", "peft"] if is_text else ["lora", "text-to-image", "template:diffusion-lora"]
    tags += ["diffusers"] if by_diffusers else []
    tags += [*(found.families if len(found.families) == 1 else ()), "lora-rocm"]
    fields: dict[str, object] = {
        "base_model": found.base_model or None,
        "base_model_relation": "adapter" if found.base_model else None,
        "library_name": "peft" if is_text else "diffusers" if by_diffusers else None,
        "pipeline_tag": "text-generation" if is_text else "text-to-image",
        "license": (facts.license if is_identifier(facts.license) else OTHER_LICENSE) or None,
        "instance_prompt": ", ".join(triggers) or None,
        "tags": tags,
        "widget": [{"text": facts.private.text(prompt), "output": {"url": place}} for place, prompt in facts.previews],
    }
    written = io.StringIO()
    yaml = YAML()
    yaml.width = 4096
    yaml.dump({name: value for name, value in fields.items() if value}, written)
    return written.getvalue()


def _files_table(files: Sequence[LoraFile]) -> str:
    rows = []
    for file in files:
        read = [PROGRAMS[program] for program in file.readers if file.is_for(program)]
        others = [f"{PROGRAMS[program]}: {text}" for program, text in file.readers.items() if not file.is_for(program)]
        name = _code(file.name or "adapter_model.safetensors")
        rows.append((name, ", ".join(read) or "not known", _escaped("; ".join(others)) or "-"))
    return _table(("file", "read by", "not read by, or not exactly"), rows)


def _uses(found: Publication, facts: CardFacts, spec: FamilySpec | None, prompts: Sequence[str]) -> Iterator[str]:
    """Yield a section for each program that reads one of the files exactly."""
    base = found.base_model or BASE
    prompt = _python(prompts[0] if prompts else "a prompt")
    yield from _in_programs(found.files)
    if file := _first(found.files, "diffusers"):
        yield "**diffusers:**\n\n" + DIFFUSERS.format(base=base, repo=facts.repo, file=file.name, prompt=prompt)
    if spec is not None:
        yield from _with_peft(found.files, facts.repo, base, spec)
    yield from _on_servers(found.files, facts.repo, base)
    if found.run_dir is not None and found.recipe is not None and found.recipe.lora.new_tokens:
        names = ", ".join(_code(token.token) for token in found.recipe.lora.new_tokens)
        yield f"New tokens: {names}. Copy the files in `embeddings` into the program's folder of embeddings."
    if base == BASE:
        yield f"`{BASE}` stands for the base model, which was a local file."


def _first(files: Sequence[LoraFile], program: str) -> LoraFile | None:
    """Return the first file that a program reads exactly."""
    return next((file for file in files if file.is_for(program)), None)


def _in_programs(files: Sequence[LoraFile]) -> Iterator[str]:
    if file := _first(files, "comfyui"):
        yield f"**ComfyUI:** copy {_code(file.name)} into `models/loras`, then use *Load LoRA*."
    if file := _first(files, "forge") or _first(files, "a1111"):
        titles = " and ".join(PROGRAMS[key] for key in ("forge", "a1111") if _first(files, key))
        tag = _code(f"<lora:{file.path.stem}:1>")
        yield f"**{titles}:** copy {_code(file.name)} into `models/Lora`, then write {tag} in the prompt."


def _with_peft(files: Sequence[LoraFile], repo: str, base: str, spec: FamilySpec) -> Iterator[str]:
    for file in (each for each in files if each.is_for("peft") and each.is_folder):
        if spec.trains_on_texts:
            yield "**PEFT:**\n\n" + PEFT_TEXT.format(base=base, repo=repo)
        else:
            name = spec.component
            folder = file.name if file.name.endswith(f"/{name}") else f"{file.name}/{name}"
            code = PEFT_IMAGE.format(repo=repo, component=name, folder=folder)
            yield f"**PEFT**, with a pipeline of diffusers:\n\n{code}"


def _on_servers(files: Sequence[LoraFile], repo: str, base: str) -> Iterator[str]:
    if file := _first(files, "vllm"):
        option = f" --max-lora-rank {file.max_lora_rank}" if file.rank > VLLM_RANKS[0] else ""
        modules = f"{repo.rpartition('/')[2]}={repo}"
        yield f"**vLLM:**\n\n```bash\nvllm serve {base} --enable-lora{option} --lora-modules {modules}\n```"
    if _first(files, "llama_cpp"):
        yield "**llama.cpp:** its `convert_lora_to_gguf.py FOLDER` makes a file for `--lora` of the downloaded folder."


def _settings(
    found: Publication, recipe: Recipe | None, spec: FamilySpec | None, clean: Callable[[str], str]
) -> Iterator[tuple[str, str]]:
    """Yield (setting, value) of the training, without folders, captions and names of data sets."""
    file = found.files[0]
    if recipe is None or spec is None:
        yield "adapter", _escaped(file.kind)
        if file.rank:
            yield "highest rank", str(file.rank)
        return
    view = None if found.run_dir is None else RunView.of(found.run_dir)
    yield from _of_model(recipe, spec)
    yield from _of_length(recipe, spec, view)
    # optimizer and result
    optim, start = recipe.optim, None if view is None else view.last(StartEvent)
    yield "optimizer", _code(optim.description)
    yield "learning rate", f"{optim.learning_rate:g}"
    yield "schedule", _escaped(optim.lr_scheduler)
    yield "precision", start.precision if start is not None else recipe.train.mixed_precision
    if recipe.train.ema_decay:
        yield "moving average", f"{recipe.train.ema_decay:g}"
    yield "seed", str(recipe.train.seed)
    if view is not None and (loss := Figures.of(view).loss.value) is not None:
        yield "loss at the end, smoothed", number_text(loss)
    if recipe.output.author:
        yield "author", _escaped(clean(recipe.output.author))


def _of_model(recipe: Recipe, spec: FamilySpec) -> Iterator[tuple[str, str]]:
    yield "model family", _escaped(spec.title)
    if recipe.model.quantization != "none":
        yield "format of the frozen base", recipe.model.quantization
    yield "adapter", _escaped(f"{recipe.lora.title}, {recipe.lora.size}")
    targets = recipe.lora.targets
    yield "trained modules", ", ".join(map(_code, (targets,) if isinstance(targets, str) else targets))
    if spec.text_components:
        yield "text encoders", "trained" if recipe.lora.train_text_encoder else "not trained"


def _of_length(recipe: Recipe, spec: FamilySpec, view: RunView | None) -> Iterator[tuple[str, str]]:
    train, data = recipe.train, None if view is None else view.last(DataEvent)
    if view is not None and view.updates:
        yield "steps", str(view.updates)
        if data is not None and data.steps_per_epoch:
            yield "epochs", f"{view.updates / data.steps_per_epoch:.3g}"
    if data is not None:
        yield "samples per epoch", str(data.samples)
    yield "batch size", f"{train.batch_size} x {train.gradient_accumulation_steps} accumulated"
    if spec.reads("data.resolution"):
        sides = sorted({source.resolution for source in recipe.data.resolved_sources()})
        yield "resolution", f"{', '.join(map(str, sides))} px"
    else:
        yield "longest sample", f"{recipe.data.max_length} tokens"


def _table(head: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(text: str) -> str:
    """Return a text, escaped so that Markdown shows it unchanged."""
    return MARKS.sub(r"\\\1", html.escape(one_line(text), quote=False))


def _code(text: str) -> str:
    """Return a text as inline code, also in a table."""
    plain = one_line(text).replace("|", "\\|")
    marks = "`" * (max(map(len, re.findall("`+", plain)), default=0) + 1)
    return f"{marks} {plain} {marks}" if len(marks) > 1 else f"{marks}{plain}{marks}"


def _python(text: str) -> str:
    """Return a text as a Python string literal that cannot close the Markdown code block around it."""
    return repr(one_line(text)).replace("```", "` ` `")
