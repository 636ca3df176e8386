"""Where a study is kept: what is shown of its URL, where a secret one is read from, what lies on a network."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path, PurePath

import pytest
from bsearch.cli import main
from bsearch.search.store import database as database_module
from bsearch.search.store.database import storage_engine
from bsearch.search.store.tables import Tables
from bsearch.search.store.url import shown_url
from bsearch.search.suggest.optuna.database import open_storage
from bsearch.spaces.boundary.secrets import HARMLESS, masked
from bsearch.spaces.boundary.storage import network_file_system, sqlite_parts, sqlite_url, storage_of
from bsearch.spaces.errors import StudyFileError
from click.testing import CliRunner
from conftest import TASKS
from helpers import bsearch
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError


@given(
    st.lists(
        st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=30),
        min_size=1,
    )
)
@example(["what?1", "My%20Project", "a#b", "ann:x@host", ":memory:", "caf\udce9"])
def test_a_path_comes_back_from_its_url_and_nothing_in_it_looks_like_a_password(names: list[str]) -> None:
    path = f"/{'/'.join(names)}/study.db"
    url = sqlite_url(path)
    assert sqlite_parts(url) == (path, "sqlite", "")
    assert sqlite_url(*sqlite_parts(url)) == masked(url) == url


def test_an_engine_opens_the_file_whatever_its_folder_is_called(tmp_path: Path) -> None:
    for name in ("what?1", "My%20Project", "caf\udce9"):
        file = tmp_path / name / "study.db"
        storage_engine(sqlite_url(file)).connect().close()
        storage_engine(sqlite_url(file), create=False).connect().close()
        assert file.exists()


MOUNTS = r"""
/dev/vda / ext4 rw,relatime 0 0
proc /proc proc rw 0 0
server:/home /home nfs4 rw,vers=4.2 0 0
/dev/sdb1 /home/ann/fast xfs rw 0 0
//nas/share /mnt/two\040words cifs rw 0 0
scratch@tcp:/fs /scratch lustre rw 0 0
/dev/sdc1 /scratch/local ext4 rw 0 0
fuse-overlayfs /var/containers fuse.fuse-overlayfs rw 0 0
ann@host: /mnt/over fuse.sshfs rw 0 0
/dev/sdd1 /mnt/hidden ext4 rw 0 0
server:/hidden /mnt/hidden nfs rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/", None),
        ("/work/study", None),
        ("/home", "nfs4"),
        ("/home/ann/study", "nfs4"),
        ("/home/ann/fast/study", None),
        ("/homeless", None),
        ("/mnt/two words/study", "cifs"),
        ("/scratch/ann", "lustre"),
        ("/scratch/local/ann", None),
        ("/var/containers/x", None),
        ("/mnt/over", "fuse.sshfs"),
        ("/mnt/hidden/x", "nfs"),
    ],
)
def test_the_longest_mount_point_says_what_a_folder_lies_on(folder: str, kind: str | None) -> None:
    assert network_file_system(MOUNTS, PurePath(folder)) == kind
    # What is mounted later nearer to the root hides none of them.
    assert network_file_system(f"{MOUNTS}tmpfs / tmpfs rw 0 0\n", PurePath(folder)) == kind


def test_no_mounts_are_no_network() -> None:
    assert network_file_system("", PurePath("/home")) is None
    assert network_file_system("nonsense\n\n", PurePath("/home")) is None


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("postgresql+psycopg://u:s3cret@h/d", "postgresql+psycopg://u:***@h/d"),
        ("postgresql://u:s3cret@h:5432/d?sslmode=require", "postgresql://u:***@h:5432/d?sslmode=require"),
        ("postgresql://:s3cret@h/d", "postgresql://:***@h/d"),
        ("postgresql://u@h/d?password=s3cret&x=1", "postgresql://u@h/d?password=***&x=***"),
        ("postgresql://u@h/d?x=1&SSLPassword=s3cret", "postgresql://u@h/d?x=***&SSLPassword=***"),
        ("postgresql://u:s3cr@et/s3cret@h/d", "postgresql://u:***@h/d"),
        ("postgresql:u:s3cret@h/d", "postgresql:u:***@h/d"),
        ("postgresql//u:s3cret@h/d", "postgresql//u:***@h/d"),
        ("could not open postgresql://u:s3cret@h/d, see a@b", "could not open postgresql://u:***@b"),
        ("postgresql://u:two s3cret@h/d", "postgresql://u:***@h/d"),
        ("https://s3cret@h/x and http://u:s3cret@h", "https://***@h/x and http://u:***@h"),
        ("http://127.0.0.1:5000/x, see a@b", "http://127.0.0.1:5000/x, see a@b"),
        ("host=h password='s3 cret' user=u", "host=h password=*** user=u"),
        ("{'api_key': 's3cret', \"token\": \"s3cret\"}", "{'api_key': ***, \"token\": ***}"),
        ("AccountKey=s3cret;x=1&sig=s3cret", "AccountKey=***;x=1&sig=***"),
        ("Authorization: Bearer s3crets3cret", "Authorization: Bearer ***"),
        ("pad_token='<pad>', max_tokens=5", "pad_token='<pad>', max_tokens=5"),
        (
            "a token representation of a basic configuration",
            "a token representation of a basic configuration",
        ),
        ("passes=3, db_pass=s3cret", "passes=3, db_pass=***"),
        ("postgresql://u@corp:s3cret@h/d", "postgresql://u@corp:***@h/d"),
        ("postgresql://u:@h/d", "postgresql://u:***@h/d"),
        ("mssql://u@h/d?pwd=s3cret&client_secret=s3cret", "mssql://u@h/d?pwd=***&client_secret=***"),
        ("got 'postgresql://u@h/d?token=s3cret' and a = b", "got 'postgresql://u@h/d?token=***' and a = b"),
        ("postgresql://u@h/d?token=s3cret and a = b", "postgresql://u@h/d?token=*** and a = b"),
        ("postgresql://u@h/d", "postgresql://u@h/d"),
        (
            "12 runs of optuna:sqlite:///x.db?uri=true&cipher=s3cret#s, or",
            "12 runs of optuna:sqlite:///x.db?uri=true&cipher=***, or",
        ),
        ("db:\n  password: s3cret\n  api_key: s3cret", "db:\n  password: ***\n  api_key: ***"),
        ("key: expected a number", "key: expected a number"),
        (
            "python train.py --token=s3cret --password s3cret --lr 1",
            "python train.py --token=*** --password *** --lr 1",
        ),
        ("train.py --hub_token=s3cret --hf-tokenizer t5", "train.py --hub_token=*** --hf-tokenizer t5"),
        ("sqlite:////home/ann/a:b@c/study.db", "sqlite:////home/ann/a:b@c/study.db"),
        (
            "study.yaml:9: space.rule: expected linear, got 'a@b'",
            "study.yaml:9: space.rule: expected linear, got 'a@b'",
        ),
    ],
)
def test_no_password_is_shown(written: str, shown: str) -> None:
    assert masked(written) == shown
    assert masked(shown) == shown


_parts = st.text("ab@:%/.?=&", max_size=6)


@given(_parts, _parts, _parts)
@example("ann@corp", "", "h/d")
def test_what_the_parser_takes_for_a_password_is_not_shown(user: str, password: str, rest: str) -> None:
    url = f"postgresql://{user}:s3cret{password}@{rest}"
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return
    if "s3cret" in (parsed.password or ""):
        assert "s3cret" not in masked(url)
        assert "s3cret" not in shown_url(url)


@given(
    st.builds(
        URL.create,
        st.sampled_from(["postgresql+psycopg", "mysql", "sqlite", "x+y"]),
        st.none() | st.text(max_size=5),
        st.text(max_size=5).map(lambda text: text + "s3cret"),
        st.none() | st.from_regex(r"[a-z0-9.]{1,9}", fullmatch=True),
        st.none() | st.integers(1, 65535),
        st.none() | st.text("abc/.", max_size=5),
        # A key that is known to be harmless, such as `cache`, which these letters can spell, is shown with its value.
        st.dictionaries(
            st.text("abcehkpstuy_=", min_size=1, max_size=8).filter(lambda key: key not in HARMLESS),
            st.just("s3cret"),
            max_size=2,
        ),
    )
)
def test_only_what_is_known_to_be_harmless_is_shown(parsed: URL) -> None:
    shown = shown_url(parsed.render_as_string(hide_password=False))
    assert "s3cret" not in shown
    assert make_url(shown).database == make_url(parsed.render_as_string(hide_password=False)).database


def test_a_url_is_shown_as_it_was_written_where_it_has_no_secret() -> None:
    for url in (
        "sqlite:///a b?.db",
        "sqlite:////x.db?mode=ro",
        "postgresql://ann@corp@h:1/d?sslmode=require",
        "mysql://h/d",
    ):
        assert shown_url(url) == url
    assert shown_url("https://s3cret@h/x?a=1") == "https://***@h/x?a=***"
    assert shown_url("https://s3cret@h/x") == "https://***@h/x"
    assert shown_url("postgresql:u:s3cret@h/d") == "postgresql:***@h/d"
    assert (
        shown_url("postgresql://u:s3cret\nx@h/d?host=a&key=s3cret") == "postgresql://u:***@h/d?host=a&key=***"
    )


def test_a_password_with_an_unescaped_at_is_told_how_to_be_written() -> None:
    with pytest.raises(
        StudyFileError, match=r"a password with @ written as %40.*got 'postgresql\+psycopg://u:\*\*\*@h/d'"
    ):
        Tables("postgresql+psycopg://u:s3cr@et@h/d")


def test_the_storage_may_be_named_by_a_file(tmp_path: Path, study_file: Callable[..., Path]) -> None:
    secret = tmp_path / "secret"
    secret.write_text(f"sqlite:///{tmp_path}/hidden.db\n")
    given = {"BSEARCH_STORAGE_FILE": str(secret)}
    assert storage_of({}) is None
    assert storage_of(given) == f"sqlite:///{tmp_path}/hidden.db"
    assert storage_of(given | {"BSEARCH_STORAGE": "sqlite:///first.db"}) == "sqlite:///first.db"
    path = study_file(task=f"{TASKS}:Points", budget={"trials": 1})
    result = CliRunner().invoke(main, ["run", str(path), "--serial"], env=given)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "hidden.db").exists()
    assert not (tmp_path / "small.db").exists()


@pytest.mark.parametrize("content", [None, "", "one two", b"\xff"])
def test_a_storage_file_that_says_nothing_is_refused(content: str | bytes | None, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    if content is not None:
        secret.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = CliRunner().invoke(main, ["show", "study.yaml"], env={"BSEARCH_STORAGE_FILE": str(secret)})
    assert (result.exit_code, f"BSEARCH_STORAGE_FILE: {secret}: " in result.output) == (2, True)


def test_on_a_network_file_system_sqlite_keeps_a_rollback_journal_and_the_user_is_warned_once(
    study_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = study_file(task=f"{TASKS}:Points", budget={"trials": 2})
    arguments = ["run", str(path), "--serial"]
    assert "network file system" not in bsearch(*arguments, "--trials", "1").output
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nserver:/x {tmp_path.resolve()} nfs4 rw 0 0\n")
    monkeypatch.setattr(database_module, "MOUNTS", mounts)
    result = bsearch(*arguments)
    assert result.exit_code == 0, result.output
    assert result.output.count("network file system (nfs4)") == 1
    assert not (tmp_path / "small.db-wal").exists()
    url = f"sqlite:///{tmp_path}/small.db"
    for engine in (Tables(url).engine, open_storage(url).engine):  # type: ignore[attr-defined]
        with engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "delete"
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    with closing(sqlite3.connect(tmp_path / "small.db")) as connection, connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_a_folder_with_braces_is_no_template(study_file: Callable[..., Path], tmp_path: Path) -> None:
    path = study_file(task=f"{TASKS}:Points", budget={"trials": 1}, storage="sqlite:///{x}/small.db")
    assert bsearch("run", path, "--serial").exit_code == 0
    assert (tmp_path / "{x}" / "small.db").exists()
