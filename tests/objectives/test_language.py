"""Language models: packed documents are the documents, and a batch of rows is the mean over all their tokens."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from bsearch.objectives.language.packing import IGNORED, Document, best_fit, pack, positions
from bsearch.objectives.optimizers import OPTIMIZERS
from bsearch.objectives.profiling.memory.tracing import MemoryProbe
from bsearch.objectives.task import Loss
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.errors import TaskError
from bsearch.spaces.plan import ActivationCheckpointing, BatchPlan
from bsearch.spaces.trial import TrialSetup
from helpers import bsearch, setup
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("peft", reason=".[language] is not installed")
from bsearch.objectives.language import CausalLM
from bsearch.objectives.language.corpus import corpus_of

TASK = "bsearch.objectives.language:CausalLM"
SENTENCES = [f"{'word ' * (3 * number % 17)}ends {number}." for number in range(60)]

documents = st.lists(
    st.lists(st.integers(1, 90), min_size=1, max_size=40).flatmap(
        lambda tokens: st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)).map(
            lambda counts: Document(tokens, None if all(counts) else counts)
        )
    ),
    min_size=1,
    max_size=30,
)


@given(documents, st.integers(2, 24))
def test_every_token_is_once_in_a_row_and_predicted_from_its_own_document(
    docs: list[Document], length: int
) -> None:
    rows = pack(docs, length)
    assert rows.tokens.shape == rows.labels.shape == rows.segments.shape
    assert rows.tokens.shape[1] == length
    predicted: Counter[tuple[int, int]] = Counter()
    for tokens, labels, segments, used in zip(
        rows.tokens, rows.labels, rows.segments, rows.lengths, strict=True
    ):
        assert (labels[used:] == IGNORED).all()
        for place in (labels != IGNORED).nonzero().flatten().tolist():
            assert segments[place] == segments[place + 1]
            assert labels[place] == tokens[place + 1]
            predicted[int(tokens[place]), int(tokens[place + 1])] += 1
    # The slow twin: every token after a document's first, unless it belongs to the prompt.
    wanted = Counter(
        (one, other)
        for document in docs
        for place, (one, other) in enumerate(zip(document.tokens, document.tokens[1:], strict=False), start=1)
        if document.counts is None or document.counts[place]
    )
    assert predicted == wanted


@given(documents, st.integers(40, 64))
def test_a_document_that_fits_is_in_one_piece(docs: list[Document], length: int) -> None:
    rows = pack(docs, length)
    found = Counter(
        tuple(tokens[segments == segment].tolist())
        for tokens, segments, used in zip(rows.tokens, rows.segments, rows.lengths, strict=True)
        for segment in segments[:used].unique()
    )
    assert found == Counter(tuple(document.tokens) for document in docs)


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 30))
def test_bins_hold_what_they_have_room_for(sizes: list[int], room: int) -> None:
    bins = best_fit(sizes, room)
    assert sorted(item for members in bins for item in members) == list(range(len(sizes)))
    filled = [sum(sizes[item] for item in members) for members in bins]
    assert all(size <= room for size in filled)
    # Two bins that fit into one would be one.
    assert sum(2 * size <= room for size in filled) <= 1


def test_positions_begin_anew_with_each_document() -> None:
    assert positions(torch.tensor([[0, 0, 1, 1, 1, 2]])).tolist() == [[0, 1, 0, 1, 2, 0]]


@given(documents, st.integers(2, 24))
def test_alone_every_row_begins_with_its_only_document(docs: list[Document], length: int) -> None:
    packed, alone = pack(docs, length), pack(docs, length, alone=True)
    assert all(
        len(set(segments[:used].tolist())) == 1
        for segments, used in zip(alone.segments, alone.lengths, strict=True)
    )
    assert sum(alone.lengths) == sum(packed.lengths)
    assert sorted(alone.labels[alone.labels != IGNORED].tolist()) == sorted(
        packed.labels[packed.labels != IGNORED].tolist()
    )


@pytest.fixture(scope="module", params=["gpt2", pytest.param("llama", marks=pytest.mark.long)])
def language(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A small model with weights, without dropout, and some text; parameters of the task."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    if request.param == "gpt2":
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(vocab_size=257, n_positions=128, n_embd=32, n_layer=2, n_head=2, **none)
        GPT2LMHeadModel(config).save_pretrained(folder / "model")
    else:
        config = LlamaConfig(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
        )
        LlamaForCausalLM(config).save_pretrained(folder / "model")
    lines = (
        json.dumps({"question": f"What is {number}?", "text": text}) for number, text in enumerate(SENTENCES)
    )
    (folder / "text.jsonl").write_text("\n".join(lines))
    return {
        "model": str(folder / "model"),
        "tokenizer": "bytes",
        "text": str(folder / "text.jsonl"),
        "length": 96,
    }


def language_setup(
    language: dict[str, Any], batch: int = 8, accumulation: int = 1, **parameters: Any
) -> TrialSetup:
    return setup(batch, accumulation, 200, 1e-3, parameters={**language, **parameters})


def rows_of(run: TrainingRun, count: int) -> tuple[Tensor, ...]:
    return tuple(part[:count] for part in run.data.train.tensors)  # type: ignore[attr-defined]


def test_packed_rows_cost_what_each_document_costs_alone(language: dict[str, Any]) -> None:
    one = language_setup(language, prompt="{question} ")
    task, run = CausalLM(), TrainingRun(CausalLM(), one)
    tokens, labels, segments = rows_of(run, 6)
    assert int(segments.max()) >= 2
    run.model.eval()
    with torch.no_grad():
        packed = task.loss(run.model, (tokens, labels, segments), one)
        alone, count = 0.0, 0
        for row in range(len(tokens)):
            for segment in segments[row].unique():
                chosen = segments[row] == segment
                ids, wanted = tokens[row][chosen], labels[row][chosen]
                logits = run.model(input_ids=ids[None].long()).logits[0]
                alone += float(
                    nn.functional.cross_entropy(logits, wanted.long(), ignore_index=IGNORED, reduction="sum")
                )
                count += int((wanted != IGNORED).sum())
    assert int(packed.denominator) == count
    assert float(packed.total) == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lora_rank": 4},
        {"lora_rank": 4, "prompt": "{question} "},
        {"lora_rank": 4, "lora_variant": "dora", "lora_trained": "lm_head"},
        {"attention": "rows"},
        {"packing": False},
    ],
)
def test_uneven_micro_batches_add_up_to_the_batch(language: dict[str, Any], changes: dict[str, Any]) -> None:
    gradients = []
    for accumulation in (1, 3):
        run = TrainingRun(CausalLM(), language_setup(language, 7, accumulation, **changes))
        run.model.double()
        for parameter in run.parameters:  # LoRA begins with zeros, behind which every gradient is zero
            with torch.no_grad():
                parameter.add_(
                    0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                )
        sizes, at = BatchPlan(7, accumulation).micro_batches(), 0
        batches = []
        whole = rows_of(run, 7)
        for size in sizes:
            batches.append((size, tuple(part[at : at + size] for part in whole)))
            at += size
        counted = sum(int((labels != IGNORED).sum()) for _, (_, labels, _) in batches)
        for _, batch in batches:
            loss = CausalLM().loss(run.model, batch, run.setup)
            (loss.total / counted).backward()
        gradients.append([parameter.grad.clone() for parameter in run.parameters])  # type: ignore[union-attr]
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_adapters_train_and_the_model_stays(language: dict[str, Any]) -> None:
    run = TrainingRun(CausalLM(), language_setup(language, lora_rank=3))
    frozen = {name: one.clone() for name, one in run.model.named_parameters() if not one.requires_grad}
    for _ in run.measurements():
        pass
    assert all("lora_" in name for name, one in run.model.named_parameters() if one.requires_grad)
    assert all(torch.equal(one, frozen[name]) for name, one in run.model.named_parameters() if name in frozen)
    assert all(one.grad is None for one in run.model.parameters() if not one.requires_grad)
    assert {id(one) for group in run.optimizer.param_groups for one in group["params"]} == set(
        map(id, run.parameters)
    )
    assert len(run.optimizer.state) == len(run.parameters)


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4}])
def test_activation_checkpointing_changes_memory_and_no_gradient(
    language: dict[str, Any], changes: dict[str, Any]
) -> None:
    gradients, peaks = [], []
    for mode in get_args(ActivationCheckpointing):
        one = replace(
            language_setup(language, 8, **changes), plan=BatchPlan(8, activation_checkpointing=mode)
        )
        run = TrainingRun(CausalLM(), one)
        run.model.train()
        CausalLM().loss(run.model, rows_of(run, 8), one).total.backward()
        gradients.append([parameter.grad.clone() for parameter in run.parameters])  # type: ignore[union-attr]
        peaks.append(MemoryProbe(CausalLM(), one).train_peak(8).total)
    for kept, selective, full in zip(*gradients, strict=True):
        assert torch.allclose(kept, selective, rtol=1e-5, atol=1e-7)
        assert torch.allclose(kept, full, rtol=1e-5, atol=1e-7)
    none, selective, full = peaks
    assert full < min(none, selective)
    # `selective` keeps the products of frozen layers too, which no gradient needs: with adapters it may take more than `none`.
    assert selective < none or "lora_rank" in changes


class OwnModel(CausalLM):
    """A user's own task around a model whose cache is on, as it is by default."""

    def model(self, setup: TrialSetup) -> nn.Module:
        model = super().model(setup)
        model.config.use_cache = True  # type: ignore[union-attr]
        return model

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        tokens, labels, _ = batch
        logits = model(input_ids=tokens.long()).logits
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten().long(), ignore_index=IGNORED, reduction="sum"
        )
        return Loss(total, (labels != IGNORED).sum())


@pytest.mark.long
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_models_cache_is_not_filled_twice(language: dict[str, Any], mode: ActivationCheckpointing) -> None:
    gradients = []
    for one in ("none", mode):
        made = replace(
            language_setup(language, 4, attention="rows"), plan=BatchPlan(4, activation_checkpointing=one)
        )  # type: ignore[arg-type]
        run = TrainingRun(OwnModel(), made)
        run.model.train()
        OwnModel().loss(run.model, rows_of(run, 4), made).total.backward()
        gradients.append([parameter.grad.clone() for parameter in run.parameters])  # type: ignore[union-attr]
    for kept, recomputed in zip(*gradients, strict=True):
        assert torch.allclose(kept, recomputed, rtol=1e-5, atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({}, "none"),
        ({"lora_rank": 4}, "none"),
        ({"attention": "rows"}, "selective"),
        ({"lora_rank": 4}, "full"),
    ],
)
def test_memory_is_known_beforehand(
    language: dict[str, Any], changes: dict[str, Any], mode: ActivationCheckpointing
) -> None:
    one = replace(language_setup(language, 8, **changes), plan=BatchPlan(8, activation_checkpointing=mode))
    predicted = MemoryProbe(CausalLM(), one).train_peak(8).total
    *_, last = TrainingRun(CausalLM(), one).measurements()
    assert predicted == pytest.approx(last.facts["peak_bytes"], rel=0.04)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_learns(language: dict[str, Any], optimizer: str) -> None:
    run = TrainingRun(CausalLM(), language_setup(language, optimizer=optimizer))
    before = run.evaluate()["val_loss"]
    *_, last = run.measurements()
    assert last.scores["val_loss"] < before


def test_perplexity_is_of_the_mean_over_all_tokens(language: dict[str, Any]) -> None:
    scores = TrainingRun(CausalLM(), language_setup(language)).evaluate()
    assert scores["perplexity"] == pytest.approx(math.exp(scores["val_loss"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "no/such"},
            "space.model: expected a folder of `transformers`, or a name on a hub that can be reached",
        ),
        ({"text": "missing"}, "space.text: expected a file or folder of text, got "),
        (
            {"completion": "{txet}"},
            "text.jsonl:1: expected the field 'txet' of the template, got question, text",
        ),
        ({"length": 4096}, "space.length: expected 2 to 128 tokens, which is what the model takes, got 4096"),
        (
            {"lora_rank": 0},
            "space.lora_rank: expected an integer >= 1, got 0. Leave it out to train all weights.",
        ),
        (
            {"lora_rank": 2, "lora_targets": "q_porj"},
            "space.lora_targets: expected modules of the model, got 'q_porj'.",
        ),
        ({"lora_rank": 2, "from_scratch": True}, "space.lora_rank: expected a model with weights of its own"),
        ({"lora_rank": 2, "lora_alpha": 0}, "space.lora_alpha: expected a number > 0, got 0"),
        (
            {"lora_rank": 2, "lora_dropout": 1.5},
            "space.lora_dropout: expected a number >= 0 and < 1, got 1.5",
        ),
        ({"train_on_prompt": "false"}, "space.train_on_prompt: expected true or false, got 'false'"),
        (
            {"lora_rank": 2, "lora_trained": "head"},
            "space.lora_trained: expected modules of the model, got 'head'.",
        ),
        (
            {"lora_rank": 2, "lora_variant": "dorra"},
            "space.lora_variant: expected lora, dora, rslora; got 'dorra'.",
        ),
        ({"optimizer": "lion"}, "space.optimizer: lion needs bitsandbytes: pip install bitsandbytes"),
        ({"quantize": "4bit"}, "space.quantize: expected lora_rank with it"),
        (
            {"quantize": "4bit", "lora_rank": 2},
            "space.quantize: 4bit needs bitsandbytes: pip install bitsandbytes",
        ),
        ({"lora_merge": True, "quantize": "8bit", "lora_rank": 2}, "space.quantize: 8bit needs bitsandbytes"),
        (
            {"attention": "row"},
            "space.attention: expected documents or rows, got 'row'. Did you mean 'rows'?",
        ),
        (
            {"optimizer": "adamW"},
            "lion, lion_8bit, muon; got 'adamW'. Did you mean 'adam'?",
        ),
    ],
)
def test_what_is_wrong_is_told(
    language: dict[str, Any], changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it tries for twenty seconds
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it were not installed
    with pytest.raises(TaskError) as told:
        TrainingRun(CausalLM(), language_setup(language, **changes))
    assert message in str(told.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected text in "),
        (
            "{}",
            "expected one of the fields text, messages, conversations, or prompt with completion; got none",
        ),
        ("[1]", "expected a JSON object, got a list"),
        ('{"text": ""}', "expected text in "),
        ("{", ":1: "),
    ],
)
def test_text_with_nothing_in_it_is_told(
    language: dict[str, Any], content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "text.jsonl").write_text(content)
    with pytest.raises(TaskError) as told:
        TrainingRun(CausalLM(), language_setup(language, text=str(tmp_path / "text.jsonl")))
    assert message in str(told.value)


@pytest.mark.frameworks
def test_text_may_be_what_datasets_saved_or_a_folder_of_files(
    language: dict[str, Any], tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets", reason=".[language] is not installed")
    saved = datasets.Dataset.from_list([{"text": text} for text in SENTENCES])
    saved.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "parts"))
    (tmp_path / "files" / "inside").mkdir(parents=True)
    for number, text in enumerate(SENTENCES):
        (tmp_path / "files" / "inside" / f"{number:02}.py").write_text(text)
    of_lines = TrainingRun(CausalLM(), language_setup(language)).data.train
    for changes in ({"text": str(tmp_path / "saved")}, {"text": str(tmp_path / "files"), "files": "*.py"}):
        found = TrainingRun(CausalLM(), language_setup(language, **changes)).data.train
        assert all(
            torch.equal(one, other) for one, other in zip(found.tensors, of_lines.tensors, strict=True)
        )
    for changes, message in (
        (
            {"text": str(tmp_path / "parts")},
            "expected one split of a data set, got the folder of all (train): ",
        ),
        ({"text": str(tmp_path / "files")}, "got none. Files that count: *.txt or *.jsonl or "),
    ):
        with pytest.raises(TaskError) as told:
            TrainingRun(CausalLM(), language_setup(language, **changes))
        assert message in str(told.value)


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about what peft reads there
@pytest.mark.long
def test_a_study_ends_with_adapters_that_load_elsewhere(language: dict[str, Any], tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    study = {
        "study": "small",
        "task": TASK,
        "space": {
            **language,
            "lora_rank": {"choices": [1, 4], "changes_cost": True},
            "effective_batch": {"low": 3, "high": 15},
            "reference_rate": {"low": 1e-3, "high": 1e-2, "at_batch": 8},
            "epochs": {"low": 1, "high": 4},
        },
        "objectives": {"metric": {"name": "val_loss", "direction": "minimize"}},
        "training": {"evaluations": 2},
        "budget": {"trials": 4, "profile_s": 1},
    }
    path = tmp_path / "study.yaml"
    path.write_text(json.dumps(study))
    ran = bsearch("run", path, "--serial")
    assert ran.exit_code == 0, ran.output
    trained = bsearch("train", path, "--pick", "best", "--serial", "--keep", tmp_path / "model")
    assert trained.exit_code == 0, trained.output
    told = json.loads((tmp_path / "model" / "training.json").read_text())
    elsewhere = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "model"))
    one = language_setup(language)
    run = TrainingRun(CausalLM(), one)
    run.model = elsewhere
    assert run.evaluate()["val_loss"] == pytest.approx(told["val_loss"], rel=1e-4)


def in_half(language: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The same model as files in bfloat16."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(language["model"]).to(torch.bfloat16).save_pretrained(
        tmp_path / "half"
    )
    return {**language, "model": str(tmp_path / "half")}


def test_a_frozen_model_keeps_the_precision_of_its_files_and_one_that_is_trained_gets_float32(
    language: dict[str, Any], tmp_path: Path
) -> None:
    half = in_half(language, tmp_path)
    adapted = CausalLM().model(language_setup(half, lora_rank=2))
    assert {one.dtype for one in adapted.parameters() if not one.requires_grad} == {torch.bfloat16}
    assert {one.dtype for one in adapted.parameters() if one.requires_grad} == {torch.float32}
    trained = CausalLM().model(language_setup(half, lora_rank=2, lora_trained="lm_head"))
    assert {one.dtype for one in trained.parameters() if one.requires_grad} == {torch.float32}
    assert {one.dtype for one in CausalLM().model(language_setup(half)).parameters()} == {torch.float32}
    for dtype, changes in (("bfloat16", {}), ("float32", {"lora_rank": 2})):
        model = CausalLM().model(language_setup(half, dtype=dtype, **changes))
        assert {one.dtype for one in model.parameters() if one.requires_grad == (not changes)} == {
            getattr(torch, dtype)
        }
    scratch = CausalLM().model(language_setup(half, from_scratch=True))
    assert {one.dtype for one in scratch.parameters()} == {torch.float32}
    with pytest.raises(
        TaskError, match=r"space\.dtype: expected auto, float32, bfloat16, float16; got 'bf16'\."
    ):
        CausalLM().model(language_setup(half, dtype="bf16"))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_is_saved_in_the_precision_that_it_came_in(language: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for origin in (language, in_half(language, tmp_path)):
        one, folder = language_setup(origin), tmp_path / Path(origin["model"]).name / "saved"
        run = TrainingRun(CausalLM(), one)
        for _ in run.measurements():
            pass
        CausalLM().save(run.model, folder, one)
        saved = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        came = torch.float32 if origin is language else torch.bfloat16
        assert {parameter.dtype for parameter in saved.parameters()} == {came}
        assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
        assert saved.config.use_cache
        for mine, theirs in zip(run.model.state_dict().values(), saved.state_dict().values(), strict=True):
            assert torch.equal(mine.to(came), theirs)


@pytest.mark.long
def test_memory_of_adapters_on_a_frozen_model_in_half_precision_is_known(
    language: dict[str, Any], tmp_path: Path
) -> None:
    peaks = {}
    for dtype in ("float32", "auto"):
        one = language_setup(in_half(language, tmp_path), lora_rank=4, dtype=dtype)
        peaks[dtype] = MemoryProbe(CausalLM(), one).train_peak(8).total
        *_, last = TrainingRun(CausalLM(), one).measurements()
        assert peaks[dtype] == pytest.approx(last.facts["peak_bytes"], rel=0.04)
    assert peaks["auto"] < peaks["float32"]


def test_loading_a_model_leaves_its_dropout_on(language: dict[str, Any]) -> None:
    for changes in ({}, {"lora_rank": 2, "lora_dropout": 0.5}):
        run = TrainingRun(CausalLM(), language_setup(language, **changes))
        run.modes.train(run.model)
        assert all(module.training for module in run.model.modules())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:You have requested .ensure_weight_tying.")
@pytest.mark.parametrize("variant", ["lora", "dora", "rslora"])
def test_adapters_of_every_kind_are_the_same_elsewhere(
    language: dict[str, Any], variant: str, tmp_path: Path
) -> None:
    from peft import AutoPeftModelForCausalLM

    one = language_setup(language, lora_rank=3, lora_variant=variant, lora_trained="lm_head")
    run = TrainingRun(CausalLM(), one)
    *_, last = run.measurements()
    CausalLM().save(run.model, tmp_path, one)
    elsewhere = TrainingRun(CausalLM(), language_setup(language))
    elsewhere.model = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path))
    assert elsewhere.evaluate()["val_loss"] == pytest.approx(last.scores["val_loss"], rel=1e-6)
    if variant == "lora":
        assert (
            MemoryProbe(CausalLM(), one).train_peak(8).total
            > MemoryProbe(CausalLM(), language_setup(language, lora_rank=3)).train_peak(8).total
        )


def test_texts_on_both_sides_of_the_validation_split_are_told(
    language: dict[str, Any], tmp_path: Path
) -> None:
    lines = [json.dumps({"text": f"document {number % 25}"}) for number in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    one = language_setup({**language, "text": str(tmp_path / "text.jsonl")})
    assert corpus_of(one).sentence.endswith("; 6 validation documents with the text of a training document")
    assert corpus_of(replace(one, parameters={**one.parameters, "validation_share": 0.2})).on_both_sides == 0
