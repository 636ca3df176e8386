"""Fine-tuning as its daily users have it: new tokens, merged adapters, weights of few bits, several sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bsearch.objectives.language.corpus import corpus_of
from bsearch.objectives.language.packing import IGNORED, Document, fitted
from bsearch.objectives.language.pretrained import tokens_of
from bsearch.objectives.language.text import Bytes
from bsearch.objectives.language.token_loss import summed_cross_entropy
from bsearch.objectives.profiling.memory.tracing import MemoryProbe
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.errors import TaskError
from bsearch.spaces.trial import TrialSetup
from helpers import setup
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("peft", reason=".[language] is not installed")
from bsearch.objectives.language import CausalLM, token_loss
from objectives.chat import CHATML, conversations, tokenizer, write_jsonl

# Of transformers, about what peft reads there.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small models, whose embeddings are tied and not, a tokenizer, and conversations."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made = tmp_path_factory.mktemp("finetuning")
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    for name, tied in (("tied", True), ("apart", False)):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=300, **small, tie_word_embeddings=tied, initializer_range=0.2)
        LlamaForCausalLM(config).save_pretrained(made / name)
        tokenizer().save_pretrained(made / name)
    write_jsonl(made / "chats.jsonl", conversations(60))
    write_jsonl(
        made / "words.jsonl", [{"text": f"{'word ' * (number % 9)}ends {number}."} for number in range(200)]
    )
    return made


def of(
    folder: Path, model: str = "apart", batch: int = 8, accumulation: int = 1, **parameters: Any
) -> TrialSetup:
    options = {"model": str(folder / model), "text": str(folder / "chats.jsonl"), "length": 128, **parameters}
    return setup(batch, accumulation, 3 * batch, 3e-3, parameters=options)


# ---------------------------------------------------------------- the loss


@settings(max_examples=60)
@given(
    st.integers(1, 40),
    st.integers(2, 30),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.integers(1, 4000),
    st.integers(0, 100),
)
def test_the_loss_in_chunks_is_torchs(
    tokens: int, words: int, dtype: torch.dtype, chunk: int, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = (3 * torch.randn(tokens, words)).to(dtype).requires_grad_()
    labels = torch.where(torch.rand(tokens) < 0.3, IGNORED, torch.randint(words, (tokens,)))
    wide = logits if dtype == torch.float64 else logits.float()
    expected = nn.functional.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="sum")
    before, token_loss._CHUNK_BYTES = token_loss._CHUNK_BYTES, chunk
    try:
        found = summed_cross_entropy(logits, labels)
    finally:
        token_loss._CHUNK_BYTES = before
    torch.testing.assert_close(found, expected, rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=1e-5)
    (slope,), (wanted,) = (torch.autograd.grad(0.7 * one, logits) for one in (found, expected))
    close = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(slope, wanted, rtol=close, atol=close)


def test_a_gradient_that_is_scaled_later_keeps_small_probabilities() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 50_000).half().requires_grad_()
    labels = torch.randint(50_000, (8,))
    scale = 2.0**14
    expected = nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
    (wanted,), (slope,) = (
        torch.autograd.grad(scale * one, logits) for one in (expected, summed_cross_entropy(logits, labels))
    )
    # In float16 these would be subnormal before they are scaled.
    assert float(wanted.float().abs().median()) < scale * 6e-5
    torch.testing.assert_close(slope, wanted, rtol=2e-3, atol=0)


# ---------------------------------------------------------------- adapters


@pytest.mark.slow
@pytest.mark.parametrize("model", ["apart", "tied"])
@pytest.mark.parametrize(
    "adapted",
    [
        {"lora_targets": "all-linear"},
        {"lora_targets": "q_proj, lm_head"},
        {"lora_variant": "dora"},
        {"lora_trained": "embed_tokens, lm_head"},
        {"lora_trained": "norm"},
    ],
)
def test_a_merged_model_computes_elsewhere_what_its_adapters_did(
    model: str, adapted: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    made = of(folder, model, lora_rank=4, lora_merge=True, **adapted)
    run = TrainingRun(CausalLM(), made)
    list(run.measurements())
    tokens = torch.arange(1, 60)[None]
    run.model.eval()
    with torch.no_grad():
        expected = run.model(input_ids=tokens).logits
        run.task.save(run.model, tmp_path / "merged", made)
        elsewhere = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        plain = AutoModelForCausalLM.from_pretrained(folder / model).eval()(input_ids=tokens).logits
        found = elsewhere(input_ids=tokens).logits
        again = run.model(input_ids=tokens).logits
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert float((found - expected).norm() / expected.norm()) < 1e-5  # 1.4e-6: single precision
    assert float((plain - expected).norm() / expected.norm()) > 1e-3  # it has learnt something
    assert torch.equal(again, expected)  # and the trial's model stays as it was


def test_merged_weights_are_saved_in_the_precision_that_they_came_in(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    half = AutoModelForCausalLM.from_pretrained(folder / "apart").to(torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(folder / "apart").save_pretrained(tmp_path / "half")
    made = of(tmp_path, "half", lora_rank=4, lora_merge=True, text=str(folder / "chats.jsonl"))
    run = TrainingRun(CausalLM(), made)
    run.task.save(run.model, tmp_path / "merged", made)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert {one.dtype for one in found.parameters()} == {torch.bfloat16}


def test_merging_is_of_adapters_on_weights_that_are_not_rounded(folder: Path) -> None:
    with pytest.raises(TaskError, match=r"space\.lora_merge: expected weights that are not quantized"):
        TrainingRun(CausalLM(), of(folder, lora_rank=4, lora_merge=True, quantize="8bit"))
    with pytest.raises(TaskError, match=r"space\.lora_merge: expected lora_rank with it"):
        TrainingRun(CausalLM(), of(folder, lora_merge=True))


# ---------------------------------------------------------------- weights of few bits


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of bitsandbytes, about kernels that are not there
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_adapters_train_on_quantized_weights(bits: str, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    made = of(folder, quantize=bits, lora_rank=4)
    run = TrainingRun(CausalLM(), made)
    layer = run.model.base_model.model.model.layers[0].self_attn.q_proj.base_layer  # type: ignore[union-attr, index]
    assert type(layer).__name__ == {"4bit": "Linear4bit", "8bit": "Linear8bitLt"}[bits]
    if bits == "4bit":
        assert layer.weight.quant_state.quant_type == "nf4"  # type: ignore[union-attr]
    before = run.evaluate()["val_loss"]
    *_, last = run.measurements()
    assert last.scores["val_loss"] < before
    run.task.save(run.model, tmp_path / "adapters", made)
    assert (tmp_path / "adapters" / "adapter_config.json").exists()
    peak = MemoryProbe(CausalLM(), made).train_peak(2)
    assert peak.total > 0


# ---------------------------------------------------------------- vocabularies


def grown(folder: Path, into: Path) -> Path:
    """The tokenizer with two more tokens than the model has."""
    tokens = tokenizer()
    tokens.add_tokens(["<think>", "</think>"], special_tokens=True)
    assert len(tokens) == 302
    tokens.save_pretrained(into / "grown")
    return into / "grown"


def test_tokens_that_the_model_does_not_have_get_embeddings_of_their_own(
    folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    made = of(folder, tokenizer=str(grown(folder, tmp_path)))
    run = TrainingRun(CausalLM(), made)
    assert run.model.get_input_embeddings().weight.shape[0] == 302  # type: ignore[operator]
    sentences = [one.message for one in CausalLM().examine(run.model, run.data, made)]
    assert any("the tokenizer has 302 tokens, the model 300" in one for one in sentences)
    list(run.measurements())
    run.task.save(run.model, tmp_path / "kept", made)
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "kept")
    assert kept.config.vocab_size == kept.get_input_embeddings().weight.shape[0] == 302


@pytest.mark.parametrize("model", ["apart", "tied"])
def test_new_tokens_are_trained_beside_adapters_or_refused(model: str, folder: Path, tmp_path: Path) -> None:
    tokens = str(grown(folder, tmp_path))
    with pytest.raises(TaskError) as told:
        TrainingRun(CausalLM(), of(folder, model, tokenizer=tokens, lora_rank=4))
    assert "2 tokens of the tokenizer are new to the model" in str(told.value)
    named = str(told.value).rpartition("lora_trained: ")[2]
    assert named == "embed_tokens, lm_head"
    run = TrainingRun(CausalLM(), of(folder, model, tokenizer=tokens, lora_rank=4, lora_trained=named))
    before = run.evaluate()["val_loss"]
    *_, last = run.measurements()
    assert last.scores["val_loss"] < before


@given(st.text(max_size=60))
def test_bytes_are_saved_as_a_tokenizer_that_loads(text: str) -> None:
    saved = Bytes().of_transformers()
    ids = Bytes()([text], add_special_tokens=False)["input_ids"][0]
    assert saved(text, add_special_tokens=False)["input_ids"] == ids
    assert saved.decode(ids) == text
    assert (saved.eos_token_id, len(saved)) == (256, 257)


# ---------------------------------------------------------------- several sources


def test_no_source_for_validation_is_trained_on(folder: Path, tmp_path: Path) -> None:
    for number in range(4):
        write_jsonl(tmp_path / f"{number}.jsonl", [{"text": f"{number} {one} " * 3} for one in range(20)])
    held = f"{tmp_path / '2.jsonl'}, {tmp_path / '3.jsonl'}"
    corpus = corpus_of(of(folder, text=str(tmp_path), validation_text=held))
    assert corpus.fate.documents == 40
    assert corpus.on_both_sides == 0


def test_rows_of_several_sources_are_drawn_by_their_weights(folder: Path) -> None:
    both = f"{folder / 'chats.jsonl'}@3, {folder / 'words.jsonl'}@1"
    corpus = corpus_of(of(folder, text=both))
    each = [
        len(corpus_of(of(folder, text=str(folder / name))).train.tokens)
        for name in ("chats.jsonl", "words.jsonl")
    ]
    assert corpus.weights is not None
    assert (
        "rows are drawn by weight, with replacement: 75% from chats.jsonl, 25% from words.jsonl"
        in corpus.sentence
    )
    assert len(corpus.train.tokens) == sum(each) == len(corpus.weights)
    assert sum(corpus.weights[: each[0]]) == pytest.approx(3)
    assert sum(corpus.weights[each[0] :]) == pytest.approx(1)
    run = TrainingRun(CausalLM(), of(folder, text=both))
    drawn = run.stream.take(0, 8000).index
    assert float((drawn < each[0]).mean()) == pytest.approx(0.75, abs=0.02)
    plain = corpus_of(of(folder, text=both.replace("@3", "").replace("@1", "")))
    assert plain.weights is None
    assert torch.equal(plain.train.tokens, corpus.train.tokens)
    assert plain.fate == corpus.fate


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{folder}/chats.jsonl@3, {folder}/words.jsonl", "expected a weight for all sources or none"),
        ("{folder}/chats.jsonl@0, {folder}/words.jsonl@1", "expected a weight > 0 after @, got '0'"),
        ("{folder}/chats.jsonl@x", "expected a weight > 0 after @, got 'x'"),
        ("{folder}/chats.jsonl, {folder}/missing.jsonl", "missing.jsonl, which does not exist"),
        (
            "nobody/chats#train_sft",
            "or a data set's name on a hub that can be reached, got 'nobody/chats#train_sft'",
        ),
    ],
)
def test_sources_that_are_not_understood_are_refused(text: str, message: str, folder: Path) -> None:
    with pytest.raises(TaskError) as told:
        corpus_of(of(folder, text=text.format(folder=folder)))
    assert message in str(told.value)


def test_a_data_set_of_a_hub_is_read_by_its_split(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(name: str, split: str) -> Any:  # no hub can be reached from a test
        asked.append((name, split))
        return datasets.Dataset.from_list(conversations(60))

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = corpus_of(of(folder, text="owner/chats-1k#train_sft"))
    assert asked == [("owner/chats-1k", "train_sft")]
    assert torch.equal(found.train.tokens, corpus_of(of(folder)).train.tokens)


# ---------------------------------------------------------------- what is cut, and where an answer ends


def test_the_systems_message_stays_where_a_prompt_is_cut(folder: Path) -> None:
    said = [{"role": "system", "content": "You compute."}]
    said += [{"role": "user", "content": "What is 1 and 2? " * 20}, {"role": "assistant", "content": "3."}]
    write_jsonl(folder / "long.jsonl", [{"messages": said}] * 12)
    corpus = corpus_of(of(folder, text=str(folder / "long.jsonl"), length=64, too_long="cut_prompt"))
    tokens: Any = tokens_of(str(folder / "apart"))
    row = tokens.decode(corpus.train.tokens[0])
    assert row.startswith("<|im_start|>system\nYou compute.<|im_end|>\n")
    assert "assistant\n3.<|im_end|>" in row
    assert corpus.fate.left_out == 0


@given(st.integers(0, 6), st.integers(1, 20), st.integers(1, 6), st.integers(4, 20))
def test_cutting_a_prompt_keeps_its_head_and_its_answer(
    head: int, prompt: int, answer: int, length: int
) -> None:
    whole = Document(range(head + prompt + answer), [False] * (head + prompt) + [True] * answer, head)
    made, fate = fitted([whole], length, "cut_prompt")
    if head + answer + (head == 0) <= length:
        (one,) = made
        assert len(one.tokens) == min(length, head + prompt + answer)
        assert list(one.tokens[:head]) == list(range(head))
        assert list(one.tokens[-answer:]) == list(whole.tokens[-answer:])
        assert one.counted == whole.counted
    elif head + prompt + answer > length:
        assert (made, fate.left_out) == ([], 1)


UNENDED = CHATML.replace("<|im_end|>", "").replace("<|im_start|>", "# ")


@pytest.mark.parametrize(("template", "ends"), [(CHATML, True), (UNENDED, False)])
def test_a_template_without_an_end_is_told(template: str, ends: bool, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(template)
    corpus = corpus_of(of(folder, chat_template=str(tmp_path / "template.jinja")))
    assert corpus.teaches_ends == ends
    assert ("does not learn where to stop" in corpus.sentence) == (not ends)
