#!/bin/bash
MODEL=Qwen/Qwen3-0.6B
accelerate launch --num_processes 2 trl/scripts/sft.py \
    --model_name_or_path $MODEL \
    --dataset_name trl-lib/Capybara \
    --use_peft \
    --lora_r 32 \
    --lora_alpha 16 \
    --lora_dropout 0 \
    --lora_target_modules q_proj v_proj o_proj \
    --packing \
    --assistant_only_loss \
    --learning_rate 2.0e-4 \
    --lr_scheduler_type cosine_with_min_lr \
    --lr_scheduler_kwargs '{"min_lr_rate": 0.1}' \
    --warmup_steps 0.03 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --eos_token '<|im_end|>' \
    --output_dir Qwen3-0.6B-SFT
