#!/bin/bash
export NCCL_P2P_DISABLE="1"
CONFIG=anima.toml
deepspeed --num_gpus=1 train.py --deepspeed --config $CONFIG --regenerate_cache
