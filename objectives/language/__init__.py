"""Language models on your own text: `task: bsearch.objectives.language:CausalLM`.

Parameters (fixed or searched; only `model` and `text` are needed):

- `model`: a causal model of `transformers`: a folder, relative to the study file, or a name on the hub. With
  `from_scratch: true` its configuration alone. `tokenizer`: a folder, a name, or `bytes`, for which a token is a byte; default:
  the model's.
- `text`: a .txt, .jsonl, .ndjson, .json, .csv or .parquet file, a folder of them, a folder that `datasets` saved, or a data
  set's name on a hub (`owner/name#split`); or several, separated by commas, with weights by which rows are drawn
  (`a.jsonl@3, b.jsonl@1`) or without. `files`: the names that count in a folder, such as `*.py`. `validation_text`: the same
  for validation, or `validation_share`: a share of the documents, by a digest of their text; default: every tenth.
- Records with `messages` (role, content), ShareGPT's `conversations`, `prompt` with `completion`, or `text` are known. Messages
  become text by the tokenizer's chat template, or by `chat_template`: a file; `turns: all` counts the assistant's turns in the
  loss, `last` the last of them.
- `completion`, `prompt`: how other records become text, such as `"{answer}"` and `"Question: {question}\\n"`.
  `train_on_prompt: true` counts all tokens in the loss.
- `length`: tokens of a row; default: what the model takes, up to 1024. `too_long`: `split` lets a longer document go on in
  another row, `drop` leaves it out, `cut_prompt` cuts the beginning of its prompt. `packing`: several documents in a row, none
  of them cut if it fits; default: where the model keeps them apart. `attention`: `documents` does so, `rows` does not and is
  faster on some GPUs.
- `dtype`: precision of the weights in memory, `float32`, `bfloat16`, `float16`, or `auto`, that of the files; default: `auto`
  of a frozen model, `float32` of one that is trained.
- `lora_rank`: trains adapters of this rank, and freezes the model; `lora_alpha` (twice the rank), `lora_dropout` (0),
  `lora_targets`: modules by name, separated by commas (all linear ones); `lora_trained`: modules that are trained whole beside
  them, such as `lm_head`; `lora_variant`: `lora`, `dora` or `rslora`; `lora_merge: true` saves the whole model, with the
  adapters merged into its weights.
- `quantize`: `8bit` or `4bit` (NF4, with quantized constants) loads the frozen model so, with `bitsandbytes`.
- `optimizer`: adamw (default), adam, adafactor, muon or sgd; with bitsandbytes also adamw_8bit, lion and lion_8bit.

Metrics: `val_loss`, the mean over counted tokens in nats, and its `perplexity`.
"""

from __future__ import annotations

from .causal_lm import CausalLM

__all__ = ["CausalLM"]
