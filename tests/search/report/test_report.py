"""The report: one page that needs nothing else, and the same figures as pictures and data."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
from bsearch.search.analysis.pareto import front_of
from bsearch.search.report.export import csv_text
from bsearch.search.report.page.decide import decision_data
from bsearch.search.report.page.draw import LOOKS, plotly_document
from bsearch.search.report.page.figures import figures_of, front_figure
from bsearch.search.report.page.page import picks, report_page
from bsearch.search.report.page.study_data import StudyData
from bsearch.search.store.stored import StoredStudy
from bsearch.spaces.record import TrialFacts, TrialRecord
from conftest import TASKS, small_study
from helpers import bsearch

STRANGE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def made_study(folder: Path, **changes: Any) -> Path:
    """A real study that was run to its end, its file."""
    import yaml

    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(small_study(**changes), sort_keys=False))
    ran = bsearch("run", path, "--serial")
    assert ran.exit_code == 0, ran.output
    return path


@pytest.fixture(scope="module")
def study_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trials of several fates, with known times, a memory limit and repeats; some texts of a stranger's."""
    return made_study(
        tmp_path_factory.mktemp("report"),
        task=f"{TASKS}:ManyFates",
        space={
            "effective_batch": {"low": 8, "high": 300},
            "reference_rate": {"low": 0.001, "high": 0.5, "at_batch": 64},
            "rule": ["sqrt", "adam_sde"],
            "epochs": {"low": 1, "high": 4},
        },
        memory={"limit": "64MiB"},
        sampler="random",
        stopping="none",
        confirm=1,
        budget={"trials": 24, "profile_s": 2},
        baseline=[{"effective_batch": 64, "reference_rate": 0.01, "rule": "sqrt", "epochs": 2}],
    )


@pytest.fixture(scope="module")
def study(study_path: Path) -> StoredStudy:
    return StoredStudy.open(str(study_path))


@pytest.fixture(scope="module")
def page(study: StoredStudy) -> str:
    strange = tuple(
        replace(record, message=STRANGE, parameters={**record.parameters, STRANGE: STRANGE})
        for record in study.records
    )
    front = replace(
        study.front,
        trials=tuple(replace(t, parameters={**t.parameters, STRANGE: STRANGE}) for t in study.front.trials),
    )
    strangers = replace(study, records=strange, front=front)
    return report_page(StudyData.of(strangers))


@pytest.mark.slow
def test_the_page_holds_all_it_shows_and_asks_nothing_of_a_network(page: str) -> None:
    ours = page.replace(page[page.index("<script>") : page.index('<script type="application/json"')], "")
    assert not re.findall(r"""(?:src|href)=["'](?!data:)[^"'#]""", ours)
    assert "default-src 'none'" in page
    assert "http://" not in ours
    assert "https://" not in ours


@pytest.mark.slow
def test_texts_of_strangers_stay_texts(page: str) -> None:
    assert "<script>document.title" not in page
    assert "<img src=x" not in page
    assert "owned" in page  # shown, not lost


@pytest.mark.slow
def test_every_figure_says_the_same_on_the_page_and_in_its_csv(study: StoredStudy) -> None:
    figures = figures_of(StudyData.of(study))
    assert [figure.name for figure in figures] == [
        "front",
        "rate-batch",
        "memory",
        "step-time",
        "learning-curves",
    ]
    for figure in figures:
        rows = list(csv.DictReader(io.StringIO(csv_text(figure.rows()))))
        assert len(rows) == sum(len(layer.x) for layer in figure.layers)
        drawn = plotly_document(figure)
        assert [trace["tone"] in LOOKS for trace in drawn["traces"]] == [True] * len(figure.layers)
        json.dumps(drawn, allow_nan=False)
        assert figure.caption


def test_the_front_figure_holds_every_trial_that_has_a_place(study: StoredStudy) -> None:
    layers = {layer.name: layer for layer in front_figure(StudyData.of(study)).layers}
    assert layers["trials on the front"].trials == tuple(trial.number for trial in study.front.trials)
    shown = {number for layer in layers.values() for number in layer.trials}
    ended = {record.number for record in study.records if record.outcome == "complete"}
    assert ended <= shown
    assert {
        record.number for record in study.records if record.outcome == "diverged" and record.train_s
    } <= shown
    assert layers["baseline"].trials == (0,)
    once = [record.setting for record in StudyData.of(study).runs]
    assert len(once) == len(set(once)) < len(ended)


def test_only_a_study_with_profiles_has_memory_and_speed(tmp_path: Path) -> None:
    path = made_study(tmp_path, budget={"trials": 3}, sampler="random")
    names = [figure.name for figure in figures_of(StudyData.of(StoredStudy.open(str(path))))]
    assert "memory" not in names
    assert "step-time" in names  # the clock's own


@pytest.mark.slow
def test_the_command_writes_the_page(study_path: Path) -> None:
    result = bsearch("report", study_path)
    assert result.exit_code == 0, result.output
    assert (study_path.parent / "results" / "small" / "report.html").stat().st_size < 2_500_000
    assert result.output.count("wrote ") == 1


def front(*points: tuple[float, float]) -> Any:
    return front_of(
        [
            TrialRecord(n, "complete", {"effective_batch": 8}, TrialFacts(), *pair)
            for n, pair in enumerate(points)
        ]
    )


def test_the_picks_are_the_points_most_users_want_each_once() -> None:
    def named(*points: tuple[float, float], target: float | None = None) -> list[tuple[str, int]]:
        return [(name, trial.number) for name, trial in picks(front(*points), target)]

    four = (1, 0.5), (2, 0.8), (10, 0.895), (40, 0.9)
    assert named(*four) == [("Fastest within 1% of the best", 2), ("Best", 3)]
    assert named(*four, target=0.7) == [
        ("Fastest within 1% of the best", 2),
        ("Fastest to reach 0.7", 1),
        ("Best", 3),
    ]
    assert named((1, 0.5)) == [("Best", 0)]
    assert named() == []


# In a real browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium here")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def opened(browser: Any, page: str, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens the page at a width and in a colour scheme; afterwards nothing may have been logged or asked for."""
    (tmp_path / "report.html").write_text(page)
    said: list[str] = []
    contexts = []

    def open_at(width: int = 1280, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        view = context.new_page()
        view.on("console", lambda message: said.append(message.text))
        view.on("pageerror", lambda error: said.append(str(error)))
        view.on(
            "request",
            lambda request: (
                said.append(request.url) if not request.url.startswith(("file:", "data:")) else None
            ),
        )
        view.goto((tmp_path / "report.html").as_uri())
        view.wait_for_selector("#plot-learning-curves svg")
        return view

    yield open_at
    for context in contexts:
        context.close()
    assert said == []


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_accessible_and_fits(opened: Callable[..., Any], width: int, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    view = opened(width, scheme)
    found = axe.Axe().run(view).response["violations"]
    assert [(one["id"], one["impact"]) for one in found if one["impact"] in ("serious", "critical")] == []
    assert not view.evaluate("document.documentElement.scrollWidth > innerWidth")
    assert view.title() == "small: speed against accuracy"


@pytest.mark.browser
def test_a_point_is_chosen_and_its_settings_are_copied(
    opened: Callable[..., Any], study: StoredStudy
) -> None:
    view = opened()
    view.context.grant_permissions(["clipboard-read", "clipboard-write"])
    last = study.front.trials[-1]
    view.click(f"button.row[data-trial='{last.number}']")
    assert view.inner_text("#picked-title") == f"Settings of trial {last.number}"
    view.click("button[aria-label='copy effective_batch']")
    view.get_by_text("effective_batch copied").wait_for()
    assert view.evaluate("navigator.clipboard.readText()") == str(last.settings["effective_batch"])
    view.click("#for-framework summary")
    view.select_option("#framework", "deepspeed")
    assert json.loads(view.inner_text("#export"))["train_batch_size"] > 0
    # And by the figure itself.
    first = study.front.trials[0].number
    view.evaluate(
        "n => document.getElementById('plot-front').emit('plotly_click', {points: [{customdata: n}]})", first
    )
    assert view.inner_text("#picked-title") == f"Settings of trial {first}"


@pytest.mark.browser
def test_colours_change_with_the_button_and_paper_is_white(opened: Callable[..., Any]) -> None:
    view = opened(scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = view.evaluate(ground)
    view.click("#theme")
    assert view.evaluate(ground) != dark
    view.click("#theme")
    view.emulate_media(media="print")
    view.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert view.evaluate(ground) == "rgb(255, 255, 255)"
    drawn, settings = ("#plot-front .main-svg", "bottom"), ("#picked", "top")
    ends = [
        view.evaluate(f"document.querySelector('{name}').getBoundingClientRect().{end}")
        for name, end in (drawn, settings)
    ]
    assert ends[0] <= ends[1]  # the plot does not lie over the settings
    view.emulate_media(media="screen")
    view.evaluate("dispatchEvent(new Event('afterprint'))")
    assert view.evaluate(ground) == dark


@pytest.mark.browser
def test_data_is_saved_as_csv(opened: Callable[..., Any], study: StoredStudy) -> None:
    view = opened()
    with view.expect_download() as saved:
        view.click("button[data-csv='front']")
    rows = list(csv.DictReader(Path(saved.value.path()).read_text().splitlines()))
    assert {row["layer"] for row in rows} >= {"front", "trials on the front"}


def test_measures_of_speed_are_those_that_tell_points_apart(study: StoredStudy) -> None:
    records = {trial.number: trial for trial in study.front.trials}
    data = decision_data(study.front, records, {})
    assert [one["key"] for one in data["measures"]] == ["train_s"]
    assert set(data["points"]) == set(records)
    priced = {
        number: replace(one, facts=replace(one.facts, price=2.0, devices=1 + place % 2))
        for place, (number, one) in enumerate(records.items())
    }
    by_cost = replace(study.front, speed="cost", trials=tuple(priced.values()))
    data = decision_data(by_cost, priced, {})
    assert [one["key"] for one in data["measures"]] == ["cost", "train_s", "device_s"]
    for number, point in data["points"].items():
        amounts = point["amounts"]
        assert amounts["cost"] == pytest.approx(amounts["device_s"] * 2 / 3600)
        assert amounts["device_s"] == pytest.approx(amounts["train_s"] * priced[number].facts.devices)


@pytest.mark.browser
def test_limits_leave_the_points_that_keep_them(opened: Callable[..., Any], study: StoredStudy) -> None:
    view, front = opened(), study.front
    rows = "[...document.querySelectorAll('button.row')].filter(e => !e.closest('tr').hidden).map(e => Number(e.dataset.trial))"
    assert view.evaluate(rows) == [trial.number for trial in front.trials]
    set_to = "(e, at) => { e.value = at; e.dispatchEvent(new Event('input')); }"
    middle = len(front.trials) // 2
    view.locator("#limit-metric").evaluate(set_to, middle)
    least = sorted(trial.accuracy or 0.0 for trial in front.trials)[middle]
    good = [trial.number for trial in front.trials if (trial.accuracy or 0.0) >= least]
    assert view.evaluate(rows) == good
    assert view.inner_text("#remains").startswith(
        f"{len(good)} of {len(front.trials)} points remain. Best: trial {good[-1]},"
    )
    view.locator("#limit-train_s").evaluate(set_to, 0)  # as fast as the fastest, which is not as good
    assert view.evaluate(rows) == []
    assert view.inner_text("#remains") == "Nothing on the front is within these limits."
    assert view.is_disabled("#pick-remaining")
    assert view.evaluate("document.getElementById('plot-front').layout.shapes.length") == 2
    view.click("#no-limits")
    assert view.evaluate(rows) == [trial.number for trial in front.trials]
    # By the keyboard alone.
    view.focus("#limit-metric")
    view.keyboard.press("ArrowRight")
    assert len(view.evaluate(rows)) == len(front.trials) - 1
    view.focus("#pick-remaining")
    view.keyboard.press("Enter")
    assert view.inner_text("#picked-title") == f"Settings of trial {front.trials[-1].number}"


@pytest.mark.browser
def test_two_points_are_compared_with_the_chance_that_one_is_better(
    opened: Callable[..., Any], study: StoredStudy
) -> None:
    view, (first, *_, last) = opened(), study.front.trials
    view.click(f"button.row[data-trial='{last.number}']")
    view.click("#comparison summary")
    view.select_option("#compare", str(first.number))
    assert first.half_interval and last.half_interval
    spread = math.hypot(first.half_interval, last.half_interval) / 1.645
    chance = NormalDist().cdf(((last.accuracy or 0) - (first.accuracy or 0)) / spread)
    told = view.inner_text("#verdict")
    assert f"Trial {last.number} is ahead of trial {first.number} by" in told
    assert ("over 99 %" if chance > 0.99 else f"{round(100 * chance)} %") in told
    cells = view.evaluate(
        "[...document.querySelectorAll('#differences tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert [name for name, *_ in cells][:2] == ["accuracy", "training time"]
    assert all(one != two for _, one, two in cells)
    view.wait_for_selector("#plot-comparison svg")


@pytest.mark.browser
def test_all_trials_are_sorted_and_filtered(opened: Callable[..., Any], study: StoredStudy) -> None:
    view = opened()

    def column(place: int) -> list[str]:
        return view.evaluate(  # type: ignore[no-any-return]
            "place => [...document.querySelectorAll('table.every tbody tr')].filter(row => !row.hidden)"
            ".map(row => row.cells[place].textContent.trim())",
            place,
        )

    heads = view.locator("table.every th .sort").all_text_contents()
    assert len(column(0)) == len(study.records)
    place = heads.index("accuracy")
    for ascending in (True, False):
        view.locator("table.every th .sort").nth(place).click()
        values = [float(text) for text in column(place) if text not in ("", "-")]
        assert values == sorted(values, reverse=not ascending)
        assert len(values) > 1
    view.fill("#filter", "diverged")
    diverged = sum(record.outcome == "diverged" for record in study.records)
    assert set(column(heads.index("outcome"))) <= {"diverged"} and len(column(0)) == diverged
    assert view.inner_text("#filtered") == f"{diverged} of {len(study.records)}"
    view.fill("#filter", "")
    view.locator("table.every tbody button").first.click()
    assert view.inner_text("#picked-title") == f"Settings of trial {column(0)[0]}"


@pytest.mark.browser
def test_parameters_are_lines_and_slices_and_a_point_is_chosen_there(
    opened: Callable[..., Any], study: StoredStudy
) -> None:
    view = opened()
    drawn = view.evaluate(
        "['plot-parallel', 'plot-slice'].map((id) => document.getElementById(id).data.map((one) => [one.name, one.customdata]))"
    )
    trained = {record.number for record in study.records if record.outcome == "complete"}
    members = {trial.number for trial in study.front.trials}
    for traces in drawn:
        shown = {name: {trial for trial in trials if trial is not None} for name, trials in traces}
        assert shown["front"] == members
        assert shown["front"] | shown["other trials"] == trained
    axes = view.evaluate("document.getElementById('plot-parallel').layout.xaxis.ticktext")
    assert axes[-2:] == ["training time", study.front.metric]
    for name in axes[:-2]:
        view.select_option("#slice", name)
        assert view.evaluate("document.getElementById('plot-slice').layout.xaxis.title.text") == name
    number = min(members)
    view.evaluate(
        f"document.getElementById('plot-slice').emit('plotly_click', {{points: [{{customdata: {number}}}]}})"
    )
    assert view.inner_text("#picked-title") == f"Settings of trial {number}"
