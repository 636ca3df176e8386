"""A small tokenizer with a chat template, and conversations, made here."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# ChatML, as many models have it, with the marks by which `transformers` itself knows the assistant's tokens.
CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Leaves out what was thought in earlier turns, as reasoning models' templates do.
FORGETS = CHATML.replace(
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
    "{{ message['content'] if loop.last else message['content'].split('</think>')[-1] }}{{ '<|im_end|>' }}",
)


def tokenizer(template: str | None = CHATML, *, begins: bool = False) -> PreTrainedTokenizerFast:
    """Byte pairs over a little English; with `begins`, texts begin with a token of their own, as LLaMA's do."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|im_start|>", "<|im_end|>", "<s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    said = (message["content"] for conversation in conversations(40) for message in conversation["messages"])
    made.train_from_iterator(said, trainer)
    if begins:
        from tokenizers.processors import TemplateProcessing

        made.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    special = {"eos_token": "<|end|>", "bos_token": "<s>", "pad_token": "<|end|>"}
    whole = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    whole.chat_template = template
    return whole


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Sums and words spelt backwards, in one to three turns."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        messages = [{"role": "system", "content": "You compute."}] if number % 3 == 0 else []
        for _ in range(1 + number % 3):
            one, other = rng.randrange(50), rng.randrange(50)
            messages += [
                {"role": "user", "content": f"What is {one} and {other}?"},
                {"role": "assistant", "content": f"{one} and {other} make {one + other}."},
            ]
        found.append({"messages": messages})
    return found


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
    return path
