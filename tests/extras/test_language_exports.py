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
from bsearch.spaces.errors import OutputError, StudyFileError
from bsearch.spaces.plan import BatchPlan
from exported_settings import chosen, program

LANGUAGE = ["trl", "axolotl", "llamafactory"]
GOLDEN = Path(__file__).parents[1] / "golden"
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
    lines = [
        {"text": "word " * 40, "name": f"f{number}", "doc": "It does.", "code": "return 1"}
        for number in range(40)
    ]
    (folder / "text.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = {"model": "llama", "text": "text.jsonl", "length": 64, **(parameters or {})}
    made = chosen(plan, facts={"optimizer": "AdamW"}, parameters=options, **training)
    setup = replace(made.setup, folder=str(folder))
    return replace(made, task="bsearch.objectives.language:CausalLM", setup=setup)


ASKED = {
    "prompt": "# {name}: {doc}\n",
    "completion": "{code}",
    "lora_rank": 8,
    "lora_targets": "q_proj, v_proj",
}
ASKED_OF_BYTES = {"prompt": "# {name}: {doc}\n", "completion": "{code}"}
CASES: dict[str, dict[str, Any]] = {
    "scratch": {"parameters": {"from_scratch": True}, "schedule": "cosine", "warmup": 0.1, "clip_norm": 1.0},
    "lora": {"parameters": ASKED, "precision": "bf16", "plan": BatchPlan(24, 3, 2, "full")},
    "whole": {
        "parameters": {"completion": "{doc} {code}", "validation_text": "other.jsonl"},
        "schedule": "linear",
    },
}


@pytest.mark.parametrize("framework", LANGUAGE)
@pytest.mark.parametrize("case", CASES)
def test_texts_are_as_they_were_agreed(framework: str, case: str, tmp_path: Path) -> None:
    # To agree on a new text: BSEARCH_WRITE_GOLDEN=1 pytest tests/extras/test_language_exports.py -k agreed.
    settings = language(tmp_path, **CASES[case])
    golden = GOLDEN / f"export-{framework}-{case}.txt"
    exported = FRAMEWORKS[framework](settings)
    text = exported.text + "".join(f"stderr: {note}\n" for note in exported.notes)
    assert exported.beside is not None
    if os.environ.get("BSEARCH_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("framework", LANGUAGE)
def test_other_tasks_are_refused(framework: str) -> None:
    with pytest.raises(
        StudyFileError, match=f"--to {framework}: expected a study of bsearch.objectives.language:CausalLM"
    ):
        FRAMEWORKS[framework](chosen())


def test_rows_are_as_long_as_the_task_makes_them(tmp_path: Path) -> None:
    settings = language(tmp_path)
    settings = replace(
        settings, setup=replace(settings.setup, parameters={"model": "llama", "text": "text.jsonl"})
    )
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
    assert (
        arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * settings.even.devices
        == 24
    )
    assert arguments.max_length == 64
    assert arguments.gradient_checkpointing == (settings.plan.activation_checkpointing == "full")
    if case == "lora":
        assert (names["adapters"].r, names["adapters"].target_modules) == (8, {"q_proj", "v_proj"})


@pytest.mark.parametrize("case", CASES)
def test_axolotl_takes_its_settings(case: str, tmp_path: Path) -> None:
    schema = pytest.importorskip("axolotl.utils.schemas.config")
    settings = language(tmp_path, **CASES[case])
    known = schema.AxolotlInputConfig(**yaml.safe_load(FRAMEWORKS["axolotl"](settings).text))
    assert known.learning_rate == settings.even_settings.learning_rate
    assert known.micro_batch_size * known.gradient_accumulation_steps * settings.even.devices == 24


@pytest.mark.parametrize("devices", [1, 2])
def test_llamafactory_takes_its_settings(devices: int, tmp_path: Path) -> None:
    parameters = {**ASKED, "quantize": "4bit", "lora_variant": "dora", "lora_trained": "lm_head"}
    document = yaml.safe_load(
        FRAMEWORKS["llamafactory"](language(tmp_path, parameters, BatchPlan(24, 2, devices))).text
    )
    assert document["per_device_train_batch_size"] * document["gradient_accumulation_steps"] * devices == 24
    adapted = {name: document[name] for name in ("lora_rank", "lora_target", "additional_target", "use_dora")}
    assert adapted == {
        "lora_rank": 8,
        "lora_target": "q_proj,v_proj",
        "additional_target": "lm_head",
        "use_dora": True,
    }
    assert (document["finetuning_type"], document["quantization_bit"]) == ("lora", 4)


@pytest.mark.parametrize(
    ("packing", "text"), [(True, "text.jsonl"), (False, "text.jsonl"), (True, "text.jsonl@3, more.jsonl@1")]
)
def test_rows_beside_a_text_are_those_of_the_whole_training(packing: bool, text: str, tmp_path: Path) -> None:
    from bsearch.objectives.language import CausalLM
    from bsearch.objectives.language.corpus import corpus_of
    from bsearch.objectives.training import TrainingRun
    from datasets import load_from_disk

    asked = {"from_scratch": True, "tokenizer": "bytes", "length": 300, "packing": packing, "text": text}
    settings = language(tmp_path, {**asked, **ASKED_OF_BYTES})
    (tmp_path / "more.jsonl").write_text((tmp_path / "text.jsonl").read_text())
    settings = replace(settings, setup=replace(settings.setup, samples_budget=50))
    train = corpus_of(settings.setup).train
    # As the trial itself draws them.
    order = TrainingRun(CausalLM(), settings.setup).stream.take(0, 50).index
    for framework in LANGUAGE:
        exported = FRAMEWORKS[framework](settings)
        assert exported.beside is not None
        exported.beside(tmp_path)
        assert f"rows-trial3-{framework}" in exported.text
        written = load_from_disk(str(tmp_path / f"rows-trial3-{framework}"))
        ids = [token for one in written["train"] for token in one["input_ids"]]
        labels = [label for one in written["train"] for label in one["labels"]]
        filled = framework == "trl" or packing
        ends = [train.tokens.shape[1] if filled else train.lengths[row] for row in order]
        assert ids == [
            token for row, end in zip(order, ends, strict=True) for token in train.tokens[row, :end].tolist()
        ]
        # Each label stands at the token that it is, where ours stands at the one before.
        expected = [
            label
            for row, end in zip(order, ends, strict=True)
            for label in [-100, *train.labels[row, : end - 1].tolist()]
        ]
        assert labels == expected
        assert all(label in (-100, token) for label, token in zip(labels, ids, strict=True))
        if framework == "llamafactory" and packing:
            assert [one["attention_mask"] for one in written["train"]] == (train.segments[order] + 1).tolist()
        # Each record is a document, the last of a row with what fills it.
        if framework == "axolotl" and packing:
            assert len(written["train"]) == sum(
                int(train.segments[row, train.lengths[row] - 1]) + 1 for row in order
            )


def test_what_the_libraries_loss_takes_more_is_said(tmp_path: Path) -> None:
    settings = language(tmp_path, {"tokenizer": "bytes"}, plan=BatchPlan(24, 2))
    (tmp_path / "llama" / "config.json").write_text(
        json.dumps({**LLAMA, "vocab_size": 128_000, "attention_dropout": 0.1})
    )
    for framework in LANGUAGE:
        notes = "\n".join(FRAMEWORKS[framework](settings).notes)
        assert "take about 750 MiB more" in notes  # 8 bytes x 12 rows x 64 tokens x 128,000
        assert "dropout (attention_dropout) draws other random numbers" in notes


def test_rows_replace_nothing(tmp_path: Path) -> None:
    settings = language(tmp_path, {"tokenizer": "bytes"})
    (tmp_path / "rows-trial3-trl").mkdir()
    for name in ("mine.txt", "dataset_dict.json"):  # as somebody's own data has one
        (tmp_path / "rows-trial3-trl" / name).write_text("x")
    exported = FRAMEWORKS["trl"](settings)
    assert exported.beside is not None
    with pytest.raises(OutputError, match="got a folder of this name"):
        exported.beside(tmp_path)
    assert (tmp_path / "rows-trial3-trl" / "mine.txt").exists()
