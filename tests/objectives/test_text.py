"""Text as people have it: conversations, records of every kind, and what is refused of them by its place."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
from bsearch.objectives.language.packing import Document, Fate, TooLong, fitted, pack
from bsearch.objectives.language.records import records
from bsearch.objectives.language.text import (
    Bytes,
    Templates,
    Text,
    checked_template,
    held_out,
    texts,
    tokenized,
)
from bsearch.spaces.errors import TaskError
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason=".[language] is not installed")
from objectives.chat import CHATML, FORGETS, conversations, tokenizer, write_jsonl

NONE = Templates()


@pytest.fixture(scope="module")
def chatml() -> Any:
    return tokenizer()


def documents(record: Any, tokens: Any, templates: Templates = NONE, turns: Any = "all") -> list[Document]:
    return list(tokenized(texts([(record, "here")], templates, tokens, turns), tokens, train_on_prompt=False))


def counted(document: Document, tokens: Any) -> list[str]:
    """The runs of counted tokens as text."""
    found, before = [], False
    for token, counts in zip(document.tokens, document.counts or [True] * len(document.tokens), strict=True):
        if counts and not before:
            found.append([])
        if counts:
            found[-1].append(token)
        before = counts
    return [tokens.decode(run) for run in found]


said = st.text("abc dé12\n<|>", min_size=1, max_size=12)
messages = st.lists(st.tuples(said, said), min_size=1, max_size=4)


@settings(max_examples=60)
@given(messages, st.booleans())
def test_the_assistants_turns_count_as_transformers_own_mask_has_them(
    turns: list[tuple[str, str]], system: bool
) -> None:
    tokens: Any = _CHATML
    conversation = [{"role": "system", "content": "You help."}] * system
    for asked, answered in turns:
        conversation += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    (document,) = documents({"messages": conversation}, tokens)
    own = tokens.apply_chat_template(
        conversation, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert list(document.tokens) == own["input_ids"]
    assert list(map(int, document.counts or ())) == own["assistant_masks"]


_CHATML = tokenizer()


def test_only_the_last_turn_counts_where_that_is_asked(chatml: Any) -> None:
    record = conversations(3)[2]
    (document,) = documents(record, chatml, turns="last")
    assert counted(document, chatml) == [record["messages"][-1]["content"] + "<|im_end|>"]
    (document,) = documents(record, chatml)
    assert len(counted(document, chatml)) == 3


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]},
        {
            "prompt": [{"role": "user", "content": "a?"}],
            "completion": [{"role": "assistant", "content": "b"}],
        },
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a?"}]},
                {"role": "assistant", "content": "b"},
            ]
        },
    ],
)
def test_conversations_of_every_form_are_the_same(record: Any, chatml: Any) -> None:
    (document,) = documents(record, chatml)
    assert (
        chatml.decode(document.tokens)
        == "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    )
    assert counted(document, chatml) == ["b<|im_end|>"]


def test_tools_reach_the_template(chatml: Any) -> None:
    asked = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
    ]
    asked += [{"role": "tool", "content": "1"}, {"role": "assistant", "content": "b"}]
    for tools in ([{"name": "f"}], json.dumps([{"name": "f"}])):
        (document,) = documents({"messages": asked, "tools": tools}, chatml)
        assert 'Tools: [{"name": "f"}]' in chatml.decode(document.tokens)
        assert counted(document, chatml) == ["<|im_end|>", "b<|im_end|>"]


def test_a_template_that_leaves_out_what_was_said_is_refused() -> None:
    tokens = tokenizer(
        CHATML.replace("{{ message['content'] + '<|im_end|>' }}{% endif %}", "{{ '<|im_end|>' }}{% endif %}")
    )
    with pytest.raises(
        TaskError,
        match=r"here: expected the chat template to render the content of messages\[0\], got a text",
    ):
        documents(
            {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}, tokens
        )


def test_a_template_that_writes_earlier_turns_otherwise_is_refused_or_trained_on_its_last() -> None:
    tokens = tokenizer(FORGETS)
    asked = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "<think>hm</think>b"}]
    with pytest.raises(
        TaskError,
        match=r"here: expected the chat template to render messages\[1\] the same way .* Write turns: last",
    ):
        documents({"messages": asked * 2}, tokens)
    (document,) = documents({"messages": asked * 2}, tokens, turns="last")
    assert counted(document, tokens) == ["<think>hm</think>b<|im_end|>"]


def test_a_token_that_reaches_into_a_turn_counts(chatml: Any) -> None:
    tokens = tokenizer(
        CHATML.replace("assistant\\n' }}{% endif %}", "assistant: ' }}{% endif %}").replace(
            "message['role'] + '\\n' }}",
            "message['role'] + (': ' if message['role'] == 'assistant' else '\\n') }}",
        )
    )
    asked = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "What"}]
    (document,) = documents({"messages": asked}, tokens)
    assert counted(document, tokens) in (["What<|im_end|>"], [" What<|im_end|>"])


def test_a_conversation_may_begin_with_the_assistant(chatml: Any) -> None:
    asked = [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]
    (document,) = documents({"conversations": asked, "system": "You help."}, chatml)
    assert counted(document, chatml) == ["hi<|im_end|>", "b<|im_end|>"]
    assert chatml.decode(document.tokens).startswith("<|im_start|>system\nYou help.<|im_end|>")
    (document,) = documents({"conversations": asked}, chatml)
    assert counted(document, chatml) == ["hi<|im_end|>", "b<|im_end|>"]


@pytest.mark.parametrize("said", ["a", "assistant", ""])
def test_a_first_message_begins_after_its_header_whatever_it_says(said: str, chatml: Any) -> None:
    asked = [
        {"role": "assistant", "content": said},
        {"role": "user", "content": "b?"},
        {"role": "assistant", "content": "c"},
    ]
    (document,) = documents({"messages": asked}, chatml)
    assert counted(document, chatml) == [f"{said}<|im_end|>", "c<|im_end|>"]


def test_a_system_field_comes_first_in_prompts_too(chatml: Any) -> None:
    asked = {"system": "You help.", "prompt": [{"role": "user", "content": "a?"}]}
    (document,) = documents({**asked, "completion": [{"role": "assistant", "content": "b"}]}, chatml)
    assert chatml.decode(document.tokens).startswith("<|im_start|>system\nYou help.<|im_end|>")
    assert counted(document, chatml) == ["b<|im_end|>"]


def test_a_message_that_is_not_to_be_learnt_does_not_count(chatml: Any) -> None:
    asked = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "bad", "weight": 0}]
    asked += [{"role": "user", "content": "b?"}, {"role": "assistant", "content": "good", "weight": 1}]
    (document,) = documents({"messages": asked}, chatml)
    assert counted(document, chatml) == ["good<|im_end|>"]


def test_a_label_beside_text_is_a_classifiers() -> None:
    (document,) = documents({"text": "a", "label": 1}, Bytes())
    assert list(document.tokens) == [97, 256]


def test_text_is_tokenized_whole(chatml: Any) -> None:
    (document,) = documents({"prompt": "What is ", "completion": "15 and 3"}, chatml)
    assert list(document.tokens[:-1]) == chatml("What is 15 and 3", add_special_tokens=False)["input_ids"]
    assert counted(document, chatml)[0].strip() == "15 and 3<|end|>"


def test_nulls_that_arrow_puts_into_objects_are_left_out(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason=".[language] is not installed")
    from pyarrow.parquet import write_table

    calls = [{"name": "f", "arguments": {"city": "Paris"}}, {"name": "g", "arguments": {"x": 1}}]
    wanted = [{"messages": [{"role": "assistant", "tool_calls": [call]}], "text": None} for call in calls]
    write_table(pyarrow.Table.from_pylist(wanted), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == wanted


def test_validation_and_hidden_files_are_no_training_text(tmp_path: Path) -> None:
    for name in ("a.jsonl", "valid/b.jsonl", ".ipynb_checkpoints/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, [{"text": name}])
    assert read(tmp_path) == [{"text": "a.jsonl"}, {"text": "valid/b.jsonl"}]
    for left_out in (tmp_path / "valid", tmp_path / "valid" / "b.jsonl"):
        assert [record for record, _ in records(tmp_path, "", "text", [left_out])] == [{"text": "a.jsonl"}]


@pytest.mark.parametrize("begins", [True, False])
def test_text_begins_as_the_tokenizer_begins_it_and_ends_once(begins: bool) -> None:
    tokens = tokenizer(begins=begins)
    for text in ("some text", "some text<|end|>", *(["<s>some text"] if begins else [])):
        (document,) = documents({"text": text}, tokens)
        assert tokens.decode(document.tokens) == ("<s>" if begins else "") + "some text<|end|>"
    (document,) = documents({"question": "a", "answer": "b"}, tokens, Templates("{question}:", "{answer}"))
    assert tokens.decode(document.tokens) == ("<s>" if begins else "") + "a:b<|end|>"
    assert counted(document, tokens) == ["b<|end|>"]


IMAGE = [{"type": "image"}]
REFUSED: list[tuple[Any, str]] = [
    ({"messages": "hi"}, "the field 'messages' to be a list of messages, got text"),
    ({"messages": ["hi"]}, r"messages\[0\] to be an object with role and content, got text"),
    (
        {"messages": [{"role": "narrator", "content": "a"}]},
        r"messages\[0\] to have one of the roles system, .*; got 'narrator'",
    ),
    (
        {"messages": [{"role": "user", "content": None}]},
        r"the content of messages\[0\] to be text or a number, got null",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        r"expected parts of text alone in messages\[0\], got one of type 'image'",
    ),
    ({"text": None}, "the field 'text' to be text or a number, got null"),
    ({"text": ["a", "b"]}, "the field 'text' to be text or a number, got a list"),
    ({"text": {"a": 1}}, "the field 'text' to be text or a number, got an object"),
    ({"text": True}, "the field 'text' to be text or a number, got true"),
    ({"text": "\ud800"}, "the field 'text' to be text, got half of a surrogate pair"),
    ({"text": "a", "messages": []}, "expected one of the fields .*; got messages and text"),
    ({"text": float("nan")}, "the field 'text' to be text or a number, got a number"),
    ({"messages": []}, "expected at least one message, got none"),
    (
        {"prompt": "a", "completion": "b", "system": "c"},
        "expected no field 'system' beside a prompt that is text",
    ),
    ({"system": "a", "messages": [{"role": "system", "content": "b"}]}, "expected the system's message once"),
    (
        {"prompt": "a", "completion": "b", "label": False},
        "expected no field label beside prompt with completion",
    ),
    (
        {"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]},
        r"expected 'weight' of messages\[0\] to be 0 or 1",
    ),
    ({"question": "a"}, "expected one of the fields .*; got question. Write templates"),
    ({}, "expected one of the fields .*; got none"),
    ([1], "expected a JSON object, got a list"),
    (None, "expected a JSON object, got null"),
    ("text", "expected a JSON object, got text"),
]


@pytest.mark.parametrize(("record", "message"), REFUSED, ids=[json.dumps(record) for record, _ in REFUSED])
def test_what_is_not_understood_is_refused_at_its_place(record: Any, message: str, chatml: Any) -> None:
    with pytest.raises(TaskError, match=f"^here: .*{message}"):
        documents(record, chatml)


def test_all_that_is_not_understood_is_told_at_once() -> None:
    placed = [
        ({"text": "fine"} if number % 2 else {"text": None}, f"a.jsonl:{number}") for number in range(20)
    ]
    with pytest.raises(TaskError) as told:
        list(texts(placed, NONE, Bytes(), "all"))
    lines = str(told.value).splitlines()
    assert [line.split(": ")[0] for line in lines[:-1]] == [f"a.jsonl:{number}" for number in range(0, 10, 2)]
    assert lines[-1] == "... and 5 more"


@pytest.mark.parametrize(
    ("template", "record", "message"),
    [
        ("{answers[2]}", {"answers": ["a"]}, r"expected {answers\[2\]} of the template, but there is no '2'"),
        ("{meta[title]}", {"meta": {}}, r"expected {meta\[title\]} of the template"),
        ("{answers}", {"answers": ["a"]}, "expected the field 'answers' to be text or a number, got a list"),
        ("{a.__class__}", {"a": "b"}, "expected {a.__class__} of the template"),
        ("{a:d}", {"a": "b"}, "the template '{a:d}' cannot be filled"),
        ("{b}", {"a": "b"}, "expected the field 'b' of the template, got a"),
    ],
)
def test_a_template_takes_text_and_numbers_alone(template: str, record: Any, message: str) -> None:
    with pytest.raises(TaskError, match=f"^here: .*{message}"):
        documents(record, Bytes(), Templates("", template))


def test_a_template_reaches_into_records() -> None:
    record = {"answers": [{"text": "b"}], "n": 3, "meta": {"title": "t"}}
    (document,) = documents(record, Bytes(), Templates("", "{meta[title]}: {answers[0][text]} {n} {{}}"))
    assert Bytes().decode(list(document.tokens)) == "t: b 3 {}<end>"


@pytest.mark.parametrize("template", ["{}", "{0}", "{a"])
def test_a_template_names_its_fields(template: str) -> None:
    with pytest.raises(TaskError, match=r"space\.prompt: expected "):
        checked_template(template, "prompt")


# ---------------------------------------------------------------- files


def read(path: Path, files: str = "") -> list[Any]:
    return [record for record, _ in records(path, files, "text")]


def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    lines = [{"text": "one\u2028two\u0085three\x0c"}, {"text": "four"}]
    content = "\ufeff" + "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n"
    for kind in ("jsonl", "ndjson"):
        (tmp_path / f"a.{kind}").write_bytes(content.encode())
        assert read(tmp_path / f"a.{kind}") == lines


def test_every_kind_of_file_has_the_same_records(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason=".[language] is not installed")
    from pyarrow.parquet import write_table

    wanted = [{"question": f"what, {number}?", "answer": f'"{number}"\nindeed'} for number in range(5)]
    write_jsonl(tmp_path / "a.jsonl", wanted)
    (tmp_path / "a.json").write_text(json.dumps(wanted))
    rows = [["question", "answer"], *([one["question"], one["answer"]] for one in wanted)]
    (tmp_path / "a.csv").write_text(
        "\n".join(",".join(f'"{cell.replace(chr(34), chr(34) * 2)}"' for cell in row) for row in rows)
    )
    write_table(pyarrow.Table.from_pylist(wanted), tmp_path / "a.parquet")
    for kind in ("jsonl", "json", "csv", "parquet"):
        assert read(tmp_path / f"a.{kind}") == wanted
    assert read(tmp_path) == wanted * 4
    assert read(tmp_path, "*.csv") == wanted


def test_a_long_field_of_csv_is_read_and_others_limits_stay(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    (tmp_path / "a.csv").write_text(f"text\n{'a' * 200_000}\n")
    assert len(read(tmp_path / "a.csv")[0]["text"]) == 200_000
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": 1}\n{', "a.jsonl:2: expected a JSON object, got invalid JSON at column 2: "),
        ("a.json", '{"text": "a"}', "a.json: expected a JSON array of objects, got an object"),
        ("a.json", "text", "a.json: expected a JSON array of objects, got invalid JSON at column 1: "),
        (
            "a.csv",
            "a,b\n1\n",
            "a.csv:2: expected 2 fields, as in the header, got 1. Quote those with commas.",
        ),
        ("a.csv", 'a,b\n"1,2\n', "a.csv:1: expected CSV with a header: unexpected end of data"),
        ("a.parquet", "PAR", "a.parquet cannot be read as Parquet"),
        ("a.txt", b"\xff\xfe", "a.txt cannot be read as text"),
        (
            "a.tsv",
            "a\tb",
            "expected a file that ends in .txt, .jsonl, .ndjson, .json, .csv, .parquet, got a.tsv. To read it as plain",
        ),
        ("A.JSONL", "{", "A.JSONL:1: expected a JSON object, got invalid JSON at column 2"),
        ("a.json", "[" * 100_000, "a.json: expected a JSON array of objects"),
    ],
)
def test_a_file_that_is_not_what_it_is_called_is_told(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TaskError) as told:
        read(tmp_path / name)
    assert message in str(told.value)


# ---------------------------------------------------------------- rows and validation

some = st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=20).map(
    lambda found: [Document(list(range(len(counts))), counts) for counts in found]
)


@given(some, st.integers(2, 20), st.sampled_from(["split", "drop", "cut_prompt"]))
def test_every_document_is_accounted_for(docs: list[Document], length: int, too_long: TooLong) -> None:
    made, fate = fitted(docs, length, too_long)
    assert all(len(one.tokens) <= length and one.counted for one in made)
    assert fate.documents == len(docs)
    assert fate.longer == sum(len(one.tokens) > length for one in docs)
    assert (
        fate.counted
        == sum(one.counted for one in made)
        == int((pack(made, length).labels >= 0).sum() if made else 0)
    )
    if too_long == "split":
        assert fate.counted == sum(one.counted for one in docs)  # none is lost
        assert not fate.left_out
    else:
        assert len(made) == len(docs) - fate.left_out - fate.silent
    if too_long == "cut_prompt":  # an answer is whole, or not there
        for one in made:
            assert any(one.counted == whole.counted and one.tokens[-1] == whole.tokens[-1] for whole in docs)


def test_a_prompt_as_long_as_the_row_is_said_or_cut() -> None:
    docs = [Document(range(10), [False] * 8 + [True] * 2), Document(range(4), [False] * 2 + [True] * 2)]
    assert fitted(docs, 6, "split")[1] == Fate(2, 9, 4, longer=1, silent=1)
    made, fate = fitted(docs, 6, "cut_prompt")
    assert [list(one.tokens) for one in made] == [[4, 5, 6, 7, 8, 9], [0, 1, 2, 3]]
    assert fate == Fate(2, 10, 4, longer=1)
    assert fitted(docs, 6, "drop")[1] == Fate(2, 4, 2, longer=1, left_out=1)


def test_a_share_for_validation_follows_the_text_and_nothing_else() -> None:
    made = [Text(((f"document {number % 400}", True),)) for number in range(800)]
    train, validation = held_out(made, 0.2)
    assert not {one.whole for one in train} & {one.whole for one in validation}
    assert 0.14 < len(validation) / 800 < 0.26
    random.Random(0).shuffle(made)
    again = held_out(made[:600], 0.2)[1]
    assert {one.whole for one in again} <= {one.whole for one in validation}
