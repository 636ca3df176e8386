"""TRL's SFTTrainer drives a trial: with its own class of arguments, on conversations, any batch in any micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed")

import torch
from bsearch.objectives.adapters.huggingface import train_with
from helpers import setup
from objectives.chat import conversations, tokenizer, write_jsonl

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64}
pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::FutureWarning")]


def losses(batch: int, micro_batches: int) -> list[float]:
    """Of validation, after each of three steps."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTTrainer

    said = Dataset.from_list(conversations(60))
    # At higher rates Adam's quotients of gradients near zero make 1e-4 of a rounding error.
    made = setup(
        batch, micro_batches, budget=3 * batch, rate=1e-3, metric="loss", training={"evaluations": 3}
    )
    torch.manual_seed(0)
    measured = train_with(
        made,
        SFTTrainer,
        arguments={"max_length": 96, "assistant_only_loss": True, "gradient_checkpointing": False},
        model=LlamaForCausalLM(LlamaConfig(vocab_size=300, **SMALL)),
        train_dataset=said,
        eval_dataset=said.select(range(12)),
        processing_class=tokenizer(),
    )
    return [one.scores["loss"] for one in measured]


def test_its_own_arguments_are_taken_and_any_split_of_a_batch_is_that_batch() -> None:
    whole = losses(13, 1)
    assert len(whole) == 3
    assert whole[-1] < whole[0]
    assert losses(13, 5) == pytest.approx(whole, abs=3e-6)


def test_conversations_count_the_same_tokens_as_in_the_ready_task(tmp_path: Path) -> None:
    from bsearch.objectives.language.corpus import corpus_of
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    said = conversations(40)
    tokenizer().save_pretrained(tmp_path / "llama")
    LlamaConfig(vocab_size=300, **SMALL).save_pretrained(tmp_path / "llama")
    write_jsonl(tmp_path / "chats.jsonl", said)
    parameters = {
        "model": str(tmp_path / "llama"),
        "text": str(tmp_path / "chats.jsonl"),
        "length": 200,
        "packing": False,
    }
    train = corpus_of(setup(8, budget=8, parameters=parameters)).train
    trainer = SFTTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=300, **SMALL)),
        args=SFTConfig(
            output_dir=str(tmp_path / "out"),
            max_length=200,
            assistant_only_loss=True,
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_list([one for number, one in enumerate(said) if number % 10 != 9]),
        processing_class=tokenizer(),
    )
    theirs = [[label for label in row["labels"] if label >= 0] for row in trainer.train_dataset]
    assert sorted(theirs) == sorted(labels[labels >= 0].tolist() for labels in train.labels)
