"""The public benchmark: it resumes, its simulated clocks add up, peers answer by lines, and the page says what the rows say."""

import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "benchmarks", ROOT / "benchmarks" / "public")


@pytest.fixture(scope="module")
def benchmark() -> Iterator[SimpleNamespace]:
    """The benchmark's modules, which are imported by their bare names."""
    verbosity, before, path = optuna.logging.get_verbosity(), set(sys.modules), sys.path[:]
    sys.path[:0] = map(str, FOLDERS)
    import page
    import problems
    import run
    import searchers
    import simulation
    import table

    yield SimpleNamespace(
        page=page, problems=problems, run=run, searchers=searchers, simulation=simulation, table=table
    )
    sys.path[:] = path
    optuna.logging.set_verbosity(verbosity)
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent in FOLDERS:
            del sys.modules[name]


@pytest.mark.long
def test_a_search_whose_rows_are_there_is_not_run_again(
    benchmark: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(*arguments: str, seeds: int = 2) -> list[Any]:
        given = ["--problems", "digits", "--seeds", str(seeds), "--trials", "6", "--results", str(tmp_path)]
        benchmark.run.main([*given, *arguments])
        return benchmark.table.read_rows(tmp_path)  # type: ignore[no-any-return]

    first = rows("--ways", "random", "ours")
    assert len(first) == 3 * 2 * 2 * 2  # ways, seeds, clocks, after 5 and 6 trials
    assert " asks, " in capsys.readouterr().out
    assert rows("--ways", "random", "ours") == first  # milliseconds of asks as well
    told = capsys.readouterr().out
    assert " asks, " not in told
    assert "CARBS: left out, not in the package index" in told

    cut = [replace(row, cut="limit 5 s") if row.way == "random" and row.seed else row for row in first]
    benchmark.table.write_rows(
        [row for row in cut if row.way == "random"], tmp_path / "random.csv", append=False
    )
    rows("--ways", "random", "--limit-s", "5")
    assert " asks, " not in capsys.readouterr().out
    assert [(row.search, row.share, row.cut) for row in rows("--ways", "random", "--limit-s", "6")] == [
        (row.search, row.share, "") for row in first
    ]
    first = benchmark.table.read_rows(tmp_path)

    again = rows("--ways", "ours", "--again", seeds=1)
    assert " asks, " in capsys.readouterr().out
    assert [row for row in again if row.way == "random"] == [row for row in first if row.way == "random"]
    anew, before = ([row for row in rows if row.way != "random" and row.seed == 0] for rows in (again, first))
    assert [(row.search, row.after, row.share) for row in anew] == [
        (row.search, row.after, row.share) for row in before
    ]
    assert len(again) == len(first) - len(before)


@settings(deadline=None)
@given(st.floats(0.3, 3.0), st.integers(1, 8), st.sampled_from([0.0, 0.3, 0.5]))
def test_trainings_end_when_their_time_has_passed(
    benchmark: SimpleNamespace, seconds: float, trainings: int, until: float
) -> None:
    """Of the same training again and again; with `until`, each is stopped there or continues from there in turn."""
    problem = SimpleNamespace(
        seconds=lambda _: seconds,
        accuracy=lambda _: 0.5,
        curve=lambda *_: [0.5] * 10,
        mean_seconds=lambda: 1.0,
    )
    told: list[tuple[int, float]] = []

    class Same:
        reports = False

        def ask(self, deadline: float) -> Any:
            number = len(asked)
            asked.append(number)
            continues = [
                earlier for earlier, fraction in told if fraction == until and earlier not in continued
            ]
            if until and not continues:
                return benchmark.searchers.Job(number, {}, until)
            continued.extend(continues[:1])
            return benchmark.searchers.Job(number, {}, 1.0, continues[0] if continues else None)

        def tell(self, number: int, fraction: float, *_: object) -> None:
            told.append((number, fraction))

    for clock, workers in (("trials", 1), ("seconds", 4)):
        told, asked, continued = [], [], []
        run = benchmark.simulation.simulate(Same(), problem, clock, trainings, 0, 60.0)
        length = 1.0 if clock == "trials" else seconds * workers  # in trainings on so many workers
        assert len(run.ends) == workers * math.floor(trainings / length + 1e-9)
        assert not run.cut
        assert [len(run.points(after)) for after in (0, trainings)] == [0, len(run.ends)]
        assert len(set(told)) == len(told)


def rows_of(table: Any, shares: dict[tuple[str, str], list[float]]) -> list[Any]:
    return [
        table.Row(f"digits/{problem}", way, seed, "trials", 10, share, 1.0, "it 1")
        for (problem, way), each in shares.items()
        for seed, share in enumerate(each)
    ]


SHARES = st.lists(st.floats(0, 1), min_size=2, max_size=4)


@given(
    st.fixed_dictionaries({(problem, way): SHARES for problem in "ab" for way in ("random", "tpe", "ours")})
)
def test_cells_and_ranks_are_means_over_problems(
    benchmark: SimpleNamespace, shares: dict[tuple[str, str], list[float]]
) -> None:
    rows = rows_of(benchmark.table, shares)
    cells, ranks = benchmark.table.cells(rows, "trials", 10), benchmark.table.mean_ranks(rows, "trials", 10)
    means = {key: statistics.fmean(each) for key, each in shares.items()}
    for way, cell in cells.items():
        assert cell.mean == pytest.approx((means["a", way] + means["b", way]) / 2)
        assert cell.seeds == min(len(shares["a", way]), len(shares["b", way]))
        others = [sum(means[problem, other] > means[problem, way] for other in cells) for problem in "ab"]
        ties = [sum(means[problem, other] == means[problem, way] for other in cells) for problem in "ab"]
        assert ranks[way] == pytest.approx(
            sum(more + (same + 1) / 2 for more, same in zip(others, ties, strict=True)) / 2
        )
    assert sum(ranks.values()) == pytest.approx(1 + 2 + 3)


@given(st.lists(st.floats(0, 1), min_size=3, max_size=3), st.floats(-0.5, 0.5))
def test_a_problem_that_is_harder_for_all_changes_no_standard_error(
    benchmark: SimpleNamespace, shares: list[float], harder: float
) -> None:
    def errors(added: float) -> list[float]:
        by_way = {
            ("a", "tpe"): shares,
            ("a", "ours"): [0.3, 0.4],
            ("b", "tpe"): [0.5, 0.6],
            ("b", "ours"): [0.7],
        }
        moved = {key: [share + added * (key[0] == "a") for share in each] for key, each in by_way.items()}
        return [
            cell.error
            for _, cell in sorted(
                benchmark.table.cells(rows_of(benchmark.table, moved), "trials", 10).items()
            )
        ]

    assert errors(harder) == pytest.approx(errors(0.0), abs=1e-9)


@pytest.mark.slow
def test_every_figure_of_the_page_is_computed_from_the_rows(
    benchmark: SimpleNamespace, tmp_path: Path
) -> None:
    rows = benchmark.table.read_rows()
    assert (ROOT / "docs" / "benchmarks.md").read_text() == benchmark.page.page(rows)
    assert len({(*row.search, row.after) for row in rows}) == len(rows)
    benchmark.page.save_plot(rows, "trials", tmp_path / "first.svg")
    benchmark.page.save_plot(rows, "trials", tmp_path / "second.svg")
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()


@pytest.mark.parametrize("family", ["digits", "cifar"])
def test_tables_say_how_many_parameters_are_searched(benchmark: SimpleNamespace, family: str) -> None:
    (problem,) = benchmark.run.named_problems(family).values()
    assert len(problem.space) == benchmark.table.PARAMETERS[family]
    for epochs in (1, 2, 4, 8, 16):
        setting = {"effective_batch": 100, "reference_rate": 0.1, "width": 8}
        wanted = problem.seconds({**setting, "epochs": epochs})
        found = benchmark.searchers.epochs_taking(wanted, setting, problem)
        assert problem.seconds({**setting, "epochs": found}) == wanted


def test_a_peer_answers_by_lines_and_its_failures_are_named(
    benchmark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With this environment in the place of the peer's own: it has Optuna, and needs no network."""
    searchers = benchmark.searchers
    monkeypatch.setattr(searchers, "environment", lambda requirements: Path(sys.executable))
    (problem,) = benchmark.run.named_problems("digits").values()
    share, process = benchmark.problems.Share(problem), searchers.Process(searchers.PEERS["tpe"])
    try:
        for known in (False, True, True):  # the same process, and the same search again
            peer = searchers.Peer(process, known, problem, share, seed=3)
            run = benchmark.simulation.simulate(peer, problem, "trials", 3, 0, 60.0)
            assert len(run.ends) == 3
            assert not run.cut
        assert peer.version == f"optuna {optuna.__version__}"
        with pytest.raises(searchers.LimitError):
            peer.ask(time.monotonic() - 1)
        with pytest.raises(searchers.PeerError, match="expected a line of the protocol"):
            process.answer({"riddle": 1})
        with pytest.raises(searchers.PeerError, match="expected a line of the protocol"):
            peer.ask(time.monotonic() + 60)  # started anew, without its search
    finally:
        process.close()


@pytest.mark.data
def test_lcbench_takes_time_by_what_costs_it(benchmark: SimpleNamespace) -> None:
    pytest.importorskip("onnxruntime")
    members = benchmark.run.named_problems("lcbench")
    if not members:
        pytest.skip("BSEARCH_DATA has no lcbench")
    problem = members["lcbench/167104"]
    assert len(problem.space) == benchmark.table.PARAMETERS["lcbench"]
    cheap = {name: domain.low for name, domain in problem.space.items()}
    other = {**cheap, "learning_rate": 0.05, "momentum": 0.9, "weight_decay": 0.01, "dropout": 0.5}
    assert problem.seconds(other) == problem.seconds(cheap)
    assert problem.accuracy(other) != problem.accuracy(cheap)
    assert problem.curve(other, None)[-1] == pytest.approx(problem.accuracy(other))
    slow = {**cheap, "epochs": 37, "effective_batch": 77, "layers": 3, "units": 333}
    # By the slow way.
    assert problem.seconds(slow) == pytest.approx(problem._seconds_of(problem._rows([slow]))[0])
    assert problem.seconds(slow) > problem.seconds(cheap)
