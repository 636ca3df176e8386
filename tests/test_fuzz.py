"""Whatever others wrote is read to its end or refused in words: no traceback, no write, nothing a terminal would obey."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from bsearch.cli import main
from bsearch.objectives.task_code import task_code_hash
from bsearch.search.analysis.retime import read_profile
from bsearch.spaces.errors import BsearchError, ProfilingError, StudyFileError, plain
from bsearch.spaces.laws.device import DeviceProfile
from bsearch.spaces.laws.step_time import StepTime, TimedPlan
from bsearch.spaces.plan import BatchPlan, plan_batch
from bsearch.spaces.study.file import read_study
from bsearch.spaces.study.spec import StudySpec
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parent.parent
# No task is found, so what passes the reader trains nothing.
TEXTS = [
    re.sub(r"(?m)^task: \S+", "task: nowhere.py:Mine", path.read_text())
    for path in sorted([*ROOT.glob("examples/*.yaml"), ROOT / "objectives" / "starter" / "study.yaml"])
]


def fuzz(examples: int) -> settings:
    """Cases enough to have found what is mended by now, and few enough to wait for; BSEARCH_FUZZ=20 tries 20 times as many."""
    return settings(
        max_examples=examples * int(os.environ.get("BSEARCH_FUZZ", "1")),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


# What code does to the world outside, as Python itself tells it: an audit hook stays for ever, so it is switched.
_watched: list[str] | None = None
_WRITES = {
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.truncate",
    "os.chmod",
    "shutil.rmtree",
}
_WRITES |= {
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "socket.connect",
    "sqlite3.connect",
}


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is None:
        return
    path = str(arguments[0]) if arguments else ""
    writes = event in _WRITES
    if event == "open":
        flags = arguments[2] if isinstance(arguments[2], int) else 0
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    if writes and "__pycache__" not in path:
        _watched.append(f"{event} {path}")
        raise RuntimeError(f"the test forbids {event} {path}")


sys.addaudithook(_hook)


@contextmanager
def no_writes() -> Iterator[None]:
    """Nothing is written, started or called up inside; what tries is stopped."""
    global _watched
    _watched = []
    try:
        yield
        assert _watched == []
    finally:
        _watched = None


def bsearch(*arguments: str, exits: tuple[int, ...] = (1, 2)) -> str:
    """What a command printed: it refused in words, and wrote nothing."""
    with no_writes():
        result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code in exits, result.output
    assert "Traceback" not in result.output
    assert "internal error" not in result.output
    assert plain(result.output) == result.output
    return result.output


def read(path: Path) -> None:
    with no_writes():
        try:
            spec = read_study(path)
            task_code_hash(spec.task)
        except BsearchError as error:
            assert plain(str(error)) == str(error) != ""
            assert len(str(error)) < 300_000


@pytest.fixture(scope="module", autouse=True)
def _everything_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """So that no import is taken for what was asked."""
    path = tmp_path_factory.mktemp("first") / "study.yaml"
    path.write_text(TEXTS[0])
    for arguments in (
        ["check", path],
        ["run", path, "--serial"],
        ["show", path],
        ["check", "--schema"],
    ):
        CliRunner().invoke(main, list(map(str, arguments)))


_SPLICES = [
    "&a ",
    "*a",
    "<<: ",
    "!!python/name:os.system ",
    "\x00",
    "\x1b[2J",
    "\u202e",
    "- ",
    "{",
    "}",
    "[",
    "]",
    ": ",
    "\n",
    "  ",
]
_SPLICES += [
    "'",
    '"',
    "|",
    ">",
    "%",
    "~",
    ".nan",
    "-.inf",
    "1e999",
    "9" * 30,
    "../" * 5,
    "/dev/zero",
    "\u00e9",
    "\ud7ff",
    "?",
    "!",
    "---\n",
]


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A study file that runs, with a few places cut out, said twice or written over."""
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(text)))
        end = min(at + draw(st.integers(0, 40)), len(text))
        text = text[:at] + draw(st.sampled_from(["", text[at:end] * 2, *_SPLICES])) + text[end:]
    return text


@fuzz(300)
@given(st.binary(max_size=400) | mutated().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_no_bytes_are_more_than_a_study_or_a_message(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study.yaml"
        path.write_bytes(content)
        read(path)


_words = st.text(max_size=12) | st.sampled_from(
    [
        "../../up",
        "~nobody-of-that-name/x",
        "~",
        "\x00",
        "\x1b[31mred\x1b[0m",
        "\x9b2J",
        "a\nb",
        "\u202egnp",
        "[red]",
        "[/x]",
        "=1+1",
        "x" * 3000,
        "nowhere.py:Mine",
        "a..b:C",
        "sqlite:///x.db",
        "sqlite:///\x00",
        "://",
        "90%",
        "1.2.3%",
        "10GiB",
        "9" * 400 + "GiB",
        "auto",
        "1e5",
    ]
)
_wild = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, 10**400, -1, 0])
    | st.floats()
    | _words,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            _words | st.sampled_from(["low", "high", "choices", "value", "log", "at_batch"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


def _sections() -> dict[str, list[str]]:
    """Keys of the schema, by section, and those of no section."""
    schema = StudySpec.model_json_schema()
    found: dict[str, list[str]] = {}
    for key, about in schema["properties"].items():
        names = re.findall(r"#/\$defs/(\w+)", json.dumps(about))
        found[key] = sorted({name for one in names for name in schema["$defs"][one].get("properties", {})})
    return found


SECTIONS = _sections()


@st.composite
def with_wild_values(draw: st.DrawFn) -> dict[str, Any]:
    """A study of right keys, some of whose values nobody meant."""
    study: dict[str, Any] = yaml.safe_load(draw(st.sampled_from(TEXTS)))
    study["space"]["reference_rate"] = {"low": 0.01, "high": 0.1}
    for _ in range(draw(st.integers(1, 4))):
        key = draw(st.sampled_from(sorted(SECTIONS)))
        inner = SECTIONS[key]
        if inner and draw(st.booleans()):
            section = study.get(key) if isinstance(study.get(key), dict) else {}
            study[key] = {**section, draw(st.sampled_from(inner) | _words): draw(_wild)}
        elif key != "task" or draw(st.booleans()):
            study[key] = draw(_wild)
    return study


@fuzz(120)
@given(with_wild_values(), st.booleans())
def test_no_value_of_a_study_passes_check_and_run_but_as_a_message(study: dict[str, Any], runs: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study" / "study.yaml"
        path.parent.mkdir()
        path.write_text(json.dumps(study))  # all of JSON is YAML
        read(path)
        bsearch(*(["run", str(path), "--serial"] if runs else ["check", str(path)]))
        assert os.listdir(folder) == ["study"]
        assert os.listdir(path.parent) == ["study.yaml"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n" * 250_000, ":10000: expected at most 10000 keys and values"),
        ("a: " + "[" * 500_000, ":1: expected at most 32 levels of nesting"),
        ("study: x\nspace: &a {b: [*a]}\n", ":2: expected no recursive alias, got 'a' inside itself"),
        ("a: &a\n  <<: *a\n", ":2: expected no recursive alias, got 'a' inside itself"),
        ("study: x\ntask: " + "9" * 100_000, ":2: expected a 64-bit integer, got '999"),
        (
            "a: !!python/object/apply:os.system [ls]",
            ":1: expected plain values, got the tag 'tag:yaml.org,2002:python/",
        ),
        ("a: !!binary aGVsbG8=", ":1: expected plain values, got the tag 'tag:yaml.org,2002:binary'"),
        ("study: x\n!!bool maybe: 1", ":2: expected true or false, got 'maybe'"),
        ("? [a, b]\n: 1", ":1: invalid YAML: found unhashable key"),
        ("a: \x00", ": invalid YAML: unacceptable character #x0000"),
        ('"\\e[2J\\n": 1', r":1: \x1b[2J\n: unknown key"),
        ("", ":1: expected keys such as study, task and space"),
    ],
)
def test_what_would_keep_us_busy_is_refused_where_it_stands(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(text)
    assert f"{path}{message}" in bsearch("check", str(path))


def test_aliases_and_merge_keys_stand_for_what_they_name(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    text = (
        "\ufeffstudy: x\ntask: a.py:B\nspace:\n  effective_batch: &b {low: 1, high: 9}\n  "
        "reference_rate: {<<: *b, high: %d}\n"
    )
    path.write_text(text % 8)
    assert (read_study(path).space.reference_rate.low, read_study(path).space.reference_rate.high) == (1, 8)
    path.write_text(text % 0)
    with pytest.raises(
        StudyFileError, match=r":5: space.reference_rate: expected low <= high, got low 1 and high 0"
    ):
        read_study(path)


@pytest.mark.parametrize("what", ["folder", "pipe", "/dev/zero", "/dev/stdin", "loop"])
@pytest.mark.parametrize("command", [["check"], ["run"], ["show"], ["ask"]])
def test_what_is_no_plain_file_is_not_read(tmp_path: Path, what: str, command: list[str]) -> None:
    path = tmp_path / "study.yaml"
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "loop":
        path.symlink_to(path)
    else:
        path.symlink_to(what)
    assert re.search(
        "expected a (study file|profile), got a (folder|pipe)|expected a folder that holds runs|cannot be read",
        bsearch(*command, str(path)),
    )


def _profile() -> dict[str, Any]:
    timed = (TimedPlan(BatchPlan(8), (0.1, 0.2)), TimedPlan(BatchPlan(64), (0.5, 0.6)))
    law = StepTime(((8, 0.1), (64, 0.5)), 0.01, misfit=(0.1, 0.2), timed=timed)
    profile = DeviceProfile(
        "cpu", "a device", 1000, step_times=(law,), largest_micro_batch=64, other_costs=(("width", 3, 1.5),)
    )
    one = {"parameters": {"width": 8}, "profile": profile.to_dict()}
    document = {"device": "a device", "task": {"name": "Mine"}, "training": {}, "profiles": [one]}
    return json.loads(json.dumps(document))  # type: ignore[no-any-return]


def broken(value: Any, place: str = "") -> Iterator[str]:
    """Write each part of a document over with one of another kind, in turn, and say where it stands."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        inner, was = f"{place}[{key}]" if isinstance(key, int) else f"{place}.{key}", value[key]
        value[key] = [{}]
        yield inner
        value[key] = was
        yield from broken(was, inner)


def test_a_part_of_a_profile_that_is_of_another_kind_is_refused_where_it_stands(tmp_path: Path) -> None:
    document, path = _profile(), tmp_path / "profile.json"
    for place in broken(document):
        path.write_text(json.dumps(document))
        if place != ".task.name":  # which is only compared
            with pytest.raises(StudyFileError) as caught:
                read_profile(path)
            whole, first, *_ = str(caught.value).splitlines()
            assert whole == f"{path}: expected what `bsearch profile STUDY --out FILE` writes"
            assert first.startswith(f"{path}: {place[1:]}")
            assert first.endswith((", got [{}]", ", got {}", ": field required"))
        if place.startswith(stored := ".profiles[0].profile."):
            with pytest.raises(ProfilingError, match=rf"device profile: {place.removeprefix(stored)[:5]}"):
                DeviceProfile.from_dict(document["profiles"][0]["profile"])


@st.composite
def wild_profiles(draw: st.DrawFn) -> Any:
    """A profile with a few of its values, at any depth, written over or left out."""
    document = {"": _profile()}
    for _ in range(draw(st.integers(1, 3))):
        here: Any = document
        while True:
            key = draw(st.sampled_from(sorted(here) if isinstance(here, dict) else range(len(here))))
            if not isinstance(here[key], dict | list) or not here[key] or draw(st.integers(0, 7)) == 0:
                break
            here = here[key]
        if isinstance(here, dict) and here is not document and draw(st.integers(0, 3)) == 0:
            del here[key]
        else:
            here[key] = draw(_wild)
        if not isinstance(document[""], dict):
            break
    return document[""]


@pytest.mark.slow
@fuzz(150)
@given(wild_profiles(), st.integers(1, 100))
def test_no_profile_ends_in_a_traceback(document: Any, batch: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_text(json.dumps(document))
        try:
            device = read_profile(path)
            for _, profile in device.profiles:  # what is accepted can be used
                if (law := profile.step_time(1)) is not None:
                    law.step_s(plan_batch(batch, devices=1, largest_micro_batch=profile.cap_on(1, batch)))
        except BsearchError as error:
            assert not isinstance(error, StudyFileError) or plain(str(error)) == str(error)


_options = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12
) | st.from_regex(r"[0-9e.+\-:@,x_ ]{1,12}", fullmatch=True)
_options |= st.sampled_from(
    [
        "9" * 5000,
        "around:" + "9" * 400,
        "1:2@3@4",
        "nan",
        "inf:1",
        "\u00b2",
        "1_0",
        "a=[",
        "a=!!python/none x",
        "a=*b",
    ]
)


@fuzz(120)
@given(st.sampled_from(["--batches", "--rate", "--set", "--trials"]), _options)
def test_no_option_of_run_ends_in_a_traceback(option: str, value: str) -> None:
    given_options = {"--batches": "8:16", "--rate": "1e-3:1", option: value}
    bsearch("run", "nowhere.py:Mine", "--serial", *(part for pair in given_options.items() for part in pair))


_urls = st.builds(
    "{}://{}".format,
    st.sampled_from(
        [
            "sqlite",
            "sqlite+pysqlite",
            "sqlite+aiosqlite",
            "sqlite+nothing",
            "nothing",
            "",
            "[",
            "\u00e9",
            "postgresql+nothing",
        ]
    ),
    _options
    | st.sampled_from(
        [
            "/\x1b[2J.db",
            "///etc",
            "//" + "x" * 300,
            "/x.db?mode=\x07",
            "u:p@h:port/d",
            "u:sec:ret@[::1",
            "?a=b&a=c",
            "/:memory:",
        ]
    ),
)


@fuzz(120)
@given(_urls)
def test_no_url_is_opened_that_holds_no_database(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        before = os.getcwd()
        os.chdir(folder)
        try:
            assert "sec:ret" not in bsearch("show", "--", url)
        finally:
            os.chdir(before)
        assert os.listdir(folder) == []
