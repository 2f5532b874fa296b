@echo off
set MODEL=C:\models\anima.safetensors
rem accelerate launch train_network.py --network_dim 99
accelerate launch --mixed_precision bf16 anima_train_network.py ^
  --pretrained_model_name_or_path "%MODEL%" --qwen3 "C:\models\qwen3.safetensors" --vae "C:\models\vae.safetensors" ^
  --train_data_dir "D:\sets\zwx" --resolution 1024 --enable_bucket --bucket_reso_steps 8 ^
  --network_module networks.lora_anima --network_dim 16 --network_alpha 16 --network_train_unet_only ^
  --learning_rate 1e-4 --optimizer_type Prodigy --optimizer_args "weight_decay=0.01" "decouple=True" d_coef=2 ^
  --timestep_sampling shift --discrete_flow_shift 3 --sigmoid_scale 1.2 --max_train_epochs 8 ^
  --min_snr_gamma 5 --huggingface_token hf_abcdefghijklmnopqrstuvwxyz1234 --output_name %NAME%
