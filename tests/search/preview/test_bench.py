"""`bsearch profile --batches`: differences are told from noise, and every size is timed as it is asked for."""

from __future__ import annotations

import json
import random

import pytest
from bsearch.cli import main
from bsearch.search.preview import bench
from bsearch.search.preview.bench import differences, sizes_of
from bsearch.spaces.errors import StudyFileError
from click.testing import CliRunner
from conftest import TASKS


def test_sizes_are_read_as_people_write_them() -> None:
    assert sizes_of("around:128") == [100, 127, 128, 129, 156]
    assert sizes_of("513, 511,512,511") == [511, 512, 513]
    assert sizes_of("around:1") == [1, 2]
    for wrong in ("", "0", "12x", "around:", "1.5", "-3"):
        with pytest.raises(StudyFileError, match="expected integers >= 1 or around:N"):
            sizes_of(wrong)


def timed(rng: random.Random, factor: float, rounds: int = 8) -> list[float]:
    return [factor * load * rng.lognormvariate(0, 0.02) for load in ([1.0, 1.4, 1.1, 2.0] * rounds)[:rounds]]


def test_noise_is_called_a_difference_in_one_of_twenty_benches_at_most() -> None:
    """Four comparisons of equals a bench: without care for their number every fifth bench would find one."""
    rng = random.Random(0)
    pairs = [(127, 128), (129, 128), (511, 512), (513, 512)]
    found = 0
    for _ in range(400):
        # Rounds share their load, so only a size's own noise is left in a pair.
        figures = {
            size: [a / b for a, b in zip(timed(rng, 1.0), timed(rng, 1.0), strict=True)] for pair in pairs for size in pair
        }
        found += any(one.real for one in differences(figures, pairs))
    assert found / 400 < 0.09


def test_a_true_difference_of_five_per_cent_is_found_under_load() -> None:
    rng = random.Random(1)
    loads = [1.0, 1.4, 1.1, 2.0, 1.0, 1.2, 1.9, 1.3]
    figures = {
        size: [factor * load * rng.lognormvariate(0, 0.01) for load in loads] for size, factor in ((127, 1.0), (128, 1.05))
    }
    (one,) = differences(figures, [(128, 127)])
    assert one.real
    assert one.low < 0.05 < one.high
    assert "% slower per sample" in one.sentence()


@pytest.mark.long
@pytest.mark.slow
def test_every_size_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ROUNDS", 3)
    arguments = ["profile", f"{TASKS}:NeedsTwo", "--batches", "1,31,32,33,70", "--set", "memory.limit=20KiB"]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    rows = {row["size"]: row for row in document["rows"]}
    assert list(rows) == [31, 32, 33, 70]  # one sample is no batch for BatchNorm
    fits = document["largest_micro_batch"]
    for size, row in rows.items():
        assert row["accumulation"] == -(-size // fits)
        assert row["micro_batch"] <= fits
        assert row["peak_bytes"] <= 20 * 1024
        for key in ("epoch_s", "inference_s", "samples_per_s"):
            assert row[key]["mean"] > 0
    assert [(one["size"], one["against"]) for one in document["differences"]] == [(31, 32), (33, 32)]
    assert document["rounds"] == 3
    result = CliRunner().invoke(main, [*arguments, "--set", "devices.per_trial=2"])
    assert result.exit_code == 0, result.output
    assert "31 against 32: " in result.output
    assert "Near powers of two: " in result.output
    assert "The largest micro-batch that fits 20.0 KiB: " in result.output


def test_sizes_that_cannot_be_timed_are_refused_in_words() -> None:
    runner = CliRunner()
    nothing = runner.invoke(main, ["profile", f"{TASKS}:NeedsTwo", "--batches", "1"])
    assert (nothing.exit_code, "expected sizes that can be planned, got [1]" in nothing.output) == (2, True)
    generator = runner.invoke(main, ["profile", f"{TASKS}:own_loop", "--batches", "8"])
    assert (generator.exit_code, "got a generator" in generator.output) == (2, True)
    memory = runner.invoke(main, ["profile", f"{TASKS}:Points", "--batches", "8", "--set", "memory.limit=much"])
    assert (memory.exit_code, "memory.limit: expected bytes such as 10GiB" in memory.output) == (2, True)
    for size in ("64,128", "401"):
        large = runner.invoke(main, ["profile", f"{TASKS}:RaisesLarge", "--batches", size])
        assert large.exit_code == 2
        assert ("failed: ValueError: too many (" if size != "401" else "at most the training set's 400") in large.output
    unread = runner.invoke(main, ["profile", f"{TASKS}:Points", "--batches", "8", "--set", "space.widht=3"])
    assert (unread.exit_code, "it never read widht" in unread.output) == (2, True)
    setting = runner.invoke(main, ["profile", f"{TASKS}:Points", "--batches", "8", "--set", "width"])
    assert (setting.exit_code, "expected SECTION.KEY=VALUE such as training.precision=bf16, got 'width'" in setting.output) == (
        2,
        True,
    )
