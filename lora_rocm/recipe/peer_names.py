"""Names and values of other trainers with our keys: the tables behind did-you-mean and docs/recipe.md.

The trainers are kohya's sd-scripts and its GUI, OneTrainer, ai-toolkit, SimpleTuner, diffusers' examples,
diffusion-pipe and musubi-tuner. Names are in lower case. ``section.name`` holds in that section only and takes
precedence over the name alone.
"""

from __future__ import annotations

SAME_VALUE: dict[str, str] = {
    # sections
    "base_model": "model.name_or_path",
    "network": "lora",
    "adapter": "lora",
    "datasets": "data.sources",
    "dataset": "data",
    "concepts": "data.sources",
    "subsets": "data.sources",
    "directory": "data.sources",
    "save": "output",
    "training": "train",
    # model
    "pretrained_model_name_or_path": "model.name_or_path",
    "base_model_name": "model.name_or_path",
    "model_name_or_path": "model.name_or_path",
    "model_family": "model.family",
    "arch": "model.family",
    "vae_path": "model.vae",
    "pretrained_vae_model_name_or_path": "model.vae",
    # lora
    "network_dim": "lora.rank",
    "linear": "lora.rank",
    "lora_rank": "lora.rank",
    "dim": "lora.rank",
    "r": "lora.rank",
    "network_alpha": "lora.alpha",
    "linear_alpha": "lora.alpha",
    "lora_alpha": "lora.alpha",
    "network_dropout": "lora.dropout",
    "lora_dropout": "lora.dropout",
    "network_weights": "lora.init_from",
    "lora_network_weights": "lora.init_from",
    "init_lora": "lora.init_from",
    "pretrained_lora_path": "lora.init_from",
    "lora_model_name": "lora.init_from",
    "target_modules": "lora.targets",
    "lora_target": "lora.targets",
    "dora": "lora.use_dora",
    "dora_wd": "lora.use_dora",
    "lora_decompose": "lora.use_dora",
    "rs_lora": "lora.use_rslora",
    "lora_use_rslora": "lora.use_rslora",
    "train_te": "lora.train_text_encoder",
    "lora_weight_dtype": "lora.weight_dtype",
    # optimizer
    "lr": "optim.learning_rate",
    "unet_lr": "optim.learning_rate",
    "text_encoder_lr": "optim.text_encoder_learning_rate",
    "te_lr": "optim.text_encoder_learning_rate",
    "learning_rate_te": "optim.text_encoder_learning_rate",
    "optimizer_type": "optim.optimizer",
    "scheduler": "optim.lr_scheduler",
    "learning_rate_scheduler": "optim.lr_scheduler",
    "warmup_steps": "optim.lr_warmup_steps",
    "learning_rate_warmup_steps": "optim.lr_warmup_steps",
    "clip_grad_norm": "optim.max_grad_norm",
    "gradient_clipping": "optim.max_grad_norm",
    "eps": "optim.epsilon",
    "adam_epsilon": "optim.epsilon",
    "adam_weight_decay": "optim.weight_decay",
    # train
    "train.steps": "train.max_train_steps",
    "train_steps": "train.max_train_steps",
    "max_steps": "train.max_train_steps",
    "epoch": "train.epochs",
    "max_train_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "train_batch_size": "train.batch_size",
    "micro_batch_size_per_gpu": "train.batch_size",
    "snr_gamma": "objective.min_snr_gamma",
    "offset_noise_weight": "objective.noise_offset",
    "zero_terminal": "objective.zero_terminal_snr",
    "rescale_betas_zero_snr": "objective.zero_terminal_snr",
    "rescale_noise_scheduler_to_zero_terminal_snr": "objective.zero_terminal_snr",
    "train.dtype": "train.mixed_precision",
    "train_dtype": "train.mixed_precision",
    "activation_checkpointing": "train.gradient_checkpointing",
    "enable_activation_checkpointing": "train.gradient_checkpointing",
    # data
    "train_data_dir": "data.path",
    "image_dir": "data.path",
    "image_directory": "data.path",
    "instance_data_dir": "data.path",
    "folder_path": "data.path",
    "dataset_path": "data.path",
    "max_resolution": "data.resolution",
    "resolution_override": "data.resolution",
    "num_repeats": "data.repeats",
    "dataset_repeats": "data.repeats",
    "caption_ext": "data.caption_extension",
    "include_subdirectories": "data.recursive",
    "caption_dropout_probability": "data.caption_dropout_rate",
    "keep_tags_count": "data.keep_tokens",
    "shuffle_tokens": "data.shuffle_caption",
    "enable_tag_shuffling": "data.shuffle_caption",
    "random_flip": "data.flip_aug",
    "conditioning_data_dir": "data.mask_path",
    "enable_random_flip": "data.flip_aug",
    "flip_x": "data.flip_aug",
    "bucket_reso_steps": "data.bucket_step",
    "aspect_ratio_bucketing": "data.enable_bucket",
    "buckets": "data.enable_bucket",
    # sample
    "sample_every_n_steps": "sample.every_n_steps",
    "validation_steps": "sample.every_n_steps",
    "validation_step_interval": "sample.every_n_steps",
    "validation_prompt": "sample.prompts",
    "prompt": "sample.prompts",
    "neg": "sample.negative_prompt",
    "negative": "sample.negative_prompt",
    "validation_negative_prompt": "sample.negative_prompt",
    "sample_steps": "sample.steps",
    "diffusion_steps": "sample.steps",
    "validation_seed": "sample.seed",
    "validation_guidance": "sample.guidance_scale",
    "cfg_scale": "sample.guidance_scale",
    # cache, output, runtime
    "cache_dir": "cache.dir",
    "cache_directory": "cache.dir",
    "cache_dir_vae": "cache.dir",
    "output_dir": "output.dir",
    "training_folder": "output.dir",
    "output_name": "output.name",
    "metadata_title": "output.name",
    "metadata_author": "output.author",
    "metadata_description": "output.description",
    "metadata_license": "output.license",
    "training_comment": "output.description",
    "checkpointing_steps": "output.save_every_n_steps",
    "checkpoint_step_interval": "output.save_every_n_steps",
    "checkpoints_total_limit": "output.keep_last",
    "rolling_backup_count": "output.keep_last",
    "save_precision": "output.dtype",
    "save.dtype": "output.dtype",
    "output_dtype": "output.dtype",
    "output_model_format": "output.formats",
    "max_data_loader_n_workers": "runtime.workers",
    "dataloader_num_workers": "runtime.workers",
    "num_workers": "runtime.workers",
    "persistent_data_loader_workers": "runtime.persistent_workers",
    "train_device": "runtime.device",
    "model.compile": "runtime.compile",
    "train.compile": "runtime.compile",
}
"""Name -> our key with the same meaning and unit."""

PER_EPOCH = "multiply by the steps an epoch, which lora-rocm check prints"
SAVING = "output.save_every_n_steps counts optimizer updates"
DRAWING = "sample.every_n_steps counts optimizer updates"
KEEPING = "LoRA files are all kept; output.keep_last is how many checkpoints are kept for resuming."
V_PREDICTION = "Write model.prediction_type: v_prediction where this is true; auto reads the checkpoint's own mark."
TRIGGER = (
    "data.trigger_word is put in front of each caption that lacks it; with data.caption_fallback: trigger an image "
    "without a caption has it alone."
)
EMA = "Write train.ema_decay: 0.999 to keep an average of the LoRA; 0 switches it off."
ASPECT = (
    "data.bucket_max_aspect limits the buckets instead: for sides of at most M pixels at resolution R write (M / R)^2."
)
MASKS = "data.mask_path names a folder of masks, data.alpha_mask takes the images' alpha channels; leave it out."
FREE = "Not supported yet; leave it out."
ATTENTION = "Attention is chosen by the program; leave it out."
PLACEMENT = "runtime.memory: auto decides what is kept on the card; leave it out."
NOISE = "Not supported: objective.noise_offset is the only change of the noise."
TIMESTEPS = "Not supported: timesteps are drawn evenly from the whole range."
SCHEDULE = "Not supported: optim.lr_scheduler is constant, linear or cosine over all steps, without further options."
LOSS = "Not supported: the loss is the mean squared error, and objective.min_snr_gamma its only weighting."
TRACKING = "TensorBoard files are always written into the run directory; other trackers are not supported."
MODULES = "LoRA, DoRA (lora.use_dora) and LoKr (lora.type: lokr) are trained, nothing else; leave it out."
LOKR = "A key of LoKr: set lora.type: lokr."
CONV = (
    "lora.targets: attention-mlp-conv adapts convolutions too, with lora.rank and lora.alpha; others are not supported."
)
NO_SAMPLER = "Previews are drawn by Euler steps; this cannot be chosen."
BASE_FORMAT = "The base's number format follows train.mixed_precision, and it is not quantised; leave it out."
GPUS = "Give --gpus N on the command line."
FIRST_PREVIEWS = "Previews are always drawn before training too; without sample.prompts there are none."
BETAS = "Write optim.betas: [beta1, beta2]."

ADVICE: dict[str, str] = {
    # keys of ours that want another value
    "save_every_n_epochs": f"There is no such key yet. {SAVING}, not epochs: {PER_EPOCH}.",
    **dict.fromkeys(("save_every", "backup_after"), f"{SAVING}; elsewhere it may be epochs or minutes."),
    "sample_every_n_epochs": f"There is no such key yet. {DRAWING}, not epochs: {PER_EPOCH}.",
    **dict.fromkeys(("sample_every", "sample_after"), f"{DRAWING}; elsewhere it may be epochs or minutes."),
    "sample_prompts": "Write the prompts themselves, as the list sample.prompts; a file of prompts is not read.",
    "lr_warmup": "optim.lr_warmup_steps counts optimizer updates, not a share of them.",
    "gradient_accumulation": "Write train.gradient_accumulation_steps.",
    "optimizer_args": "Each is a key of its own, such as optim.weight_decay and optim.betas.",
    "optimizer_params": "Each is a key of its own, such as optim.weight_decay and optim.betas.",
    **dict.fromkeys(("beta1", "beta2", "adam_beta1", "adam_beta2"), BETAS),
    **dict.fromkeys(("v_parameterization", "v_pred", "is_v_pred", "force_v_prediction"), V_PREDICTION),
    **dict.fromkeys(("use_ema", "ema", "ema_config"), EMA),
    **dict.fromkeys(("save_last_n_steps", "save_last_n_epochs", "max_step_saves_to_keep"), KEEPING),
    **dict.fromkeys(("class_tokens", "instance_prompt"), TRIGGER),
    **dict.fromkeys(("max_bucket_reso", "min_bucket_reso"), ASPECT),
    **dict.fromkeys(("skip_first_sample", "sample_at_first", "sample_skip_first", "disable_sampling"), FIRST_PREVIEWS),
    **dict.fromkeys(
        ("text_encoder_lr1", "text_encoder_lr2", "learning_rate_te1", "learning_rate_te2"),
        "optim.text_encoder_learning_rate is for both text encoders.",
    ),
    "bucket_no_upscale": "data.upscale says the opposite: leave it out, for false is its default.",
    "caption_strategy": "Captions are files beside the images; data.caption_fallback is for images without one.",
    "default_caption": "data.caption_fallback says what an image without a caption file gets.",
    "caption_prefix": "data.trigger_word is put in front of each caption that lacks it.",
    "balancing": "data.repeats is how often each image is seen in an epoch, a whole number.",
    "full_bf16": "lora.weight_dtype: bf16 keeps the trained weights in that format.",
    "full_fp16": "Trained weights are kept in float32, or with lora.weight_dtype: bf16 in that format; leave it out.",
    "network_train_unet_only": "This is the default; lora.train_text_encoder: true is the other way.",
    "train_unet": "The UNet is always adapted; leave it out.",
    "text_encoder": "lora.train_text_encoder: true adapts the text encoders.",
    "only_if_contains": "lora.targets takes regular expressions of module names.",
    **dict.fromkeys(
        ("layer_filter", "layer_filter_preset", "layer_filter_regex"),
        "lora.targets takes a preset or regular expressions of module names.",
    ),
    "model_type": "model.family names the model that is trained; leave it out for SDXL.",
    **dict.fromkeys(("sdxl", "is_xl"), "SDXL is the default: model.family: sdxl."),
    "validation": "train.validation_every_n_steps and data.validation_split give a held-out loss; sample draws.",
    **dict.fromkeys(
        ("is_reg", "reg_data_dir", "prior_loss_weight"),
        "Regularisation images are an entry of their own in data.sources; a weight of their loss is not supported.",
    ),
    "output_model_destination": "output.dir is the folder of the run directories, output.name the title in the file.",
    # decided here
    "cache_latents": "Latents are always cached; leave it out.",
    "cache_latents_to_disk": "Latents are always cached on disk; leave it out.",
    "latent_caching": "Latents are always cached; leave it out.",
    **dict.fromkeys(
        ("cache_text_encoder_outputs", "sdxl_cache_text_encoder_outputs", "cache_text_embeddings"),
        "Captions are cached unless lora.train_text_encoder is on; leave it out.",
    ),
    **dict.fromkeys(("xformers", "sdpa", "mem_eff_attn", "attention_mechanism", "attn_mode"), ATTENTION),
    **dict.fromkeys(("no_half_vae", "sdxl_no_half_vae"), "The VAE always encodes in float32; leave it out."),
    "save_state": "Every checkpoint can be resumed; leave it out.",
    **dict.fromkeys(("resume", "resume_from_checkpoint"), "Give --resume on the command line."),
    **dict.fromkeys(
        ("save_model_as", "save_format"), "Files are always .safetensors; output.formats names their forms."
    ),
    "vae_batch_size": "The program decides how many images are encoded at once; leave it out.",
    "noise_scheduler": "The noise schedule is that of the base model; leave it out.",
    "walk_seed": "Each preview has the next seed; leave it out.",
    **dict.fromkeys(
        ("clip_skip", "text_encoder_layer_skip"),
        "Each family reads the layer of its text encoders that it was trained with; leave it out.",
    ),
    **dict.fromkeys(("lowram", "highvram", "fused_backward_pass", "cpu_offload_checkpointing"), PLACEMENT),
    **dict.fromkeys(("low_vram", "layer_offloading", "blocks_to_swap", "offload_fraction"), PLACEMENT),
    **dict.fromkeys(("num_processes", "num_machines", "gpu_ids", "device_indexes", "multi_gpu"), GPUS),
    "num_cpu_threads_per_process": "runtime.threads sets the CPU threads of torch; leave it out.",
    # not supported
    **dict.fromkeys(
        ("weight_dtype", "quantize", "qtype", "quantize_te", "fp8_base", "base_model_precision"), BASE_FORMAT
    ),
    "noise_offset_type": "Only kohya's type Original is there: leave it out, and set objective.noise_offset.",
    "max_token_length": "Captions are read up to 75 tokens, longer ones are cut; there is no key for more yet.",
    **dict.fromkeys(("conv_dim", "conv_alpha", "conv"), CONV),
    **dict.fromkeys(("network_module", "lora_type", "peft_type", "algo", "lycoris_config"), MODULES),
    **dict.fromkeys(("factor", "decompose_both"), LOKR),
    **dict.fromkeys(("use_cp", "use_tucker", "unit"), MODULES),
    **dict.fromkeys(
        ("network_args", "network_kwargs"),
        "lora.targets, lora.use_dora and lora.use_rslora take their place; other arguments are not supported.",
    ),
    **dict.fromkeys(("lr_scheduler_num_cycles", "lr_scheduler_power", "lr_scheduler_type"), SCHEDULE),
    **dict.fromkeys(("lr_scheduler_args", "lr_scheduler_params", "learning_rate_cycles"), SCHEDULE),
    **dict.fromkeys(("learning_rate_min_factor", "lr_scheduler_min_lr_ratio"), SCHEDULE),
    "learning_rate_scaler": "Not supported: write the learning rate that is meant.",
    **dict.fromkeys(("min_timestep", "max_timestep", "min_denoising_steps", "max_denoising_steps"), TIMESTEPS),
    **dict.fromkeys(("timestep_sampling", "timestep_type", "timestep_distribution", "timestep_shift"), TIMESTEPS),
    **dict.fromkeys(("discrete_flow_shift", "flow_schedule_shift", "weighting_scheme"), TIMESTEPS),
    **dict.fromkeys(("min_noising_strength", "max_noising_strength", "content_or_style"), TIMESTEPS),
    **dict.fromkeys(("noising_weight", "noising_bias", "linear_timesteps"), TIMESTEPS),
    **dict.fromkeys(("multires_noise_iterations", "multires_noise_discount", "adaptive_noise_scale"), NOISE),
    **dict.fromkeys(("ip_noise_gamma", "perturbation_noise_weight", "generalized_offset_noise"), NOISE),
    **dict.fromkeys(("loss_type", "huber_c", "huber_schedule", "huber_scale", "debiased_estimation_loss"), LOSS),
    **dict.fromkeys(("loss_weight_fn", "loss_weight_strength", "mse_strength", "mae_strength"), LOSS),
    **dict.fromkeys(("huber_strength", "log_cosh_strength", "v_pred_like_loss"), LOSS),
    "scale_v_pred_loss_like_noise_pred": LOSS,
    **dict.fromkeys(
        ("log_with", "logging_dir", "log_prefix", "report_to", "wandb_api_key", "wandb_run_name"), TRACKING
    ),
    **dict.fromkeys(("log_tracker_name", "tracker_project_name", "tracker_run_name"), TRACKING),
    **dict.fromkeys(("sampler", "sample_sampler"), NO_SAMPLER),
    "scale_weight_norms": "Not supported: the size of the LoRA's weights is not limited.",
    **dict.fromkeys(("rank_dropout", "module_dropout"), "Not supported: lora.dropout is the only dropout."),
    **dict.fromkeys(
        ("block_dims", "block_alphas", "down_lr_weight", "mid_lr_weight", "up_lr_weight"),
        "Not supported: each adapted layer has lora.rank and optim.learning_rate.",
    ),
    **dict.fromkeys(("color_aug", "random_crop", "face_crop_aug_range", "flip_y", "enable_crop_jitter"), FREE),
    **dict.fromkeys(("caption_tag_dropout_rate", "token_dropout_rate", "caption_dropout_every_n_epochs"), FREE),
    **dict.fromkeys(("keep_tokens_separator", "secondary_separator", "enable_wildcard", "caption_suffix"), FREE),
    **dict.fromkeys(("token_warmup_min", "token_warmup_step", "weighted_captions", "tag_delimiter"), FREE),
    **dict.fromkeys(("masked_loss", "masked_training"), MASKS),
    "unmasked_weight": "Write masks that are grey, not black, where the loss should count less: data.mask_path.",
    **dict.fromkeys(("unmasked_probability", "control_path", "num_frames", "fps", "train_embedding"), FREE),
    **dict.fromkeys(("additional_embeddings", "diff_output_preservation", "do_differential_guidance"), FREE),
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hf_repo_id", "save_every_n_minutes"), FREE),
    "metadata_file": "Captions are text files beside the images, or a column of a dataset; this file is not read.",
    "in_json": "Captions are text files beside the images, or a column of a dataset; this file is not read.",
}
"""Name -> a sentence: what to write instead if the value has to change, or why there is no such key."""

NUMBER_FORMATS = {
    **dict.fromkeys(("fp16", "float16", "float_16", "half"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "bfloat_16"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "float_32", "float", "tfloat_32"), "fp32"),
}
D_ADAPTATION = ("dadapt", "d_adapt")
RATE_OF_ADAMW = "1.0e-4"
ADAMW_NAMES = ("adamw", "adamw_torch", "adamw_fused", "torch.optim.adamw")


def value_advice(key: str, value: object, steps: object = None) -> str:
    """Advice for a value of ``key`` (dotted) as other trainers write it; empty if none is known.

    ``steps`` is the recipe's ``train.max_train_steps`` if it is an integer.
    """
    if key == "optim.lr_warmup_steps":
        return _warmup_advice(value, steps)
    if key == "data.resolution" or key.startswith("data.sources["):
        return _resolution_advice(key, value)
    if not isinstance(value, str):
        return ""
    plain = value.strip().lower()
    if key in ("output.dtype", "lora.weight_dtype", "train.mixed_precision"):
        own = NUMBER_FORMATS.get(plain, "")
        own = "no" if key == "train.mixed_precision" and own == "fp32" else own
        return f"Write {own}." if own and own != plain and (key, own) != ("lora.weight_dtype", "fp16") else ""
    if key == "lora.type":
        return "Write lora." if plain in ("locon", "dora") else "Write lokr." if plain == "lokr" else MODULES
    if key == "optim.optimizer":
        return _optimizer_advice(plain)
    if key == "runtime.device" and plain.partition(":")[0] in ("cuda", "hip", "rocm"):
        return "Write gpu; on AMD cards too."
    if key.startswith("output.formats") and ("safetensors" in plain or "comfy" in plain or "kohya" in plain):
        return "Write kohya: a .safetensors file that ComfyUI, Forge and kohya's tools read."
    return SCHEDULERS.get(plain, "") if key == "optim.lr_scheduler" else ""


SCHEDULERS = {
    "constant_with_warmup": "Write constant, and optim.lr_warmup_steps for the warm-up.",
    "cosine_with_restarts": "Write cosine, which has one cycle; restarts are not supported.",
    "cosineannealinglr": "Write cosine: one cycle over all steps.",
    "polynomial": "Write linear, which is polynomial with power 1; other powers are not supported.",
}


def _optimizer_advice(plain: str) -> str:
    name = plain.rpartition(".")[2]
    if name == "prodigy":
        return "Write prodigy."
    if "prodigy" in name or any(mark in name for mark in D_ADAPTATION):
        return "Write prodigy, which estimates its own learning rate too; a learning rate of 1.0 can stay."
    if plain in ADAMW_NAMES:
        return "Write adamw."
    if "adamw" in name:
        return "Write adamw: its moments have full precision, which takes more memory; the learning rate can stay."
    return f"Of adamw a usual learning rate is {RATE_OF_ADAMW}, of prodigy 1.0." if plain.isprintable() else ""


def _warmup_advice(value: object, steps: object) -> str:
    try:
        share = float(value)  # type: ignore[arg-type]  # raises for anything but a number
    except (TypeError, ValueError):
        return ""
    if not 0 < share < 1:
        return ""
    if isinstance(steps, int) and not isinstance(steps, bool) and 0 < steps < 2**53:
        return (
            f"It counts optimizer updates, not a share of them: {share:g} of {steps} steps is {round(share * steps)}."
        )
    return f"It counts optimizer updates, not a share of them: write {share:g} times the number of steps."


def _resolution_advice(key: str, value: object) -> str:
    if not key.endswith("resolution"):
        return ""
    if isinstance(value, list):
        return "Write one number; for several, list the folder in data.sources once for each with its resolution."
    sides = str(value).lower().replace("x", ",").split(",") if isinstance(value, str) else []
    if len(sides) == 2 and all(side.strip().isdecimal() and len(side) < 8 for side in sides):
        width, height = (int(side) for side in sides)
        return f"Write one number, the side of a square of the same area: {round((width * height) ** 0.5)}."
    return ""
