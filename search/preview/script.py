"""The study of a script that nobody has edited: what it is seen to do, and the files that say so."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ...objectives.script.metric import metric_pattern, value_of
from ...objectives.script.told import KINDS, kind_of, script_file
from ...spaces.boundary.secrets import masked
from ...spaces.errors import Fault, StudyFileError
from ...spaces.names import HIGHER, LOWER, TEST, TRAINING, VALIDATION, Direction, direction_of
from ...spaces.readable import number

# The most of a script's numbers that a message has.
_MOST_NUMBERS = 40
# Seconds until a script that is looked at is given up.
_PATIENCE_S = 300.0
_BATCH, _RATE, _LENGTH = r"batch|(?:^|\W)bs\b", r"lr|learn", r"epoch"
_NO_RATE = r"min|final|warm|drop|decay|mask|noise"
_NO_LENGTH = r"warm|start|eval|save|decay|step|drop|log|ckpt|check|patien"
_OTHERS = r"test|eval|val|micro|accum"
# Words of metrics, longer ones first.
_METRIC = r"(?:acc|prec)@\d|top.?1|fpr\d*|" + "|".join(
    sorted(LOWER | HIGHER | {"score"}, key=len, reverse=True)
)
_HELD_OUT = rf"(?<![a-z])(?:va|te|{'|'.join((*VALIDATION, *TEST))}|held.out)(?![a-z])"
_VALIDATION, _TRAINING = r"(?<![a-z])(?:va|dev|eval)", rf"(?<![a-z])(?:{'|'.join(TRAINING)})(?![a-z])"
_BEST = r"(?<![a-z])(?:best|max|min|highest|lowest|peak|record|top(?![ ._-]?\d)|patience|threshold|so.far)(?![a-z])"

_RUNNING = "[Bb]est", "[Mm]ax", "[Pp]eak", "[Rr]ecord"


@dataclass(frozen=True, slots=True)
class Script:
    """A script, and what was found of it.

    Args:
        told: how it is told `batch`, `rate`, `epochs` or `steps`, and `seed`.
        counts: lines at which it uses a count of batches, `train.py:12`.
        metric: the text on its output before the number, its name, and its direction.
    """

    path: str
    arguments: str
    told: Mapping[str, str]
    batch: int
    rate: float
    passes: int
    samples: int
    optimizer: str
    metric: tuple[str, str, Direction | None]
    counts: tuple[str, ...] = ()
    sums: bool = False
    seed: int = 0
    other_rates: tuple[float, ...] = ()
    evaluates: bool = False
    loaders: Sequence[Any] = ()

    def sentence(self) -> str:
        told = {"batch": self.batch, "rate": self.rate, "epochs": self.passes}
        parts = [
            f"{what} {number(told[what])} ({how})" if what in told else f"{what} ({how})"
            for what, how in self.told.items()
        ]
        text, _, direction = self.metric
        better = {
            "maximize": "higher is better",
            "minimize": "lower is better",
            None: "lower or higher is better?",
        }[direction]
        better += "" if re.search(_HELD_OUT, text.lower()) else "; it does not say of which data it is"
        parts += ["a loss that is a sum"] * self.sums
        if self.other_rates:
            parts.append(f"other rates as they are: {', '.join(map(number, self.other_rates))}")
        parts += ["no seed, so repeats differ only in their order of samples"] * ("seed" not in self.told)
        return f"found: {', '.join(parts)}, metric {text!r} ({better}), {self.samples} samples"


def script_of(command: Sequence[str], folder: Path) -> Script:
    """Look at a script by running it with one batch of each loader.

    Args:
        command: such as `python train.py --epochs 3`.

    Raises:
        StudyFileError: it does not run, or what a study sets of it is not found.
    """
    words = _words(command)
    if not words or (not words[0].endswith(".py") and not words[0].startswith("-m ")):
        raise StudyFileError(
            f"expected python SCRIPT.py or python -m MODULE, and its arguments; got {shlex.join(command)}"
        )
    if not script_file(words[0], folder)[0].is_file():
        raise StudyFileError(f"{words[0]}: no such script in {folder}")
    look = [sys.executable, "-m", "bsearch.objectives.script.look", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        done = subprocess.run(  # noqa: S603 (the script that is asked for)
            look,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
        seen = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise StudyFileError(
            f"{words[0]}: a pass of one batch had not ended after {_PATIENCE_S:.0f} s"
        ) from None
    except (ValueError, IndexError):
        last = " ".join(done.stderr.strip().splitlines()[-1:])
        raise StudyFileError(
            f"{words[0]}: it does not run: {last or f'exit code {done.returncode}'}"
        ) from None
    return found_in(words[0], words[1:], seen)


def check_holds_no_secret(command: Sequence[str]) -> None:
    """
    Raises:
        StudyFileError: an argument may be a secret, which tasks.py would keep.
    """
    text = shlex.join(command)
    if masked(text) != text:
        raise StudyFileError(
            f"{text}: expected a script's arguments without a secret, since tasks.py keeps them. Have the script read it from "
            "an environment variable"
        )


def is_of(command: Sequence[str], tasks: str) -> bool:
    """Whether a tasks.py was written for a command."""
    words = _words(command)
    return all(f"        {one!r},\n" in tasks for one in (words[0], shlex.join(words[1:])))


def _words(command: Sequence[str]) -> list[str]:
    """The script, or `-m` and its name, and its arguments."""
    words = list(command[1:] if Path(command[0]).name.startswith("python") and len(command) > 1 else command)
    return [" ".join(words[:2]), *words[2:]] if words[0] == "-m" else words


def found_in(path: str, arguments: Sequence[str], seen: Mapping[str, Any]) -> Script:
    """What a study sets of a script, in what was seen of it.

    Raises:
        StudyFileError: it was not seen.
    """
    if not seen["passes"]:
        why = (
            seen["error"] or "it iterates no torch DataLoader with an optimizer and a model in training mode"
        )
        raise StudyFileError(f"{path}: no training was found: {why}")
    values: Mapping[str, float] = seen["values"]
    rate, seed = seen["rates"][0], seen["seed"]
    told = {
        "batch": _named(values, _BATCH, seen["batch"], _OTHERS) or _only(values, seen["batch"], _OTHERS),
        "rate": _named(values, _RATE, rate, _NO_RATE) or _named(values, "rate", rate, _NO_RATE),
        "epochs": _longest(values, seen["passes"]) if seen["cut"] else _length(values, seen["passes"]),
        "seed": ""
        if seed is None
        else _named(values, "seed", seed, "data|split") or _named(values, "rng|random", seed, "^$"),
    }
    passes = round(values[told["epochs"]]) if seen["cut"] and told["epochs"] else seen["passes"]
    after = metric_in(seen["lines"], seen["passes"])
    metric = after or metric_in(seen["early"], seen["passes"])
    evaluates = after is not None and seen["evaluates"]
    faults: list[Fault] = []
    for what, got in (
        ("batch", seen["batch"]),
        ("rate", seen["rates"][0]),
        ("epochs", f"{seen['passes']} passes"),
    ):
        if not told[what]:
            numbers = (
                ", ".join(f"{name} {number(value)}" for name, value in islice(values.items(), _MOST_NUMBERS))
                or "none"
            )
            expected = (
                f"{path}: expected a flag, a number in its text, or a file that tells its {what}, {got}"
            )
            why = _why_no_length(values, seen["passes"]) if what == "epochs" else ""
            faults.append(Fault(what, f"{expected}; it has {numbers}{why}"))
    if metric is None:
        lines = "; ".join(line.strip()[:100] for line in seen["lines"][:3]) or "nothing"
        expected = f"{path}: expected a number after a word such as accuracy or loss, printed after a pass"
        faults.append(Fault("metric", f"{expected}; got {lines}"))
    faults += [
        Fault("evaluation", f"{path}: expected loaders of at least one batch, got none of {size} ({kind})")
        for kind, size, batches in seen["loaders"]
        if size and not batches
    ]
    if faults and seen["error"]:
        faults.append(Fault("error", f"{path}: it ended with {seen['error']}"))
    if faults:
        raise StudyFileError(faults)
    assert metric is not None
    kept = {what: how for what, how in told.items() if how}
    settings = seen["batch"], rate, passes, seen["samples"], seen["optimizer"]
    others = tuple(one for one in dict.fromkeys(seen["rates"]) if not math.isclose(one, rate))
    return Script(
        *(path, shlex.join(arguments), kept, *settings, metric),
        counts=tuple(seen["counts"]),
        sums=seen["sums"],
        seed=seed or 0,
        other_rates=others,
        evaluates=evaluates,
        loaders=[*dict.fromkeys(map(tuple, seen["loaders"]))],
    )


def _named(values: Mapping[str, float], words: str, value: float, not_words: str) -> str:
    """The flag or number of this value with such a name; of several the first kind's shortest; empty where there is none."""
    found = [
        name
        for name, has in values.items()
        if math.isclose(has, value, rel_tol=1e-9)
        and re.search(words, name.lower())
        and not re.search(not_words, name.lower())
    ]
    return min(found, key=lambda name: (KINDS.index(kind_of(name)), len(name)), default="")


def _only(values: Mapping[str, float], value: float, not_words: str) -> str:
    """The only flag of this value, whatever it is called: a trial checks whether it is obeyed."""
    flags = [name for name, has in values.items() if kind_of(name) == "flag" and has == value]
    return flags[0] if len(flags) == 1 and value > 1 and not re.search(not_words, flags[0].lower()) else ""


def _length(values: Mapping[str, float], passes: int) -> str:
    """The number of epochs; or what else a loop over so many passes has in its text."""
    named = _named(values, _LENGTH, passes, _NO_LENGTH) or _named(values, r" in range\(", passes, "^$")
    return named or _only(values, passes, _NO_LENGTH)


def _why_no_length(values: Mapping[str, float], passes: int) -> str:
    """What may be the cause that no number of epochs was found, as a sentence."""
    named = {
        name: value for name, value in values.items() if _named({name: value}, _LENGTH, value, _NO_LENGTH)
    }
    for name, value in named.items():
        if value > passes:
            return f". It ended before {name} {number(value)}: if it stops early, turn that off, since a study does so"
        if value > 1 and passes % value == 0:
            return f". It made {passes / value:.0f} times {name} {number(value)}: let it train once"
    steps = [
        name for name, value in values.items() if re.search("step|iter", name.lower()) and value >= passes > 1
    ]
    return f". A loop over {steps[0]} is not taken over: see docs/scripts.md" if steps else ""


def _longest(values: Mapping[str, float], passes: int) -> str:
    """The number of epochs of a script that was not seen to its end."""
    found = {
        name: value
        for name, value in values.items()
        if value >= passes and _named({name: value}, _LENGTH, value, _NO_LENGTH)
    }
    return _named(found, _LENGTH, max(found.values(), default=0), _NO_LENGTH)


def metric_in(lines: Sequence[str], passes: int = 0) -> tuple[str, str, Direction | None] | None:
    """The text before the metric, as a regular expression, its name and the direction that says, in lines written after passes.

    Args:
        passes: over the training data, after each of which the metric is written at most once; 0 where that is not known.

    >>> metric_in(["Test set: Average loss: 2.28, Accuracy: 66/397 (17%)"])
    ('Accuracy:', 'accuracy', 'maximize')
    >>> metric_in(["epoch 3", "train loss 0.3 acc 0.9 | val loss 0.4 acc 0.8"])
    ('val.*?acc', 'val_acc', 'maximize')
    """
    labels = [one for line in reversed(lines) for one in _labels(line)]

    def rank(text: str) -> tuple[int, int, bool]:
        kinds = _VALIDATION, _HELD_OUT, f"^(?!.*{_TRAINING})", ""  # of training data last of all
        data = next(place for place, kind in enumerate(kinds) if re.search(kind, text.lower()))
        pattern = metric_pattern(text)
        return (
            data,
            -min(sum(bool(pattern.search(line)) for line in lines), passes),
            direction_of(text) == "minimize",
        )

    for text, line in sorted(labels, key=lambda one: rank(one[0])):
        name = re.sub(r"\W+", "_", re.sub(r"\.\*\?|\(.*?\)", " ", text).strip(" :=").lower()).strip("_")
        # A running maximum, said beside it, is of another pass.
        if any(re.search(rf"(?:{'|'.join(_RUNNING)})[ _]{text}", one) for one in lines):
            text = "".join(rf"(?<!{word}[ _])" for word in _RUNNING) + text
        if any(re.search(f"[A-Za-z]{text}", one) for one in lines):  # within another word
            text = f"(?<![A-Za-z]){text}"
        if len({value_of(one) for one in metric_pattern(text).finditer(line)}) == 1:
            text = _of_one_line(text, lines, passes)
            return text, "accuracy" if name in ("acc", "accuracy") else name, direction_of(name)
    return None


def _of_one_line(text: str, lines: Sequence[str], passes: int) -> str:
    r"""The text with the beginning of its line, where several lines have it after a pass: of those after most passes, the last.

    >>> _of_one_line("Acc@1", ["Test: [0/9] Acc@1 3.1", " * Acc@1 3.2", "Test: [0/9] Acc@1 3.5", " * Acc@1 4.0"], 2)
    '^\\s*\\*\\s+Acc@1'
    """
    found = [(line, one) for line in lines for one in metric_pattern(text).finditer(line)]
    if not passes or len(found) <= passes:
        return text
    beginnings = Counter[str]()
    for line, one in found:
        parts = re.findall(r"\s+|\d[\d.]*|[^\s\d]+", line[: one.start()].lstrip())
        beginnings[r"^\s*" + "".join(map(_pattern_of, parts))] += 1
    often = [one for one, times in beginnings.items() if times <= passes]
    most = max((beginnings[one] for one in often), default=0)
    return [one for one in often if beginnings[one] == most][-1] + text if often else text


def _pattern_of(part: str) -> str:
    """What any other line has in the place of a blank, a number or a word."""
    return r"\s+" if part.isspace() else r"[\d.]+" if part[0].isdigit() else re.escape(part)


def _labels(line: str) -> Iterator[tuple[str, str]]:
    """Texts before numbers in a line that are called as metrics are, each with the line; longer where there are several."""
    words, ends = _METRIC, r"['\"]?(?:\s*\(%\))?\s*[:=]?\s*(?=[-+]?\.?\d)"
    named = rf"(?<![a-z])(?:{words})(?:[_ -](?:{words}|train|val|test)(?![a-z]))*(?![\w@])"
    labels = list(re.finditer(rf"(?i)(?:[a-z]+\.?[_ /-]){{0,2}}{named}{ends}", line))
    labels = labels or list(re.finditer(rf"(?i)\b(?:{words})\b[^:=|,\n]*[:=]\s*(?=[-+]?\.?\d)", line))
    for label in labels:
        around = line[max(0, label.start() - 6) : label.end()].lower()
        # Or two numbers, of both.
        if re.search(_BEST, around) or (re.search(_TRAINING, around) and re.search(_HELD_OUT, around)):
            continue
        if not re.search(_HELD_OUT, around) and re.search(
            rf"(?i){_HELD_OUT}\W{{0,3}}\d", line[label.end() :]
        ):
            continue  # `accuracy 0.9 - val 0.8`: of training data
        text = re.sub(r"([.^$*+?{}\[\]\\|()])", r"\\\1", label[0].strip())
        text = re.sub(r"(?<= )\d+(?= ?[:=])", r"\\d+", text)  # of an epoch
        if sum(one[0].strip() == label[0].strip() for one in labels) > 1:
            before = [*re.finditer(rf"(?i){_HELD_OUT}\w*", line[: label.start()])]
            if not before:
                continue
            text = f"{before[-1][0]}.*?{text.split()[-1]}"
        yield text, line


TASKS = '''"""{path} as it is, as a task: its batch, rate, length and seed are the study's. See docs/scripts.md."""

from bsearch.objectives.script.script import run_script


def train(setup):
    yield from run_script(
        setup,
        {path!r},
        {arguments!r},
{told}
        metric={metric!r},  # in what it prints or logs; the number that follows is the metric
        loss={loss!r},  # over a batch's samples: their "mean" or "sum"
        splits={splits},  # {why}
        evaluates={evaluates},  # whether only what it writes after an evaluation by a loader is the metric
        # Its loaders as it makes them by itself: samples, batch, number of batches; zeros: it trains on it.
        evaluation={evaluation},
    )
'''

STUDY = """# {path} as it is; tasks.py says how it is told what a trial sets. `bsearch check study.yaml` tells if that is exact.
study: {name}
task: tasks.py:train

space:
  effective_batch: {{low: {low}, high: {high}}}
  reference_rate: {{low: {least:.3g}, high: {most:.3g}, at_batch: {batch}}}
  rule: {rule}
  epochs: {epochs}

training: {{schedule: constant, warmup: 0{seed}}}   # the script has its own
objectives: {{metric: {{name: {metric}{direction}}}}}
budget: {{trials: 20}}
baseline:
  - {{effective_batch: {batch}, reference_rate: {rate:.6g}, epochs: {passes}, rule: {first}}}
"""


def files_of(script: Script) -> dict[str, str]:
    """The study of a script: study.yaml and tasks.py, by name."""
    told = "\n".join(f"        {what}={how!r}," for what, how in script.told.items())
    text, name, direction = script.metric
    stem = Path(script.path).stem if script.path.endswith(".py") else script.path.removeprefix("-m ")
    rules = ["linear", "sqrt"] if script.optimizer == "SGD" else ["sqrt"]
    high = max(min(script.samples // 3, 64 * script.batch), script.batch)
    study = STUDY.format(
        path=script.path,
        name=re.sub(r"\W+", "-", stem),
        low=max(1, script.batch // 8),
        high=high,
        least=script.rate / 20,
        most=script.rate * 20,
        batch=script.batch,
        rate=script.rate,
        rule=f"[{', '.join(rules)}]",
        first=rules[0],
        epochs=f"{{low: {max(1, script.passes // 4)}, high: {script.passes}}}" if script.passes > 1 else "1",
        passes=script.passes,
        seed=f", seed: {script.seed}" if "seed" in script.told and 0 < script.seed < 2**32 else "",
        metric=name,
        direction="" if direction is None else f", direction: {direction}",
    )
    why = "whether a batch that does not fit comes in parts"
    if script.counts:
        why = f"{script.counts[0]} uses a count of batches, which would count parts; True, if that changes nothing"
    tasks = TASKS.format(
        path=script.path,
        arguments=script.arguments,
        told=told,
        metric=text,
        splits=not script.counts,
        evaluates=script.evaluates,
        evaluation=script.loaders,
        why=why,
        loss="sum" if script.sums else "mean",
    )
    return {"study.yaml": study, "tasks.py": tasks}
