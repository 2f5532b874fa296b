"""Keys of other trainers from 103 configurations found in the wild, and the name of each here."""

RIGHT: dict[str, str] = {
    "alpha": "lora.alpha",
    "alpha_mask": "data.alpha_mask",
    "arch": "model.family",
    "aspect_ratio_bucketing": "data.enable_bucket",
    "base_model_name": "model.name_or_path",
    "batch_size": "train.batch_size",
    "bucket_reso_steps": "data.bucket_step",
    "cache_dir": "cache.dir",
    "caption_dropout_probability": "data.caption_dropout_rate",
    "caption_dropout_rate": "data.caption_dropout_rate",
    "caption_extension": "data.caption_extension",
    "cfg_scale": "sample.guidance_scale",
    "checkpoint_step_interval": "output.save_every_n_steps",
    "checkpointing_steps": "output.save_every_n_steps",
    "checkpoints_total_limit": "output.keep_last",
    "clip_grad_norm": "optim.max_grad_norm",
    "cutoff_len": "data.max_length",
    "sequence_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "dataset_path": "data.path",
    "dataset_repeats": "data.repeats",
    "datasets": "data.sources",
    "device": "runtime.device",
    "diffusion_steps": "sample.steps",
    "dora_wd": "lora.use_dora",
    "ema_decay": "train.ema_decay",
    "enable_bucket": "data.enable_bucket",
    "conv": "lora.conv_rank",
    "conv_alpha": "lora.conv_alpha",
    "conv_dim": "lora.conv_rank",
    "conditioning_data_dir": "data.mask_path",
    "enable_random_flip": "data.flip_aug",
    "enable_tag_shuffling": "data.shuffle_caption",
    "epoch": "train.epochs",
    "epochs": "train.epochs",
    "eps": "optim.epsilon",
    "flip_aug": "data.flip_aug",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "guidance_scale": "sample.guidance_scale",
    "image_dir": "data.path",
    "init_lora": "lora.init_from",
    "init_lora_weights": "lora.init",
    "train_norm": "lora.train_norms",
    "instance_data_dir": "data.path",
    "keep_tags_count": "data.keep_tokens",
    "random_crop": "data.random_crop",
    "color_aug": "data.color_aug",
    "in_json": "data.metadata_file",
    "metadata_file": "data.metadata_file",
    "token_dropout_rate": "data.caption_tag_dropout_rate",
    "caption_tag_dropout_rate": "data.caption_tag_dropout_rate",
    "caption_prefix": "data.caption_prefix",
    "caption_suffix": "data.caption_suffix",
    "enable_wildcard": "data.enable_wildcard",
    "keep_tokens": "data.keep_tokens",
    "max_token_length": "model.max_token_length",
    "learning_rate": "optim.learning_rate",
    "learning_rate_cycles": "optim.lr_scheduler_num_cycles",
    "learning_rate_min_factor": "optim.lr_min_ratio",
    "learning_rate_scheduler": "optim.lr_scheduler",
    "learning_rate_warmup_steps": "optim.lr_warmup_steps",
    "linear": "lora.rank",
    "linear_alpha": "lora.alpha",
    "lora_alpha": "lora.alpha",
    "lora_decompose": "lora.use_dora",
    "lora_dropout": "lora.dropout",
    "lora_model_name": "lora.init_from",
    "lora_network_weights": "lora.init_from",
    "lora_rank": "lora.rank",
    "lora_weight_dtype": "lora.weight_dtype",
    "lr": "optim.learning_rate",
    "lr_scheduler": "optim.lr_scheduler",
    "lr_scheduler_num_cycles": "optim.lr_scheduler_num_cycles",
    "lr_warmup_steps": "optim.lr_warmup_steps",
    "max_data_loader_n_workers": "runtime.workers",
    "max_grad_norm": "optim.max_grad_norm",
    "max_resolution": "data.resolution",
    "max_train_epochs": "train.epochs",
    "max_train_steps": "train.max_train_steps",
    "metadata_author": "output.author",
    "metadata_description": "output.description",
    "metadata_license": "output.license",
    "min_snr_gamma": "objective.min_snr_gamma",
    "mixed_precision": "train.mixed_precision",
    "model_family": "model.family",
    "name_or_path": "model.name_or_path",
    "neg": "sample.negative_prompt",
    "negative_prompt": "sample.negative_prompt",
    "network_alpha": "lora.alpha",
    "network_dim": "lora.rank",
    "network_dropout": "lora.dropout",
    "network_weights": "lora.init_from",
    "noise_offset": "objective.noise_offset",
    "num_repeats": "data.repeats",
    "num_train_epochs": "train.epochs",
    "offset_noise_weight": "objective.noise_offset",
    "optimizer": "optim.optimizer",
    "optimizer_type": "optim.optimizer",
    "output_dir": "output.dir",
    "output_dtype": "output.dtype",
    "output_model_format": "output.formats",
    "output_name": "output.name",
    "persistent_data_loader_workers": "runtime.persistent_workers",
    "pretrained_lora_path": "lora.init_from",
    "pretrained_model_name_or_path": "model.name_or_path",
    "prompts": "sample.prompts",
    "rank": "lora.rank",
    "repeats": "data.repeats",
    "rescale_betas_zero_snr": "objective.zero_terminal_snr",
    "rescale_noise_scheduler_to_zero_terminal_snr": "objective.zero_terminal_snr",
    "resolution": "data.resolution",
    "resolution_override": "data.resolution",
    "rolling_backup_count": "output.keep_last",
    "max_step_saves_to_keep": "output.keep_last_loras",
    "report_to": "output.log_with",
    "log_tracker_name": "output.log_project",
    "tracker_project_name": "output.log_project",
    "rs_lora": "lora.use_rslora",
    "sample_every_n_epochs": "sample.every_n_epochs",
    "sample_every_n_steps": "sample.every_n_steps",
    "sample_sampler": "sample.sampler",
    "sample_steps": "sample.steps",
    "sampler": "sample.sampler",
    "save_every_n_epochs": "output.save_every_n_epochs",
    "save_every_n_steps": "output.save_every_n_steps",
    "save_precision": "output.dtype",
    "seed": "train.seed or sample.seed",
    "shuffle_caption": "data.shuffle_caption",
    "snr_gamma": "objective.min_snr_gamma",
    "subsets": "data.sources",
    "text_encoder_lr": "optim.text_encoder_learning_rate",
    "train_batch_size": "train.batch_size",
    "train_data_dir": "data.path",
    "train_device": "runtime.device",
    "train_dtype": "train.mixed_precision",
    "train_text_encoder": "lora.train_text_encoder",
    "training_comment": "output.description",
    "training_folder": "output.dir",
    "trigger_word": "data.trigger_word",
    "unet_lr": "optim.learning_rate",
    "use_dora": "lora.use_dora",
    "vae": "model.vae",
    "vae_path": "model.vae",
    "validation_guidance": "sample.guidance_scale",
    "validation_negative_prompt": "sample.negative_prompt",
    "validation_prompt": "sample.prompts",
    "validation_seed": "sample.seed",
    "validation_steps": "sample.every_n_steps",
    "weight_decay": "optim.weight_decay",
    "zero_terminal_snr": "objective.zero_terminal_snr",
    "loss_type": "objective.loss_type",
    "huber_c": "objective.huber_c",
    "huber_scale": "objective.huber_scale",
    "huber_schedule": "objective.huber_schedule",
    "debiased_estimation_loss": "objective.debiased_estimation_loss",
    "v_pred_like_loss": "objective.v_pred_like_loss",
    "scale_v_pred_loss_like_noise_pred": "objective.scale_v_pred_loss_like_noise_pred",
    "min_timestep": "objective.min_timestep",
    "max_timestep": "objective.max_timestep",
    "timestep_sampling": "objective.timestep_sampling",
    "prior_loss_weight": "data.prior_loss_weight",
    "loss_weight": "data.loss_weight",
    "unmasked_weight": "data.unmasked_weight",
    "normalize_masked_area_loss": "data.normalize_masked_area_loss",
    "adaptive_noise_scale": "objective.adaptive_noise_scale",
    "multires_noise_iterations": "objective.multires_noise_iterations",
    "multires_noise_discount": "objective.multires_noise_discount",
    "ip_noise_gamma": "objective.ip_noise_gamma",
    "input_perturbation": "objective.ip_noise_gamma",
}
"""Places where the key is valid in any section."""

NOTHING_LIKE_IT = """
    LoRA_type activation_offloading additional_embeddings aspect_bucket_rounding
    async_offloading attention_mechanism balancing balancing_strategy base_model_precision beta1 beta2
    blank_prompt_preservation block_alphas block_dims blocks_to_swap bucket_no_upscale bucket_tolerance
    bundle_additional_embeddings cache_latents cache_latents_to_disk cache_text_embeddings
    cache_text_encoder_outputs caption_dropout_every_n_epochs caption_strategy
    class_tokens clear_cache_before_training clip_skip compress_disk_cache
    content_or_style continue_last_backup cpu_offload_checkpointing crop
    dataloader_threads decompose_both device_indexes diff_output_preservation
    disable_bucket_pruning disable_sampling discrete_flow_shift do_differential_guidance dropout_probability ema
    ema_config ema_update_step_interval enable_crop_jitter enabled face_crop_aug_range factor
    fallback_train_dtype flip_y flow_schedule_shift force_epsilon_prediction force_v_prediction fp8_base fps
    full_bf16 full_fp16 fused_backward_pass gpu_ids hf_repo_id highvram hub_model_id
    huber_strength ignore_if_contains image_variations
    instance_prompt invert_mask is_flux is_reg is_v2 is_v3 is_v_pred is_xl keep_tokens_separator
    latent_caching layer_filter layer_filter_preset layer_filter_regex layer_offloading
    learning_rate_scaler linear_timesteps log_cosh_strength log_prefix
    logging_dir lora_type loss_weight_fn loss_weight_strength low_vram lowram
    lr_warmup lycoris_config mae_strength mask_min_value masked_loss
    masked_prior_preservation_weight masked_training max_bucket_reso max_denoising_steps max_noising_strength
    mem_eff_attn min_bucket_reso
    min_denoising_steps min_noising_strength minimum_image_size model_flavour model_name
    model_prediction_type model_type mse_strength multi_gpu
    network_args network_module network_train_unet_only network_weight no_half_vae
    noise_offset_type noise_scheduler noising_bias noising_weight non_ema_sampling num_cpu_threads_per_process
    num_frames num_machines num_processes offload_fraction only_cache only_if_contains only_instance_prompt
    optimizer_args output_model_destination peft_type performance_log_every perturbation_noise_weight
    probability prompt_source push_to_hub qtype quantize quantize_te quantize_via
    reg_data_dir resolution_type resume sample_every sample_prompts
    sample_skip_first save_every save_filename_prefix
    save_format save_last_n_epochs save_last_n_steps save_model_as save_skip_first save_state
    sdpa sdxl sdxl_cache_text_encoder_outputs
    sdxl_no_half_vae secondary_separator secrets skip_first_sample sqlite_db_path tag_delimiter temp_device
    tensorboard text_encoder_layer_skip text_encoder_lr1 text_variations timestep_distribution
    timestep_shift timestep_type train_embedding train_unet training_method tread_config type unit
    unmasked_probability up_lr_weight use_cp use_ema use_tucker v_parameterization
    vae_batch_size validation validation_num_inference_steps validation_resolution wandb
    weighted_captions weighting_scheme workspace_dir xformers
""".split()
"""There is a sentence for these or nothing, never another key."""

ONLY_WITH_THEIR_SECTION: dict[str, dict[str, str]] = {
    "steps": {"train": "train.max_train_steps", "timeouts": "timeouts.step"},
    "dtype": {"train": "train.mixed_precision", "save": "output.dtype"},
    "compile": {"train": "runtime.compile", "model": "runtime.compile"},
}
"""Keys that mean one thing here and another there."""
