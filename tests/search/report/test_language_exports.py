"""A language model's trial in the words of TRL and Axolotl: what they say, and that the libraries read it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from bsearch.search.report.frameworks import FRAMEWORKS, ChosenSettings
from bsearch.search.report.frameworks.language import LANGUAGE
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.plan import BatchPlan
from test_frameworks import GOLDEN, chosen, program

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
}


def language(
    folder: Path, parameters: dict[str, Any] | None = None, plan: BatchPlan | int = 24, **training: Any
) -> ChosenSettings:
    """A trial of a language model that lies in the folder `llama`, on lines of text.jsonl."""
    (folder / "llama").mkdir(exist_ok=True)
    (folder / "llama" / "config.json").write_text(json.dumps(LLAMA))
    lines = [{"text": "word " * 40, "name": f"f{number}", "doc": "It does.", "code": "return 1"} for number in range(40)]
    (folder / "text.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = {"model": "llama", "text": "text.jsonl", "length": 64, **(parameters or {})}
    made = chosen(plan, facts={"optimizer": "AdamW"}, parameters=options, **training)
    setup = replace(made.setup, folder=str(folder))
    return replace(made, task="bsearch.objectives.language:CausalLM", setup=setup)


ASKED = {"prompt": "# {name}: {doc}\n", "completion": "{code}", "lora_rank": 8, "lora_targets": "q_proj, v_proj"}
CASES: dict[str, dict[str, Any]] = {
    "scratch": {"parameters": {"from_scratch": True}, "schedule": "cosine", "warmup": 0.1, "clip_norm": 1.0},
    "lora": {"parameters": ASKED, "precision": "bf16", "plan": BatchPlan(24, 3, 2, "full")},
    "whole": {"parameters": {"completion": "{doc} {code}", "validation_text": "other.jsonl"}, "schedule": "linear"},
}


@pytest.mark.parametrize("framework", LANGUAGE)
@pytest.mark.parametrize("case", CASES)
def test_texts_are_as_they_were_agreed(framework: str, case: str, tmp_path: Path) -> None:
    # To agree on a new text: BSEARCH_WRITE_GOLDEN=1 pytest tests/search/report/test_language_exports.py -k agreed.
    settings = language(tmp_path, **CASES[case])
    golden = GOLDEN / f"export-{framework}-{case}.txt"
    exported = LANGUAGE[framework](settings)
    text = exported.text + "".join(f"stderr: {note}\n" for note in exported.notes)
    if os.environ.get("BSEARCH_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("framework", LANGUAGE)
def test_other_tasks_are_refused(framework: str) -> None:
    with pytest.raises(StudyFileError, match=f"--to {framework}: expected a study of bsearch.objectives.language:CausalLM"):
        FRAMEWORKS[framework](chosen())


def test_rows_are_as_long_as_the_task_makes_them(tmp_path: Path) -> None:
    settings = language(tmp_path)
    settings = replace(settings, setup=replace(settings.setup, parameters={"model": "llama", "text": "text.jsonl"}))
    assert "max_length=1024," in FRAMEWORKS["trl"](settings).text
    (tmp_path / "llama" / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 512}))
    assert "max_length=512," in FRAMEWORKS["trl"](settings).text


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")  # version 4 knows no other name
@pytest.mark.parametrize("case", CASES)
def test_trl_takes_its_settings(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    settings = language(tmp_path, **CASES[case])
    names = program(replace(settings, setup=replace(settings.setup, device="cpu")), "trl")
    arguments = names["arguments"]
    assert arguments.learning_rate == settings.even_settings.learning_rate
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * settings.even.devices == 24
    assert (arguments.max_length, arguments.packing) == (64, True)
    assert arguments.gradient_checkpointing == (settings.plan.activation_checkpointing == "full")
    rows = names["documents"]("text.jsonl")
    if case == "lora":
        assert (names["adapters"].r, names["adapters"].target_modules) == (8, {"q_proj", "v_proj"})
        assert rows[3] == {"prompt": "# f3: It does.\n", "completion": "return 1"}
    else:
        assert rows.column_names == ["text"]


@pytest.mark.parametrize("case", CASES)
def test_axolotl_takes_its_settings(case: str, tmp_path: Path) -> None:
    schema = pytest.importorskip("axolotl.utils.schemas.config")
    settings = language(tmp_path, **CASES[case])
    known = schema.AxolotlInputConfig(**yaml.safe_load(FRAMEWORKS["axolotl"](settings).text))
    assert known.learning_rate == settings.even_settings.learning_rate
    assert known.micro_batch_size * known.gradient_accumulation_steps * settings.even.devices == 24


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about what peft reads there
def test_conversations_are_trained_by_trl_on_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    from bsearch.objectives.language.corpus import corpus_of
    from objectives.chat import conversations, tokenizer, write_jsonl

    monkeypatch.chdir(tmp_path)
    settings = language(tmp_path, {"text": "chat.jsonl", "length": 200, "lora_rank": 4, "packing": False})
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained("llama")
    tokenizer().save_pretrained("llama")
    write_jsonl(tmp_path / "chat.jsonl", conversations(40))
    settings = replace(settings, setup=replace(settings.setup, device="cpu"))
    exported = FRAMEWORKS["trl"](settings)
    assert "assistant_only_loss=True" in exported.text
    trained = program(settings, "trl")["trainer"]()
    corpus = corpus_of(settings.setup)
    theirs = [[label for label in row["labels"] if label >= 0] for row in trained.train_dataset]
    ours = [labels[labels >= 0].tolist() for labels in corpus.train.labels]
    assert sorted(theirs) == sorted(ours)


def test_what_the_libraries_do_otherwise_with_conversations_is_noted(tmp_path: Path) -> None:
    settings = language(tmp_path, {"text": "chat.jsonl", "turns": "last", "too_long": "drop", "validation_share": 0.1})
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}))
    for framework in LANGUAGE:
        notes = "\n".join(LANGUAGE[framework](settings).notes)
        assert all(word in notes for word in ("turns: last", "too_long: drop", "validation_share"))
    document = yaml.safe_load(LANGUAGE["axolotl"](settings).text)
    assert document["datasets"][0]["type"] == "chat_template"
    assert document["datasets"][0]["roles_to_train"] == ["assistant"]
