"""Study files: what they may say, and what a person reads when they say it wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.learning_rate import RATE_RULES
from bsearch.spaces.study.file import parse_study, read_study, study_from_dict
from bsearch.spaces.study.spec import StudySpec
from conftest import small_study
from hypothesis import given, settings
from hypothesis import strategies as st

EVERYTHING = """
study: cifar-resnet
task: tasks.py:Cifar
space:
  effective_batch: {low: 16, high: 4096}
  reference_rate: {low: 1e-3, high: 1.0, at_batch: 128}
  rule: [linear, power]
  exponent: {low: 0, high: 1}
  epochs: {low: 2, high: 20}
  accumulation: {low: 1, high: 8}
  weight_decay: {low: 1e-6, high: 1e-2, log: true}
  width: {choices: [32, 64], changes_cost: true}
  dataset: cifar10
training: {precision: bf16, schedule: cosine, warmup: 5%, clip_norm: null, evaluations: 10, seed: 0, workers: 2}
memory: {largest_micro_batch: 256}
devices: {per_trial: 1, kind: cpu, cpus: 2}
budget: {trials: 60, hours: 8}
objectives: {speed: train_s, metric: {name: val_loss, direction: minimize}}
baseline:
  - {effective_batch: 256, reference_rate: 0.1, rule: linear, exponent: 0.5, epochs: 10, accumulation: 1,
     weight_decay: 1e-4, width: 32}
storage: sqlite:///cifar.db
cluster: {address: auto, trials_at_once: 4}
"""


def messages(text: str, file: str = "study.yaml") -> list[str]:
    with pytest.raises(StudyFileError) as error:
        parse_study(text, file)
    return str(error.value).splitlines()


def test_a_whole_study_is_read_as_it_is_written() -> None:
    spec = parse_study(EVERYTHING)
    assert spec.space.reference_batch == 128
    assert spec.space.effective_batch.log
    assert spec.training.warmup == 0.05
    assert list(spec.searched()) == [
        "effective_batch",
        "reference_rate",
        "rule",
        "exponent",
        "epochs",
        "accumulation",
        "weight_decay",
        "width",
    ]
    assert spec.fixed() == {"dataset": "cifar10", "devices": 1}
    assert spec.objectives.metric.direction == "minimize"


def test_paths_start_at_the_folder_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "study.yaml"
    path.parent.mkdir()
    path.write_text(EVERYTHING)
    spec = read_study(path)
    assert spec.task == f"{tmp_path}/deep/tasks.py:Cifar"
    assert spec.storage == f"sqlite:///{tmp_path}/deep/cifar.db"
    assert spec.folder == tmp_path / "deep"
    assert read_study(path, storage="postgresql+psycopg://u@h/d").storage == "postgresql+psycopg://u@h/d"


def test_every_fault_is_told_at_once_with_its_line() -> None:
    text = (
        EVERYTHING.replace("low: 16", "low: 0")
        .replace("[linear, power]", "[linear, sqr]")
        .replace("warmup: 5%", "warmup: 5")
    )
    text = text.replace("precision: bf16", "precison: bf16").replace("trials: 60", "trials: many")
    assert messages(text) == [
        "study.yaml:5: space.effective_batch: expected an integer >= 1, got 0",
        f"study.yaml:7: space.rule: expected one of {', '.join(RATE_RULES)}, auto; got 'sqr'. Did you mean 'sqrt'?",
        "study.yaml:14: training.warmup: expected a share from 0 up to 1, got 5. Write 5% or 0.05.",
        "study.yaml:14: training.precison: unknown key. Did you mean 'precision'? Valid keys: precision, schedule, "
        "warmup, clip_norm, evaluations, seed, workers, compile, "
        "sync_batch_norm, betas, beta2_scaling, eps, ema, accept_inexact, samples",
        "study.yaml:17: budget.trials: expected an integer, got 'many'",
    ]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("study: cifar-resnet", "study: a b", "study.yaml:2: study: expected a name of letters"),
        (
            "task: tasks.py:Cifar",
            "task: tasks.py",
            "task: expected module:name or path/file.py:name, got 'tasks.py'",
        ),
        ("task: tasks.py:Cifar\n", "", "study.yaml:2: task: missing required key"),
        (
            "low: 16, high: 4096",
            "low: 16.5, high: 4096",
            "space.effective_batch: expected an integer >= 1, got 16.5",
        ),
        (
            "low: 16, high: 4096",
            "low: 4096, high: 16",
            "space.effective_batch: expected low <= high, got low 4096 and high 16",
        ),
        (
            "low: 16, high: 4096",
            "lo: 16, high: 4096",
            "space.effective_batch.lo: unknown key. Did you mean 'low'?",
        ),
        (
            "low: 1e-3, high: 1.0",
            "low: -1, high: 1.0",
            "space.reference_rate: expected a number above 0, got -1",
        ),
        (
            "low: 1e-3, high: 1.0",
            "low: .nan, high: 1.0",
            "space.reference_rate.low: expected a finite number, got nan",
        ),
        ("at_batch: 128", "at_batch: 1.5", "space.reference_rate.at_batch: expected an integer, got 1.5"),
        ("  exponent: {low: 0, high: 1}\n", "", "space.rule: power: expected space.exponent, got none"),
        (
            "weight_decay: {low: 1e-6",
            "weight_decay: {low: 0",
            "expected low above 0 on a logarithmic scale, got low 0",
        ),
        (
            "weight_decay: {",
            "weight_decy: {",
            "space.weight_decy: 'weight_decy' would be a parameter of the task",
        ),
        (
            "choices: [32, 64]",
            "choices: [32, [64]]",
            "space.width.choices[1]: expected a number, a string, true or false, got [64]",
        ),
        (
            "choices: [32, 64]",
            "choices: [32, 64], when: {rul: sqrt}",
            "space.width: when: rul: expected the name of another parameter, got 'rul'. Did you mean 'rule'?",
        ),
        (
            "choices: [32, 64]",
            "choices: [32, 64], when: {effective_batch: 8}",
            "space.width: when: effective_batch: expected values that effective_batch may take, 16 to 4096 (log); got 8",
        ),
        (
            "low: 1e-3, high: 1.0",
            "low: 1e-3, high: 1.0, when: {rule: sqrt}",
            "reference_rate: expected `when` on a parameter of the task alone",
        ),
        (
            "low: 1e-3, high: 1.0",
            "low: small, high: 1.0",
            "space.reference_rate.low: expected a number, got 'small'",
        ),
        ("choices: [32, 64]", "choices: []", "space.width.choices: expected at least one value, got []"),
        ("seed: 0", "seed: -1", "training.seed: expected a number >= 0, got -1"),
        ("largest_micro_batch: 256", "largest_micro_batch: 0", "expected a number >= 1, got 0"),
        ("per_trial: 1", "per_trial: 0", "devices.per_trial: expected an integer >= 1, got 0"),
        (
            "per_trial: 1",
            "per_trial: 0.7",
            "devices.per_trial: expected a whole number of devices, or a share of a GPU such as 0.5, 0.25 or 0.2, got 0.7",
        ),
        (
            "per_trial: 1",
            "per_trial: auto",
            "devices.per_trial: expected a number of devices, or a share of a GPU such as 0.5; got 'auto'",
        ),
        ("per_trial: 1", "per_trial: [0.5, 1]", "devices.per_trial: expected an integer >= 1, got 0.5"),
        (
            "per_trial: 1",
            "per_trial: {low: 1, high: 4}",
            "expected a number or a list of numbers, got a range. Write [1, 2, 4].",
        ),
        (
            "per_trial: 1",
            "per_trial: [1, 2]",
            "baseline[0]: expected a value for every searched parameter, got none for devices",
        ),
        ("kind: cpu", "kind: cuda", "devices.kind: expected one of auto, cpu, gpu; got 'cuda'."),
        (
            "speed: train_s",
            "speed: time",
            "objectives.speed: expected one of train_s, device_s, cost; got 'time'",
        ),
        (
            "effective_batch: 256, r",
            "effective_batch: 9000, r",
            "baseline[0].effective_batch: expected 16 to 4096 (log)",
        ),
        (
            "width: 32}",
            "wdth: 32}",
            "baseline[0].wdth: expected a parameter from space, got 'wdth'. Did you mean 'width'?",
        ),
        (
            ", width: 32}",
            "}",
            "baseline[0]: expected a value for every searched parameter, got none for width",
        ),
        ("budget: {", "budget: {}\nbudget: {", "budget: duplicate key, first on line 17"),
        ("  dataset: cifar10", "  seed: 3", "space.seed: 'seed' is reserved for bsearch's own results"),
        (
            "  reference_rate:",
            "  learning_rate:",
            "space.learning_rate: expected reference_rate, the rate at one batch",
        ),
        (
            "storage: ",
            "confirm: 200\nstorage: ",
            "confirm: expected fewer than budget.trials, which has to be given with it; got 200",
        ),
        ("  reference_rate:", "  lr:", "space.lr: expected reference_rate, the rate at one batch"),
        ("{name: val_loss, direction: minimize}", "gap", "Write metric: {name: gap, direction: minimize}"),
        (
            "epochs: {low: 2, high: 20}",
            "epochs: 1e300",
            "space.epochs: expected a number above 0, at most a million",
        ),
        ("hours: 8}", "hours: 8", "invalid YAML: expected ',' or '}'"),
    ],
)
def test_a_slip_is_told_in_words_that_help(before: str, after: str, message: str) -> None:
    assert before in EVERYTHING
    text = "\n".join(messages(EVERYTHING.replace(before, after)))
    assert message in text


@pytest.mark.parametrize(
    "changes",
    [
        {"storage": ""},
        {"cluster": {"address": ""}},
        {"devices": {"accelerator_type": ""}},
        {"objectives": {"metric": {"name": ""}}},
        {"budget": {"keep": ""}},
    ],
)
def test_a_name_or_place_that_is_written_is_not_empty(changes: dict[str, object]) -> None:
    with pytest.raises(StudyFileError, match="expected a non-empty string, got ''"):
        study_from_dict(small_study(**changes))


def test_numbers_are_those_of_yaml_1_2() -> None:
    study = yaml.safe_dump(small_study()).replace("0.02", "2e-2")
    assert parse_study(study).space.reference_rate.low == 0.02
    assert parse_study(study + "\nstorage: 'no'").storage == "no"
    for word in ("yes", "No", "on", "OFF"):
        with pytest.raises(StudyFileError, match=f"expected true or false, or text in quotes, got {word}"):
            parse_study(study + f"\nstorage: {word}")


def test_what_is_no_study_is_refused(tmp_path: Path) -> None:
    for content, message in [
        (b"", "expected keys such as study, task and space; got an empty file"),
        (b"- a", "got a list"),
        (b"\xff\xfe", "expected UTF-8 text"),
        (
            b"a: !!python/object/apply:os.system [true]",
            "got the tag .tag:yaml.org,2002:python/object/apply:os.system",
        ),
        (b"x" * (1 << 21), "at most 1048576 bytes"),
    ]:
        path = tmp_path / "study.yaml"
        path.write_bytes(content)
        with pytest.raises(StudyFileError, match=message):
            read_study(path)
    with pytest.raises(StudyFileError, match="cannot be read: No such file"):
        read_study(tmp_path / "missing.yaml")


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300)
@given(st.sampled_from(sorted(StudySpec.model_fields)), _json)
def test_no_value_of_any_key_ends_in_a_traceback(key: str, value: object) -> None:
    text = yaml.safe_dump({**small_study(), key: value}, allow_unicode=True)
    try:
        parse_study(text)
    except StudyFileError as error:
        assert str(error)


@settings(max_examples=300)
@given(st.text(max_size=60))
def test_no_text_ends_in_a_traceback(text: str) -> None:
    with pytest.raises(StudyFileError):
        parse_study(text)


def test_the_identity_holds_what_may_not_change(study_file: Callable[..., Path]) -> None:
    spec = read_study(study_file())
    assert (
        spec.identity()
        == read_study(study_file(budget={"trials": 99}, cluster={"trials_at_once": 1})).identity()
    )
    assert spec.identity() != read_study(study_file(training={"evaluations": 3})).identity()
    floor = {"metric": {"name": "accuracy", "floor": 0.9}}
    assert spec.identity() == read_study(study_file(objectives=floor)).identity()
    assert json.loads(json.dumps(spec.identity())) == spec.identity()


def small_text(**space: object) -> str:
    base = {"effective_batch": {"low": 16, "high": 400}, "reference_rate": {"low": 0.01, "high": 1.0}}
    return yaml.safe_dump(small_study(space={**base, **space}))


@pytest.mark.parametrize("written", ["auto", {"value": "auto"}, ["auto"], {"choices": ["auto"]}])
def test_auto_is_the_power_rule_with_its_exponent_searched(written: object) -> None:
    spec = parse_study(small_text(rule=written))
    assert spec.fixed()["rule"] == "power"
    assert str(spec.searched()["exponent"]) == "0.0 to 1.0"
    spelled = parse_study(small_text(rule="power", exponent={"low": 0, "high": 1}))
    assert spec.identity() == spelled.identity()
    again = StudySpec.model_validate(json.loads(json.dumps(spec.model_dump(mode="json"))))
    assert again == spec
    own = parse_study(small_text(rule=written, exponent={"low": -0.5, "high": 0.5}))
    assert str(own.searched()["exponent"]) == "-0.5 to 0.5"


def test_auto_searches_so_it_takes_neither_one_exponent_nor_other_rules() -> None:
    [message] = messages(small_text(rule="auto", exponent=0.5))
    assert "rule auto: expected a range of exponents to search" in message
    [message] = messages(small_text(rule=["auto", "sqrt"]))
    assert "space.rule: expected auto alone" in message


def test_settings_of_today_name_an_exponent_where_the_rule_is_auto() -> None:
    data = yaml.safe_load(small_text(rule="auto"))
    today = {"effective_batch": 64, "reference_rate": 0.1}
    assert (
        parse_study(yaml.safe_dump(data | {"baseline": [today | {"exponent": 0.5}]})).baseline[0]["exponent"]
        == 0.5
    )
    lines = messages(yaml.safe_dump(data | {"baseline": [today | {"rule": "sqrt"}]}))
    assert any(
        "expected power as in space.rule, got 'sqrt'. Write rule: power, exponent: 0.5." in line
        for line in lines
    )
    assert any(
        "expected a value for every searched parameter, got none for exponent" in line for line in lines
    )


@pytest.mark.parametrize("rule", ["saturating", "surge"])
def test_rules_of_the_noise_batch_want_it_in_the_space(rule: str) -> None:
    [message] = messages(small_text(rule=rule))
    assert f"space.rule: {rule}: expected space.noise_batch, got none. Write noise_batch: 1000, or" in message
    spec = parse_study(small_text(rule=rule, noise_batch={"low": 10, "high": 10_000}))
    assert spec.searched()["noise_batch"].log
    assert parse_study(small_text(rule=rule, noise_batch=300)).fixed()["noise_batch"] == 300
    [message] = messages(small_text(rule=rule, noise_batch=0))
    assert "space.noise_batch: expected a number above 0, got 0" in message


def test_a_parameter_of_the_task_may_speak_of_noise() -> None:
    assert "noise_std" in parse_study(small_text(noise_std={"low": 0.1, "high": 1.0})).searched()


def test_adamw_tau_wants_a_decay_to_scale() -> None:
    [message] = messages(small_text(rule="adamw_tau"))
    assert (
        "space.rule: adamw_tau: expected a weight decay to scale, got 0. Write weight_decay: 0.1" in message
    )
    parse_study(small_text(rule="adamw_tau", weight_decay={"low": 0.0, "high": 0.1}))


def test_faults_of_a_study_without_a_file_name_none() -> None:
    with pytest.raises(StudyFileError) as raised:
        study_from_dict(
            {
                "study": "a",
                "task": "t:T",
                "space": {"effective_batch": 0, "reference_rate": 0.1, "rule": "power"},
            }
        )
    assert str(raised.value).splitlines() == ["space.effective_batch: expected an integer >= 1, got 0"]


def test_a_task_in_place_of_a_file_is_told() -> None:
    with pytest.raises(
        StudyFileError, match=r"^tasks.py:Net: expected a study file, got a task. `bsearch run` takes one"
    ):
        read_study(Path("tasks.py:Net"))


def test_parameters_that_do_not_go_together_are_all_told_each_at_its_own_line() -> None:
    text = "\n".join(
        [
            "study: a",
            "task: bsearch.objectives.digits:Digits",
            "space:",
            "  effective_batch: {low: 16, high: 64, changes_cost: true}",
            "  reference_rate: 0.1",
            "  rule: [power, surge, adamw_tau]",
            "  width: {choices: [32, 64], when: {rul: power}}",
            "  depth: {choices: [2, 3], when: {width: 32}, changes_cost: true}",
        ]
    )
    assert sorted(line.partition(" expected")[0] for line in messages(text, "a.yaml")) == [
        "a.yaml:4: space.effective_batch:",
        "a.yaml:6: space.rule: adamw_tau:",
        "a.yaml:6: space.rule: power:",
        "a.yaml:6: space.rule: surge:",
        "a.yaml:7: space.width: when: rul:",
        "a.yaml:8: space.depth:",
        "a.yaml:8: space.depth: when: width:",
    ]


def test_parts_that_disagree_are_all_told_each_at_its_own_line() -> None:
    text = "\n".join(
        [
            "study: a",
            "task: bsearch.objectives.digits:Digits",
            "space: {effective_batch: 32, reference_rate: 0.1}",
            "training:",
            "  evaluations: 1",
            "  schedule: constant",
            "warm_start: [earlier]",
            "budget:",
            "  trials: 3",
            "  cost: 2",
            "confirm: 3",
            "sampler: tpe",
        ]
    )
    assert [line.partition(": expected")[0] for line in messages(text, "a.yaml")] == [
        "a.yaml:7: warm_start",
        "a.yaml:10: budget.cost",
        "a.yaml:11: confirm",
    ]
