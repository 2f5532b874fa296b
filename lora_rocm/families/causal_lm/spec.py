"""The specification of language models for the light half: recipe sections and names."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lora_rocm.families.spec import Axis, FamilySpec, FileMetadata, ShapeRules
from lora_rocm.recipe.sections import InputFolder, ModelSection, ObjectiveSection, PathOrHubId

TOKENS_MULTIPLE = 64


class CausalLMSection(ModelSection):
    """The base model. A language model that writes the next token (Llama, Qwen, Gemma, Mistral, Phi, gpt-oss, ...)."""

    part_keys: ClassVar[tuple[str, ...]] = ("tokenizer",)

    family: Literal["causal-lm"] = Field("causal-lm", description="Model family.")
    name_or_path: PathOrHubId = Field(
        description="A folder with config.json, tokenizer and .safetensors files, as transformers saves them, or a "
        "hub id."
    )
    tokenizer: InputFolder | None = Field(None, description="Folder of another tokenizer, with its chat template.")


class CrossEntropySection(ObjectiveSection):
    """The training objective of language models: the cross-entropy of the next token."""

    train_on: Literal["answers", "all"] = Field(
        "answers",
        description="answers: of conversations only what the assistant says, and of prompts their completion; all: "
        "every token. Plain texts are trained on as a whole.",
    )


SPEC = FamilySpec(
    name="causal-lm",
    title="language models",
    model_section=CausalLMSection,
    objective_section=CrossEntropySection,
    implementation="lora_rocm.families.causal_lm.family:CausalLM",
    component="model",
    shapes=ShapeRules((Axis("tokens", unit="tokens", multiple=TOKENS_MULTIPLE),)),
    samples=("text",),
    preview="text",
    fp16="never",
    metadata=FileMetadata(rate="", text_rate=""),
    formats=("peft",),
    conversions=("merged", "gguf"),
)
