"""Language models on your own text: `task: bsearch.objectives.language:CausalLM`.

Parameters (fixed or searched; only `model` and `text` are needed):

- `model`: a causal model of `transformers`: a folder, relative to the study file, or a name on the hub. With
  `from_scratch: true` its configuration alone. `tokenizer`: a folder, a name, or `bytes`, for which a token is a byte; default:
  the model's.
- `text`: a .txt or .jsonl file, a folder of them, or a folder that `datasets` saved. `files`: the names that count in a
  folder, such as `*.py`. `validation_text`: the same for validation; default: every tenth document.
- `completion`, `prompt`: how a line of .jsonl becomes text, such as `"{answer}"` and `"Question: {question}\\n"`; default:
  `"{text}"` and nothing. `train_on_prompt: true` counts the prompt's tokens in the loss too.
- `length`: tokens of a row; default: what the model takes, up to 1024. A sample is a row: several documents, none of them cut
  if it fits. `attention`: `documents` keeps documents of a row apart, `rows` does not and is faster on some GPUs.
- `lora_rank`: trains adapters of this rank, and freezes the model; `lora_alpha` (twice the rank), `lora_dropout` (0),
  `lora_targets`: modules by name, separated by commas (all linear ones).
- `quantize`: `8bit` or `4bit` loads the frozen model so, on a GPU with `bitsandbytes`.
- `optimizer`: adamw (default), adam, adafactor, muon or sgd; with bitsandbytes also adamw_8bit, lion and lion_8bit.

Metrics: `val_loss`, the mean over counted tokens in nats, and its `perplexity`.
"""

from __future__ import annotations

from .causal_lm import CausalLM

__all__ = ["CausalLM"]
