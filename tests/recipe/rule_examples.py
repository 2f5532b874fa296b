"""For each rule over several keys the smallest recipe that breaks it: its changes to ``MINIMAL``, by dotted key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_rocm.families.registry import FAMILIES
from lora_rocm.recipe.key_rules.data_rules import CONTROL_KEYS
from lora_rocm.recipe.source_sections import OF_CLASS_IMAGES, OF_FOLDERS, OF_VIDEOS, DataSource

Example = Mapping[str, Any]
MINIMAL: Example = {
    "model.name_or_path": "some/base",
    "data.path": "pics",
    "train.max_train_steps": 10,
}
LISTS = ("data.sources", "lora.new_tokens", "lora.overrides")
"""Keys with entries that are concatenated when two examples are joined."""
OF_SOURCES: Mapping[str, Any] = {
    "path": "a", "dataset": "b", "split": "test", "image_column": "photo", "caption_column": "words",
    "crop_column": "box", "loss_weight_column": "weight", "caption_extension": ".md", "caption_fallback": "error",
    "trigger_word": "zwx", "caption_prefix": "a", "caption_suffix": "a", "enable_wildcard": True,
    "caption_tag_dropout_rate": 0.1, "shuffle_caption": True, "keep_tokens": 1, "random_crop": True, "color_aug": 1,
    "recursive": False, "include": ["x"], "exclude": ["x"], "metadata_file": "m.json", "mask_path": "m",
    "alpha_mask": True, "unmasked_weight": 0.1, "control_path": "c", "control_column": "c",
}  # fmt: skip
"""Option of a source -> a value that is not its default."""
RATES: Mapping[str, Any] = {
    "learning_rate": 1e-3, "text_encoder_learning_rate": 1e-3, "embedding_learning_rate": 1e-3,
    "lr_scheduler": "cosine", "lr_scheduler_num_cycles": 2, "lr_cosine_steps": 5, "lr_scheduler_power": 2.0,
    "lr_min_ratio": 0.1, "lr_warmup_steps": 5, "lr_warmup_ratio": 0.1, "lr_warmup_from_zero": True,
}  # fmt: skip
"""Key of ``optim`` that a relative step does not read -> a value that is not its default."""
WATCHING = {"train.validation_every_n_steps": 5}
RELATIVE = {"optim.optimizer": "adafactor", "optim.relative_step": True}
AVERAGES = {"optim.optimizer": "adamw_schedule_free"}
IN_FP8 = {"model.compute": "fp8", "model.quantization": "fp8", "runtime.profile": "fast"}
TOKEN, ENTRY = {"token": "<z>", "init": "cat"}, {"match": "unet.*"}
DRAWN = {"prompt": "a cat"}


def _both(section: str, first: str, second: str, value: Any = 2, other: Any = 3) -> dict[str, Example]:
    return {f"not-both:{section}.{first},{second}": {f"{section}.{first}": value, f"{section}.{second}": other}}


EXAMPLES: dict[str, Example] = {
    # model
    "products-have-the-bits-of-the-weights": {"model.compute": "int8", "runtime.profile": "fast"},
    "products-in-eight-bits-are-fast": {"model.compute": "fp8", "model.quantization": "fp8"},
    "products-in-eight-bits-give-bf16": {**IN_FP8, "train.mixed_precision": "fp16"},
    "products-in-eight-bits-are-not-compiled": {**IN_FP8, "runtime.compile": "regional"},
    "products-in-eight-bits-are-good-enough": {**IN_FP8, "model.family": "z-image"},
    # data
    "neither:data.path,sources": {"data.path": None},
    "both:data.path,sources": {"data.path": "pics", "data.sources": [{"path": "a"}]},
    "neither:data.watched.path,dataset": {"data.watched": {}, **WATCHING},
    "both:data.watched.path,dataset": {"data.watched": {"path": "a", "dataset": "b"}, **WATCHING},
    "neither:data.sources[each].path,dataset": {"data.sources": [{}]},
    "both:data.sources[each].path,dataset": {"data.sources": [{"path": "a", "dataset": "b"}]},
    "no-effect:data.watched.split,path": {"data.watched": {"path": "a", "split": "test"}, **WATCHING},
    "no-effect:data.watched.image_column,path": {"data.watched": {"path": "a", "image_column": "photo"}, **WATCHING},
    "no-effect:data.sources[each].split,path": {"data.sources": [{"path": "a", "split": "test"}]},
    "no-effect:data.sources[each].image_column,path": {"data.sources": [{"path": "a", "image_column": "photo"}]},
    **{
        f"no-effect:data.sources[each].{name},dataset": {"data.sources": [{"dataset": "b", name: OF_SOURCES[name]}]}
        for name in OF_FOLDERS
    },
    **{
        f"no-effect:data.{name},path": {"data.sources": [{"dataset": "b"}], f"data.{name}": OF_SOURCES[name]}
        for name in OF_FOLDERS
    },
    "no-effect:data.sources[each].num_class_images,class_prompt": {"data.sources": [
        {"path": "a", "is_reg": True, "num_class_images": 5}, {"path": "b"}]},
    **{
        f"no-effect:data.sources[each].{name},class_prompt": {
            "data.sources": [{"class_prompt": "a cat", "is_reg": True, name: OF_SOURCES[name]}, {"path": "a"}]
        }
        for name in DataSource.model_fields
        if name not in OF_CLASS_IMAGES | OF_VIDEOS
    },
    "class-images-are-regularisation": {"data.sources": [{"class_prompt": "a cat"}, {"path": "a"}]},
    "something-is-learned": {"data.sources": [{"path": "a", "is_reg": True}]},
    "no-effect:data.prior_loss_weight,is_reg": {"data.prior_loss_weight": 0.5},
    "source-not-both:mask_path,alpha_mask": {"data.sources": [{"path": "a", "mask_path": "m", "alpha_mask": True}]},
    "data-not-both:mask_path,alpha_mask": {"data.path": "a", "data.mask_path": "m", "data.alpha_mask": True},
    **{
        f"source-not-both:{name},dataset": {"data.sources": [{"dataset": "b", name: OF_SOURCES[name]}]}
        for name in ("mask_path", "control_path", "metadata_file")
    },
    **{
        f"source-not-both:{name},{control}": {
            "data.sources": [{place: "a", control: "c", name: OF_SOURCES[name]}]}
        for name in ("random_crop", "color_aug", "crop_column")
        for control, place in (("control_path", "path"), ("control_column", "dataset"))
    },
    **{
        f"data-not-both:{name},{control}": {"data.path": "a", f"data.{control}": "c", f"data.{name}": 1}
        for name in ("random_crop", "color_aug")
        for control in CONTROL_KEYS
    },
    "source-not-both:control_column,path": {"data.sources": [{"path": "a", "control_column": "c"}]},
    "data-not-both:control_column,path": {"data.path": "a", "data.control_column": "c"},
    "source-not-both:control_column,control_path": {
        "data.sources": [{"dataset": "b", "control_column": "c", "control_path": "c"}]},
    "data-not-both:control_column,control_path": {
        "data.path": "a", "data.control_column": "c", "data.control_path": "c"},
    "all-sources-have-controls": {"data.sources": [{"path": "a", "control_path": "c"}, {"path": "b"}]},
    "source-unmasked-weight-needs-masks": {"data.sources": [{"path": "a", "unmasked_weight": 0.1}]},
    "no-effect:data.unmasked_weight,mask_path": {"data.unmasked_weight": 0.1},
    "no-effect:data.normalize_masked_area_loss,mask_path": {"data.normalize_masked_area_loss": False},
    "watched-without-controls": {"data.watched": {"path": "b"}, "data.control_path": "c", **WATCHING},
    "watched-is-not-trained": {"data.path": "a", "data.watched": {"path": "a"}, **WATCHING},
    # objective
    "timesteps-are-a-range": {"objective.min_timestep": 500, "objective.max_timestep": 400},
    **{
        f"no-effect:objective.{name},timestep_sampling": {
            f"objective.{name}": 0.5, "objective.timestep_sampling": "uniform"}
        for name in ("logit_mean", "logit_std")
    },
    "no-effect:objective.huber_schedule,loss_type": {"objective.huber_schedule": "constant"},
    "no-effect:objective.huber_c,loss_type": {"objective.huber_c": 0.2},
    "no-effect:objective.huber_scale,loss_type": {"objective.huber_scale": 2.0},
    "no-effect:objective.huber_scale,huber_schedule": {"objective.huber_scale": 2.0, "objective.loss_type": "huber"},
    "no-effect:objective.adaptive_noise_scale,noise_offset": {"objective.adaptive_noise_scale": 1.0},
    "no-effect:objective.multires_noise_discount,multires_noise_iterations": {"objective.multires_noise_discount": 0.5},
    **_both("objective", "min_snr_gamma", "soft_min_snr_gamma"),
    # optim
    **_both("optim", "lr_warmup_steps", "lr_warmup_ratio", 5, 0.1),
    "not-both:optim.embedding_until_step,embedding_until_ratio": {
        "optim.embedding_until_step": 5, "optim.embedding_until_ratio": 0.1, "lora.new_tokens": [TOKEN]},
    **{
        f"schedule-reads:{name}": {f"optim.{name}": RATES[name]}
        for name in ("lr_scheduler_num_cycles", "lr_cosine_steps", "lr_scheduler_power", "lr_min_ratio")
    },
    "no-effect:optim.lr_warmup_from_zero,lr_warmup_steps": {"optim.lr_warmup_from_zero": True},
    "average-needs-a-first-rate": {**AVERAGES, "optim.lr_warmup_from_zero": True, "optim.lr_warmup_steps": 5},
    "average-in-place-of-schedule": {**AVERAGES, "optim.lr_scheduler": "cosine"},
    "warmup-init-needs-relative-step": {"optim.optimizer": "adafactor", "optim.warmup_init": True},
    **{f"relative-step-has-its-rate:{name}": {**RELATIVE, f"optim.{name}": value} for name, value in RATES.items()},
    "average-is-the-result": {**AVERAGES, "train.ema_decay": 0.9},
    "average-is-not-scaled": {**AVERAGES, "lora.scale_weight_norms": 1.0},
    "relative-step-reads-no-rates:loraplus_lr_ratio": {**RELATIVE, "lora.loraplus_lr_ratio": 2.0},
    "relative-step-reads-no-rates:overrides[all].learning_rate": {
        **RELATIVE, "lora.overrides": [{**ENTRY, "learning_rate": 1e-3}]},
    "optimizer-fits-weights": {"lora.weight_dtype": "fp16"},
    **{
        f"average-after:{name}": {**AVERAGES, f"optim.{name}": value, "lora.new_tokens": [TOKEN]}
        for name, value in (("embedding_until_step", 5), ("embedding_until_ratio", 0.1))
    },
    "new-tokens-are-there:embedding_until_step": {"optim.embedding_until_step": 5},
    "new-tokens-are-there:embedding_until_ratio": {"optim.embedding_until_ratio": 0.1},
    # lora
    "neither:lora.new_tokens[each].init,init_from": {"lora.new_tokens": [{"token": "<a>"}]},
    "both:lora.new_tokens[each].init,init_from": {"lora.new_tokens": [
        {"token": "<b>", "init": "cat", "init_from": "b.safetensors"}]},
    "tokens-have-names-of-their-own": {"lora.new_tokens": [TOKEN, {**TOKEN, "token": "z"}]},
    "an-override-sets-something": {"lora.overrides": [ENTRY]},
    "unread-by-oft:lora.alpha": {"lora.type": "oft", "lora.alpha": 1.0},
    "unread-by-oft:lora.overrides[each].alpha": {"lora.type": "oft", "lora.overrides": [{**ENTRY, "alpha": 1.0}]},
    "unread-by-ia3:lora.alpha": {"lora.type": "ia3", "lora.alpha": 1.0},
    "unread-by-ia3:lora.rank": {"lora.type": "ia3", "lora.rank": 4},
    "unread-by-ia3:lora.overrides[each].alpha": {"lora.type": "ia3", "lora.overrides": [{**ENTRY, "alpha": 1.0}]},
    "unread-by-ia3:lora.overrides[each].rank": {"lora.type": "ia3", "lora.overrides": [{**ENTRY, "rank": 4}]},
    **_both("lora", "rank_dropout", "use_dora", 0.1, True),
    **_both("lora", "module_dropout", "use_dora", 0.1, True),
    **_both("lora", "init", "init_from", "gaussian", "lora.safetensors"),
    **{
        f"start-from-the-base:{name}": {"lora.init": "pissa", f"lora.{name}": value}
        for name, value in (("dropout", 0.1), ("rank_dropout", 0.1), ("module_dropout", 0.1), ("use_dora", True),
                            ("scale_weight_norms", 1.0))
    },
    "orthogonal-ranks-are-even": {"lora.init": "orthogonal", "lora.rank": 5},
    "dora-needs-dense-weights": {"lora.use_dora": True, "model.quantization": "int8"},
    **{
        f"compiled-code-draws-nothing:{name}": {f"lora.{name}": 0.1, "runtime.compile": "full"}
        for name in ("rank_dropout", "module_dropout")
    },
    # the run
    "neither:train.max_train_steps,epochs": {"train.max_train_steps": None},
    "both:train.max_train_steps,epochs": {"train.max_train_steps": 10, "train.epochs": 2},
    "not-both:train.validation_every_n_steps,validation_every_n_epochs": {
        **WATCHING, "train.validation_every_n_epochs": 2, "data.validation_split": 0.1},
    "not-both:sample.every_n_steps,every_n_epochs": {
        "sample.every_n_steps": 2, "sample.every_n_epochs": 3, "sample.prompts": ["a cat"]},
    **_both("output", "save_every_n_steps", "save_every_n_epochs"),
    "a-source-has-no-larger-batches": {"data.sources": [{"path": "a", "max_batch_size": 2}]},
    "compiled-for-gpus": {"runtime.device": "cpu", "runtime.compile": "full"},
    "compiled-blocks-are-recomputed-plainly": {"runtime.compile": "regional", "runtime.memory": "attention"},
    "activations-are-kept-or-recomputed": {"runtime.memory": "keep", "train.gradient_checkpointing": True},
    **{
        f"alone:{name}": {name: value}
        for name, value in {
            "optim.text_encoder_learning_rate": 1e-3, "optim.embedding_learning_rate": 1e-3,
            "train.validation_every_n_steps": 5, "train.validation_every_n_epochs": 2, "data.watched": {"path": "b"},
            "data.keep_tokens": 1, "data.caption_variants": 2, "sample.every_n_steps": 2, "sample.every_n_epochs": 3,
            "sample.control_prompts": ["a dog"], "runtime.worker_timeout_s": 60.0, "runtime.persistent_workers": True,
            "output.log_project": "mine",
        }.items()
    },
    # the family
    "sampler-of-family": {"model.family": "z-image", "sample.prompts": ["a cat"], "sample.sampler": "ddim"},
    "negative-prompt-of-family": {"model.family": "flux", "sample.prompts": ["a cat --n dog"]},
    "sides-of-a-prompt": {"sample.prompts": ["a cat --w 100"]},
    "masks-of-family": {"model.family": "flux", "sample.prompts": [{**DRAWN, "mask": "m.png"}]},
    "a-mask-has-an-image": {"sample.prompts": [{**DRAWN, "mask": "m.png"}]},
    **{
        f"{spec.name}:an-image-has-a-mask": {
            "model.family": spec.name, "sample.prompts": [{**DRAWN, "control_image": "c.png"}]}
        for spec in FAMILIES
        if spec.model_section.may_inpaint
    },
    "side-of-family:data.bucket_step": {"data.bucket_step": 12},
    "side-of-family:sample.width": {"sample.width": 100},
    "side-of-family:sample.height": {"sample.height": 100},
    "precision-of-family": {"model.family": "causal-lm", "train.mixed_precision": "fp16"},
    "text-encoder-of-family": {"model.family": "causal-lm", "lora.train_text_encoder": True},
    "new-tokens-of-family": {"model.family": "causal-lm", "lora.new_tokens": [TOKEN]},
    "formats-of-adapter": {"output.formats": ["peft"], "lora.type": "oft"},
    **{
        f"{spec.name}:controls": {"model.family": spec.name, "data.control_path": "c"}
        for spec in FAMILIES
        if spec.reads("data.control_path")
    },
    **{
        f"{spec.name}:control-images": {
            "model.family": spec.name, "sample.prompts": ["a cat"], "sample.control_images": ["c.png"]}
        for spec in FAMILIES
        if spec.reads("sample.control_images") and not spec.model_section.may_inpaint
    },
    "no-effect:objective.train_on,loss": {
        "model.family": "causal-lm", "objective.loss": "dpo", "objective.train_on": "all"},
    "no-effect:objective.beta,loss": {"model.family": "causal-lm", "objective.beta": 0.5},
    "no-effect:objective.label_smoothing,loss": {"model.family": "causal-lm", "objective.label_smoothing": 0.1},
    "pairs-are-not-packed": {"model.family": "causal-lm", "objective.loss": "dpo", "data.packing": True},
}  # fmt: skip
"""Rule's id -> the keys of its example."""


def together(*examples: Example) -> dict[str, Any] | None:
    """Unvalidated sections with all keys of the examples; None: two of them give one key different values."""
    keys: dict[str, Any] = {}
    for example in examples:
        for key, value in example.items():
            if key in LISTS and key in keys:
                keys[key] = [*keys[key], *(each for each in value if each not in keys[key])]
            elif keys.setdefault(key, value) != value:
                return None
    with_defaults = {**MINIMAL, **keys}
    if "data.sources" in keys and "data.path" not in keys:
        del with_defaults["data.path"]
    sections: dict[str, Any] = {}
    for key, value in with_defaults.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections
