"""Text that comes with Python, and a small LLaMA to train on it: `python prepare.py` writes text/ and llama/ beside itself.

The language reference is for training from scratch, functions of the standard library for fine-tuning: a function's code from
its name and docstring.
"""

import ast
import json
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

HERE, VOCABULARY, LENGTH = Path(__file__).parent, 2000, 256
PACKAGES = [
    "asyncio",
    "collections",
    "concurrent",
    "email",
    "http",
    "importlib",
    "json",
    "logging",
    "unittest",
    "xml",
]
END = "<end>"


def functions():
    """Functions of the standard library that say what they do."""
    for package in PACKAGES:
        for path in sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(source)):
                doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
                if doc and 1 < len(node.body) < 12:
                    code = "\n".join(ast.get_source_segment(source, part) for part in node.body[1:])
                    yield {"name": node.name, "doc": doc.splitlines()[0], "code": code}


def main():
    reference, examples = [text for _, text in sorted(topics.items())], list(functions())
    (HERE / "text").mkdir(exist_ok=True)
    for name, records in (("reference", [{"text": text} for text in reference]), ("functions", examples)):
        lines = "\n".join(map(json.dumps, records))
        (HERE / "text" / f"{name}.jsonl").write_text(f"{lines}\n", encoding="utf-8")

    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer, tokens.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    tokens.train_from_iterator([*reference, *(one["code"] for one in examples)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=END, pad_token=END).save_pretrained(
        HERE / "llama"
    )
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        eos_token_id=tokens.token_to_id(END),
        bos_token_id=None,
    ).save_pretrained(HERE / "llama")
    print(f"{len(reference)} pages of the reference, {len(examples)} functions; a LLaMA in {HERE / 'llama'}")


if __name__ == "__main__":
    main()
