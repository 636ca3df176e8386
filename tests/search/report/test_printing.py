"""Printing cannot fail, whatever the stream."""

from __future__ import annotations

import io

import pytest
from bsearch.search.report.stdio.console import say, terminal
from bsearch.search.report.stdio.streams import ReaderGoneError, Steady
from bsearch.search.report.terminal.plot import scatter


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


class Unread(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "koi8-r", "utf-8", "utf-16"])
def test_any_text_is_printed_in_any_encoding(encoding: str) -> None:
    taken = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    stream = Steady(taken)
    stream.write("caf\udce9 \u6279 µs\n")
    stream.flush()
    assert stream.lost is None
    assert taken.buffer.getvalue().decode(encoding).endswith("s\n")  # type: ignore[attr-defined]


def test_a_plot_keeps_its_columns_in_ascii() -> None:
    plot = scatter({"o": [(1, 0.5), (10, 2.0)]}, width=40, height=8, x_label="s", y_label="loss")
    taken = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Steady(taken).write(plot)
    taken.flush()
    lines = taken.buffer.getvalue().decode().splitlines()  # type: ignore[attr-defined]
    assert [len(line) for line in lines] == [len(line) for line in plot.splitlines()]


def test_a_full_disk_is_kept_and_a_reader_that_is_gone_ends_only_what_waits_for_it() -> None:
    full, unread = Steady(Full()), Steady(Unread())
    full.write("x")
    unread.write("x")
    assert isinstance(full.lost, OSError)
    assert isinstance(unread.lost, BrokenPipeError)
    followed = Steady(Unread())
    followed.ends = True
    with pytest.raises(ReaderGoneError):
        followed.write("x")


def test_code_is_printed_as_it_is_and_a_line_to_people_has_no_password(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Secrets are masked where they enter a message: a traceback's `key=k` is none."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    terminal().print("attention(query=q, key=k), key=4 [red]:smile:")
    say("cannot open postgresql://ann:s3cret@db/studies\x1b[31m")
    assert (
        capsys.readouterr().out
        == "attention(query=q, key=k), key=4 [red]:smile:\ncannot open postgresql://ann:***@db/studies\\x1b[31m\n"
    )
