"""The report: sentences, the file that is sent, and the data in it, from which its claims follow again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bsearch.benchmarks.verify.claims import Claim, Data, Fact
from bsearch.benchmarks.verify.measured import RULES, following
from bsearch.benchmarks.verify.report import Report, StageReport
from hypothesis import given, settings
from hypothesis import strategies as st

# Reports as users send them.
DEVICES = sorted((Path(__file__).parent.parent / "data" / "devices").glob("*.md"))


# What a stage printed may look like the data that follow it.
PRINTED = 'Traceback\n```json\n{"a": 1}\n```\n'


def report() -> Report:
    memory = StageReport(
        "memory", 3.0, claims=[Claim("live", 0.02, 0.01, cases=4, note="a | b"), Claim("off", 0.02, 0.05)]
    )
    loop = StageReport(
        "loop", 1.0, "killed after 3 s", [Claim("slow", 0.02, 0.03, 0.02)], [Fact("clock", "1980 MHz")]
    )
    loop.data, loop.printed = (
        [Data("segments", "a net", {"segments": [["small", 2, True, [1, -1]]]})],
        PRINTED,
    )
    return Report(
        "cpu", "a device", "2026-01-01", "torch 2", [memory, loop], [Fact("environment", "A=1")], "Busy."
    )


def test_a_report_counts_its_verdicts_and_says_what_did_not_end() -> None:
    assert report().summary == "1 of 3 claims hold, 1 fails, 1 is too noisy here to tell; not finished: loop."
    assert not report().holds
    assert Report("cpu", "", "", "", [StageReport("a", claims=[Claim("", 1, 0), Claim("", 1, 2, 2)])]).holds


def test_a_report_comes_back_from_json() -> None:
    assert Report.read(json.dumps(report().to_dict(), indent=2)) == report()


@given(st.text())
def test_the_file_that_is_sent_is_read_back_whatever_is_in_it(text: str) -> None:
    sent = report()
    sent.stages[1].printed, sent.stages[1].problem = text, text
    sent.stages[0].facts.append(Fact(text, text))
    assert Report.read(sent.document()) == sent


def test_a_report_is_a_table_of_markdown() -> None:
    text = report().markdown()
    assert "| memory | live (4 cases) | ≤ 2 % | 1 % (a / b) | pass |" in text
    assert "| loop | clock | 1980 MHz |" in text
    assert "- loop: killed after 3 s" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(line.count("|") in (4, 6) for line in rows)


@pytest.mark.parametrize(
    ("stage", "verdict"),
    [
        (
            StageReport("smoke", claims=[Claim("checks that fail", 0, 0, unit="")]),
            "This card works with bsearch.",
        ),
        (
            StageReport(
                "smoke", claims=[Claim("checks that fail", 0, 1, unit="", note="memory cap: 128 MiB.")]
            ),
            "This card does not work with bsearch: memory cap: 128 MiB.",
        ),
        (
            StageReport("smoke", problem="killed after 120 s"),
            "This card does not work with bsearch: killed after 120 s.",
        ),
        (StageReport("memory"), ""),
    ],
)
def test_the_verdict_is_one_sentence(stage: StageReport, verdict: str) -> None:
    assert Report("gpu", "a card", "", "", [stage]).verdict == verdict


def test_a_reports_file_is_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        path = Report("gpu", "NVIDIA GeForce RTX 5090 / 32GB", "2026-11-26", "").file()
        path.touch()
        names.append(path.name)
    assert names == [
        f"bsearch-verify-NVIDIA-GeForce-RTX-5090-32GB-2026-11-26{number}.md" for number in ("", "-2", "-3")
    ]


# Raw data


@pytest.mark.parametrize("path", DEVICES, ids=lambda path: path.stem)
def test_what_a_device_measured_leads_to_the_claims_of_its_report(path: Path) -> None:
    sent = Report.read(path.read_text(encoding="utf-8"))
    replayed = [claim for stage in sent.stages for claim in following(stage.data) if isinstance(claim, Claim)]
    told = {claim.text: claim for claim in sent.claims}
    assert {claim.text: claim.verdict for claim in replayed} == {
        claim.text: told[claim.text].verdict for claim in replayed
    }
    for claim in replayed:
        assert claim.measured == pytest.approx(told[claim.text].measured, rel=1e-6, abs=1e-9)
        assert claim.uncertainty == pytest.approx(told[claim.text].uncertainty, rel=1e-6, abs=1e-9)


def test_there_are_data_of_every_kind_to_replay() -> None:
    sent = [Report.read(path.read_text(encoding="utf-8")) for path in DEVICES]
    assert {data.kind for report in sent for stage in report.stages for data in stage.data} >= RULES.keys()


def claims_of(*data: Data) -> dict[str, Claim]:
    return {claim.text.partition(":")[0]: claim for claim in following(data) if isinstance(claim, Claim)}


@given(
    st.floats(-0.5, 3), st.lists(st.lists(st.floats(1e-4, 1), min_size=1, max_size=4), min_size=1, max_size=4)
)
def test_a_loop_that_always_takes_so_much_longer_does_so_without_uncertainty(
    more: float, seconds: list[list[float]]
) -> None:
    bursts = [[((1 + more) * second, second) for second in built] for built in seconds]
    (claim,) = following([Data("overhead", "a net, batch 8", {"bursts": bursts})])
    assert isinstance(claim, Claim)
    assert claim.measured == pytest.approx(more, abs=1e-9)
    assert claim.uncertainty == pytest.approx(0, abs=1e-9)


def timed(factor: float) -> Data:
    """Rounds of steps of 5 ms and 1 ms a sample; of plans that no law is fitted to, times `factor`."""
    plans = [(8, 1), (64, 1), (512, 1), (128, 2), (100, 1), (90, 3)]
    seconds = [0.005 + 0.001 * batch for batch, _ in plans]
    rounds = [
        [(second * (factor if index > 3 else 1), 0.0) for index, second in enumerate(seconds)]
        for _ in range(6)
    ]
    return Data("step times", "a net", {"plans": plans, "fitted": 4, "rounds": rounds})


@settings(max_examples=10)
@given(st.floats(0.5, 2))
def test_the_error_of_a_predicted_step_time_is_what_it_is_off_by(factor: float) -> None:
    claims, off = claims_of(timed(factor)), abs(1 / factor - 1)
    assert claims["largest error of predicted step time, untimed plans"].measured == pytest.approx(
        off, abs=1e-6
    )
    assert claims["median error of predicted step time, untimed plans"].cases == 2


@given(st.floats(0.5, 2), st.lists(st.floats(0.5, 2), min_size=4, max_size=20))
def test_sustained_training_is_judged_by_its_second_half(factor: float, first_half: list[float]) -> None:
    bursts = [*first_half, *[0.1 * factor] * (len(first_half) + 1)]
    values = {"predicted_s": 0.1, "short": [0.1] * 3, "bursts": bursts}
    (claim,) = following([Data("sustained", "a net", values)])
    assert isinstance(claim, Claim)
    assert claim.measured == pytest.approx(abs(factor - 1), abs=1e-9)


@given(st.integers(0, 1 << 30))
def test_on_a_gpu_the_smallest_size_tells_what_libraries_take(fixed: int) -> None:
    mib = 1 << 20
    sizes = [
        (size, size * 90 * mib, size * 100 * mib, size * 90 * mib + fixed, size * 100 * mib + fixed)
        for size in (1, 4, 9)
    ]
    case = Data("peaks", "a net, bf16", {"device": "gpu", "expandable": True, "sizes": sizes, "untraced": ""})
    claims = claims_of(case)
    assert (
        claims["error of the predicted peak, live bytes after one run of the smallest micro-batch"].measured
        == 0
    )
    assert claims["bytes that the smallest micro-batch takes beside its prediction"].measured == fixed / mib
    assert claims["steps that could not be traced"].cases == 3


def test_of_a_net_that_is_not_traced_the_rest_still_counts() -> None:
    told = {"device": "cpu", "expandable": True}
    traced = Data("peaks", "one, fp32", {**told, "sizes": [(2, 100, 100, 101, 101)], "untraced": ""})
    claims = claims_of(
        traced, Data("peaks", "other, fp32", {**told, "sizes": [], "untraced": "it reads a value"})
    )
    untraced = claims["steps that could not be traced"]
    assert (untraced.measured, untraced.note, untraced.cases) == (1, "other, fp32", 2)
    assert claims["error of the predicted peak, live bytes"].measured == pytest.approx(1 / 101)
