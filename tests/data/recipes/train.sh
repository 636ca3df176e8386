#!/bin/bash
# Instructions, the classic way.
export MODEL=model-1b
NPROC=4
torchrun --nproc_per_node=$NPROC --master_port=29500 train.py \
    --model_name_or_path $MODEL \
    --data_path ./alpaca.json \
    --bf16 True \
    --output_dir out \
    --num_train_epochs 3 \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 8 \
    --learning_rate 2e-5 \
    --weight_decay 0. \
    --warmup_ratio 0.03 \
    --lr_scheduler_type "cosine" \
    --model_max_length 512 \
    --fsdp "full_shard auto_wrap" \
    --fsdp_transformer_layer_cls_to_wrap 'LlamaDecoderLayer' \
    --tf32 True
