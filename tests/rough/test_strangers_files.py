"""Files of other people for `ask`, `init --from` and `show --profile`: large, mutated, full of what terminals and YAML read.

Each attack ends soon, within memory, with a sentence of ours. Attacks that break at one place of the code are one fault: its
first is reported, so "broken" counts places (and, of limits, attacks).
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import random
import re
import sqlite3
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from helpers import bsearch
from tiny import tiny_study

KIND = "files of strangers"
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
SEED = int(os.environ.get("BSEARCH_SEED", date.today().isocalendar().week))
TIMES = int(os.environ.get("BSEARCH_ATTACKS_EACH", "150"))
BUG = ("internal error", "a bug in bsearch")
# What a terminal interprets: control characters but for line feeds and tabs, and what turns the direction of writing.
INTERPRETED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
Files = dict[str, bytes]
Rows = list[dict[str, Any]]

# ---------------------------------------------------------------- sources that are well


def rows(count: int = 12) -> Rows:
    return [
        {
            "batch_size": 16 * 2 ** (place % 4),
            "lr": round(0.01 * (1 + place % 5) * 1.1**place, 6),
            "val_acc": round(0.5 + 0.01 * place, 4),
            "train_s": 10.5 + place,
            "epochs": 1 + place % 3,
            "weight_decay": [0.1, 0.01][place % 2],
            "optimizer": ["adam", "sgd"][place % 2],
            "seed": place,
        }
        for place in range(count)
    ]


SETTINGS = ("batch_size", "lr", "epochs", "weight_decay", "optimizer", "seed")


def parts(row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    settings = {name: value for name, value in row.items() if name in SETTINGS}
    return settings, {name: value for name, value in row.items() if name not in SETTINGS}


def as_csv(table: Rows) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]))
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue().encode("utf-8", "surrogatepass")


def csv_source() -> Files:
    return {"runs.csv": as_csv(rows())}


def tsv_source() -> Files:
    return {"runs.tsv": as_csv(rows()).replace(b",", b"\t")}


def json_source() -> Files:
    each = [dict(zip(("config", "summary"), parts(row), strict=True)) for row in rows()]
    return {"runs.json": json.dumps({"runs": each}).encode()}


def jsonl_source() -> Files:
    return {"runs.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in rows())}


def parquet_source() -> Files:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows()), file)
    return {"runs.parquet": file.getvalue()}


def trainer_source() -> Files:
    files: Files = {}
    for place, row in enumerate(rows()):
        history = [
            {"eval_accuracy": row["val_acc"] - 0.1, "step": 5},
            {"eval_accuracy": row["val_acc"], "step": 10},
        ]
        steps = 1280 // row["batch_size"]
        state = {
            "global_step": steps,
            "max_steps": steps,
            "epoch": 1.0,
            "num_train_epochs": 1,
            "train_batch_size": row["batch_size"],
        }
        history += [{"train_runtime": row["train_s"], "train_loss": 0.5, "step": 10}]
        arguments = {
            "learning_rate": row["lr"],
            "per_device_train_batch_size": row["batch_size"],
            "seed": place,
        }
        files[f"run{place}/trainer_state.json"] = json.dumps({**state, "log_history": history}).encode()
        files[f"run{place}/args.json"] = json.dumps(arguments).encode()
    return files


def lightning_source() -> Files:
    files: Files = {}
    for place, row in enumerate(rows()):
        settings, results = parts(row)
        files[f"v{place}/hparams.yaml"] = yaml.safe_dump(settings).encode()
        files[f"v{place}/metrics.csv"] = as_csv(
            [{"epoch": 0, "step": step, **results} for step in (1, 1280 // row["batch_size"])]
        )
    return files


def tune_source() -> Files:
    files: Files = {}
    data = []
    for place, row in enumerate(rows()):
        settings, results = parts(row)
        files[f"t{place}/params.json"] = json.dumps(settings).encode()
        report = {
            "training_iteration": 1,
            "time_total_s": results["train_s"],
            "done": True,
            "val_acc": results["val_acc"],
        }
        files[f"t{place}/result.json"] = json.dumps(report).encode() + b"\n"
        data.append([json.dumps({"relative_logdir": f"t{place}", "status": "TERMINATED"}), "{}"])
    files["experiment_state-2026.json"] = json.dumps({"trial_data": data}).encode()
    return files


def wandb_log(records: list[bytes]) -> bytes:
    """A LevelDB log; records have to be short."""
    log = b":W&B" + b"\0" * 3
    for record in records:
        while (rest := 32768 - len(log) % 32768) < 7 + len(record):
            log += b"\0" * rest
        log += struct.pack("<IHB", zlib.crc32(b"\1" + record), len(record), 1) + record
    return log


def wandb_records(row: dict[str, Any], place: int) -> list[bytes]:
    record_type = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record
    settings, results = parts(row)
    begun, logged, summed, ended = (record_type() for _ in range(4))
    begun.run.run_id, begun.run.project = f"id{place}", "p"
    for name, value in settings.items():
        begun.run.config.update.add(key=name, value_json=json.dumps(value))
    for name, value in {"val_acc": results["val_acc"], "_step": 1, "_runtime": results["train_s"]}.items():
        logged.history.item.add(key=name, value_json=json.dumps(value))
        summed.summary.update.add(key=name, value_json=json.dumps(value))
    ended.exit.exit_code = 0
    return [each.SerializeToString() for each in (begun, logged, summed, ended)]


def wandb_source() -> Files:
    return {
        f"wandb/run-20260101_0000{place:02}-id{place}/run-id{place}.wandb": wandb_log(
            wandb_records(row, place)
        )
        for place, row in enumerate(rows())
    }


def event_file(events: list[bytes]) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    file = io.BytesIO()
    writer = RecordWriter(file)
    for event in events:
        writer.write(event)
    return file.getvalue()


def events_of(row: dict[str, Any]) -> list[bytes]:
    event_type = pytest.importorskip("tensorboard.compat.proto.event_pb2").Event
    hparams = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2").HParamsPluginData
    settings, results = parts(row)
    begun = event_type(wall_time=1.7e9, file_version="brain.Event:2")
    content = hparams(version=0)
    for name, value in settings.items():
        if isinstance(value, str):
            content.session_start_info.hparams[name].string_value = value
        else:
            content.session_start_info.hparams[name].number_value = value
    told = event_type(wall_time=1.7e9 + 1)
    value = told.summary.value.add(tag="_hparams_/session_start_info")
    value.metadata.plugin_data.plugin_name = "hparams"
    value.metadata.plugin_data.content = content.SerializeToString()
    logged = event_type(wall_time=1.7e9 + row["train_s"], step=3)
    logged.summary.value.add(tag="val_acc", simple_value=results["val_acc"])
    tensor = logged.summary.value.add(tag="train_loss")
    tensor.metadata.plugin_data.plugin_name = "scalars"
    tensor.tensor.dtype = 1
    tensor.tensor.float_val.append(1 - results["val_acc"])
    return [each.SerializeToString() for each in (begun, told, logged)]


def tensorboard_source() -> Files:
    return {
        f"r{place}/events.out.tfevents.1.h": event_file(events_of(row)) for place, row in enumerate(rows())
    }


def optuna_source() -> Files:
    import tempfile

    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/o.db"
        study = optuna.create_study(study_name="s", storage=url, direction="maximize")
        for row in rows():
            settings, results = parts(row)
            domains = {
                "batch_size": optuna.distributions.IntDistribution(1, 1000),
                "lr": optuna.distributions.FloatDistribution(1e-6, 10.0),
                "optimizer": optuna.distributions.CategoricalDistribution(["adam", "sgd"]),
            }
            study.add_trial(
                optuna.trial.create_trial(
                    params={name: settings[name] for name in domains},
                    distributions=domains,
                    value=results["val_acc"],
                    user_attrs={"params_m": results["train_s"], "note": "x"},
                    intermediate_values={1: 0.1, 2: 0.2},
                )
            )
        study._storage.remove_session()  # type: ignore[attr-defined]
        return {"o.db": Path(folder, "o.db").read_bytes()}


def mlflow_source() -> Files:
    """A store of files, as MLflow writes it."""
    pytest.importorskip("mlflow")
    experiment = {
        "artifact_location": "file:///x",
        "creation_time": 1,
        "experiment_id": "1",
        "last_update_time": 1,
    }
    experiment |= {"lifecycle_stage": "active", "name": "e"}
    files: Files = {"1/meta.yaml": yaml.safe_dump(experiment).encode()}
    for place, row in enumerate(rows()):
        settings, results = parts(row)
        name = f"{place:032x}"
        info = {
            "artifact_uri": "file:///x",
            "end_time": 1700000000000 + int(1000 * results["train_s"]),
            "entry_point_name": "",
        }
        info |= {
            "experiment_id": "1",
            "lifecycle_stage": "active",
            "run_id": name,
            "run_uuid": name,
            "run_name": f"r{place}",
        }
        info |= {
            "source_name": "",
            "source_type": 4,
            "source_version": "",
            "start_time": 1700000000000,
            "status": 3,
        }
        info |= {"tags": [], "user_id": "u"}
        files[f"1/{name}/meta.yaml"] = yaml.safe_dump(info).encode()
        files[f"1/{name}/tags/mlflow.runName"] = f"r{place}".encode()
        files[f"1/{name}/artifacts/x"] = b""
        for key, value in settings.items():
            files[f"1/{name}/params/{key}"] = str(value).encode()
        for key, value in results.items():
            files[f"1/{name}/metrics/{key}"] = f"1700000000000 {value} 1\n1700000000001 {value} 2\n".encode()
    return files


# By kind: what is written, and the source's name in its folder.
SOURCES: dict[str, tuple[Callable[[], Files], str]] = {
    "csv": (csv_source, "{}/runs.csv"),
    "tsv": (tsv_source, "{}/runs.tsv"),
    "json": (json_source, "{}/runs.json"),
    "jsonl": (jsonl_source, "{}/runs.jsonl"),
    "parquet": (parquet_source, "{}/runs.parquet"),
    "trainer": (trainer_source, "trainer:{}"),
    "lightning": (lightning_source, "lightning:{}"),
    "tune": (tune_source, "tune:{}"),
    "wandb": (wandb_source, "wandb:{}"),
    "tensorboard": (tensorboard_source, "tensorboard:{}"),
    "optuna": (optuna_source, "optuna:sqlite:///{}/o.db"),
    "mlflow": (mlflow_source, "mlflow:file://{}#e"),
}


def put(folder: Path, files: Files) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


# ---------------------------------------------------------------- commands, and what is asked of them


def run(*arguments: object) -> Result:
    result = bsearch(*arguments)
    result.again = arguments  # type: ignore[attr-defined]
    return result


def place_of(text: str) -> str:
    """The last line of this package in a traceback."""
    found = re.findall(
        r'File "[^"]*?/((?:search|spaces|commands|extras|objectives|cluster)/[^"]+)", line (\d+)', text
    )
    return ":".join(found[-1]) if found else "?"


def well(result: Result, seen: set[str], what: str, *, named: str = "") -> None:
    """It ended in words. A fault at a place that is known already is none of its own.

    Args:
        named: what a refusal has to name.
    """
    error = result.exception
    output = result.output + result.stderr
    broken = ""
    if error is not None and not isinstance(error, SystemExit):
        broken = f"escaped: {error!r}"
    elif any(word in output for word in BUG):
        told = result.stderr.rpartition("internal error: ")[2].partition("\nThis is a bug")[0]
        told = re.sub(r"\n *For further information.*|\[type=", " ", told).replace("\n", " ")
        again = bsearch("--debug", *result.again)  # type: ignore[attr-defined]
        broken = f"{told[:400]} at {place_of(again.stderr)}"
    elif result.exit_code not in (0, 1, 2):
        broken = f"exit code {result.exit_code}"
    elif result.exit_code and named and named not in output:
        broken = f"the message names no {named}: {output[-300:]}"
    kind = (
        re.sub(r"-?[\d.]+(e[+-]?\d+)?|'[^']*'|got.*", "", broken)[:90]
        if "Validation" in broken
        else broken.partition(":")[0]
    )
    key = f"{kind} {broken.rpartition(' at ')[2][:60]}"
    if broken and key not in seen:
        seen.add(key)
        raise AssertionError(f"{broken} <- {what}")


def is_plain(result: Result, what: str, seen: set[str] | None = None, where: str = "") -> None:
    """Nothing that a terminal interprets was printed; one fault for each command and place that a text stands at."""
    for name, text in (("stdout", result.stdout), ("stderr", result.stderr)):
        found = INTERPRETED.search(text)
        if found is None or (seen is not None and f"{name} {where}" in seen):
            continue
        if seen is not None:
            seen.add(f"{name} {where}")
        raise AssertionError(f"{name} of {what}: {text[max(0, found.start() - 60) : found.end() + 20]!r}")


def is_readable(folder: Path, what: str) -> None:
    """What was written is YAML, Python and JSON, without characters that turn a reader's eyes."""
    study, tasks, old = (folder / name for name in ("study.yaml", "tasks.py", "old-runs.jsonl"))
    if not study.exists():
        return
    try:
        assert isinstance(yaml.safe_load(study.read_text()), dict)
        compile(tasks.read_text(), "tasks.py", "exec")
        for line in old.read_text().splitlines():
            json.loads(line)
    except (yaml.YAMLError, SyntaxError, ValueError) as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from None
    for path in (study, tasks, old):
        assert not INTERPRETED.search(path.read_text()), f"{what}: {path.name} holds a control character"


# ---------------------------------------------------------------- limits, each in a process of its own

CHILD = """
import json, resource, sys, time, warnings
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from bsearch.cli import main
from click.testing import CliRunner
CliRunner().invoke(main, ["ask", sys.argv[2]])  # what is imported is no attack's
began = time.monotonic()
result = CliRunner().invoke(main, ["--debug", *json.loads(sys.argv[1])])
error = result.exception
escaped = "" if error is None or isinstance(error, SystemExit) else repr(error)[:500]
found = {"code": result.exit_code, "out": result.stdout[-3000:], "err": result.stderr[-3000:], "escaped": escaped}
peak = open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]  # getrusage counts what forked it
found |= {"long": len(result.stdout) + len(result.stderr), "mib": int(peak) // 1024}
print("\\n" + json.dumps(found | {"s": time.monotonic() - began}))
"""
MOST_S, MOST_MIB = 10.0, 1500


def limited(attacked: list[str], small: Path) -> None:
    """A command in a process of its own ends in words, soon and within memory."""
    command = [sys.executable, "-c", CHILD, json.dumps(attacked), str(small)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=16, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise AssertionError("it did not end within 14 s") from None
    assert done.returncode == 0, f"died with {done.returncode}: {done.stderr[-500:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    output, spent = found["out"] + found["err"], f"({found['s']:.1f} s, {found['mib']} MiB)"
    assert not found["escaped"], f"escaped {spent}: {found['escaped']}"
    assert not any(word in output for word in BUG), (
        f"{output.splitlines()[-2:]} at {place_of(output)} {spent}"
    )
    assert found["code"] in (0, 1, 2), f"exit code {found['code']}"
    assert found["s"] < MOST_S, f"took {found['s']:.0f} s"
    assert found["mib"] < MOST_MIB, f"took {found['mib']} MiB"
    assert found["long"] < 200_000, f"printed {found['long']} characters"
    assert "Warning" not in found["err"], f"warned: {found['err'][-300:]}"


def stored(data: bytes, *, packed: bool = False) -> bytes:
    """Pickled arguments as `torch.save` has them."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        archive.writestr("training_args/data.pkl", data)
    return file.getvalue()


def arguments(data: bytes, *, packed: bool = False) -> Files:
    files = {name: content for name, content in trainer_source().items() if not name.endswith("args.json")}
    return files | {"run0/training_args.bin": stored(data, packed=packed)}


# Of an object of any class whose state is on the stack's top.
STATED = b"\x80\x04cm\nC\n)\x81}X\x01\x00\x00\x00a%ssb."
NESTED = b")" + b"2\x86" * 60  # a tuple of a tuple twice, and so on


def lightning_with(text: str) -> Files:
    return {**lightning_source(), "v0/hparams.yaml": text.encode()}


def laughs(levels: int, width: int, first: str = "[1,1,1,1,1,1,1,1]") -> str:
    """YAML of a few lines that stands for width^levels values."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * width)}]" for level in range(1, levels)]
    return "\n".join(lines) + "\n"


def mapping_laughs(levels: int, width: int) -> str:
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} {{{', '.join(f'k{key}: *a{level - 1}' for key in range(width))}}}")
    return "\n".join(lines) + "\n"


def merges(levels: int) -> str:
    """Keys that are merged twice as many times at each level."""
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{level}: &a{level} {{<<: [*a{level - 1}, *a{level - 1}]}}" for level in range(1, levels)]
    return "\n".join(lines) + "\n"


def wide(columns: int, name: str = "column {}", count: int = 3) -> bytes:
    table = rows(count)
    header = [*table[0], *(name.format(place) for place in range(columns))]
    lines = [
        [*map(str, row.values()), *(str(place + at) for at in range(columns))]
        for place, row in enumerate(table)
    ]
    return "\n".join(",".join(line) for line in [header, *lines]).encode() + b"\n"


def parquet_of(**columns: Any) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file, compression="zstd")
    return file.getvalue()


def parquet_rows(count: int) -> bytes:
    import numpy as np

    return parquet_of(
        lr=np.full(count, 0.1, "f4"), batch_size=np.full(count, 8, "i1"), val_acc=np.full(count, 0.5, "f4")
    )


def parquet_list() -> bytes:
    import pyarrow as pa

    return parquet_of(a=pa.array([[0] * 1], pa.list_(pa.int8())), b=pa.array([pa.scalar("x" * (1 << 28))]))


def record(length: int, event: bytes = b"") -> bytes:
    """A record of TensorBoard's whose header says this length."""
    from tensorboard.summary.writer.record_writer import masked_crc32c

    header = struct.pack("<Q", length)
    return header + struct.pack("<I", masked_crc32c(header)) + event + struct.pack("<I", masked_crc32c(event))


def huge_tensor(size: int, *, value: bool = True) -> bytes:
    event_type = pytest.importorskip("tensorboard.compat.proto.event_pb2").Event
    event = event_type(wall_time=1.7e9, step=1)
    told = event.summary.value.add(tag="val_acc")
    told.metadata.plugin_data.plugin_name = "scalars"
    told.tensor.dtype = 1
    told.tensor.tensor_shape.dim.add(size=size)
    if value:
        told.tensor.float_val.append(0.5)
    return event_file([event.SerializeToString()])


def retime_with(profile: str) -> tuple[Files, list[str]]:
    return {"profile.json": profile.encode()}, ["show", "{study}", "--profile", "{}/profile.json"]


STUDY = """study: small
task: tasks.py:Points
space:
  effective_batch: {low: 8, high: 16}
  reference_rate:
    low: 0.1
    high: 0.5
  rule: [linear, sqrt]
  epochs: 1
training: {evaluations: 1}
objectives:
  metric: {name: accuracy, direction: maximize}
budget:
  trials: 2
  profile_s: 0
"""


def study(text: str) -> tuple[Files, list[str]]:
    return {"study.yaml": (STUDY + text).encode()}, ["ask", "{}/study.yaml"]


def ask(files: Files, source: str, *more: str) -> tuple[Files, list[str]]:
    return files, ["ask", source, *more]


def deep(levels: int = 100_000) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


DIGITS = b"1" * 4301
LIMITS: dict[str, Callable[[], tuple[Files, list[str]]]] = {
    "pickle: nested tuples as a key": lambda: ask(
        arguments(STATED % (b"}" + NESTED + b"K\x01s") + b""), "trainer:{}"
    ),
    "pickle: nested tuples in a set": lambda: ask(
        arguments(STATED % (b"\x8f(" + NESTED + b"\x90")), "trainer:{}"
    ),
    "pickle: nested tuples in an error": lambda: ask(arguments(b"\x80\x04" + NESTED + b"."), "trainer:{}"),
    "pickle: nested tuples called": lambda: ask(arguments(b"\x80\x04" + NESTED + b")R."), "trainer:{}"),
    "pickle: 3 GB of bytearray8": lambda: ask(
        arguments(b"\x80\x05\x96" + struct.pack("<Q", 3 << 30) + b"."), "trainer:{}"
    ),
    "pickle: 2^62 of bytearray8": lambda: ask(
        arguments(b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b"."), "trainer:{}"
    ),
    "pickle: 2^40 of frame": lambda: ask(
        arguments(b"\x80\x05\x95" + struct.pack("<Q", 1 << 40) + b"."), "trainer:{}"
    ),
    "pickle: 2^40 of bytes": lambda: ask(
        arguments(b"\x80\x05\x8e" + struct.pack("<Q", 1 << 40) + b"."), "trainer:{}"
    ),
    "pickle: four million sets": lambda: ask(
        arguments(b"\x80\x04" + b"\x8f" * ((1 << 22) - 9), packed=True), "trainer:{}"
    ),
    "pickle: a million objects": lambda: ask(
        arguments(b"\x80\x04cm\nC\n" + b"2)R0" * ((1 << 20) - 9), packed=True), "trainer:{}"
    ),
    "pickle: an int of 7,000 digits": lambda: ask(
        arguments(STATED % (b"\x8b" + struct.pack("<i", 3000) + b"\x7f" * 3000)), "trainer:{}"
    ),
    "pickle: an int of a million digits": lambda: ask(
        arguments(STATED % (b"\x8b" + struct.pack("<i", 500_000) + b"\x7f" * 500_000)), "trainer:{}"
    ),
    "zip: a bomb of arguments": lambda: ask(arguments(bytes(1 << 28), packed=True), "trainer:{}"),
    "json: 100,000 levels": lambda: ask({"runs.json": deep()}, "{}/runs.json"),
    "jsonl: 100,000 levels": lambda: ask({"runs.jsonl": deep()}, "{}/runs.jsonl"),
    "json: 900 levels": lambda: ask({"runs.json": b"[" + deep(900) + b"]"}, "{}/runs.json"),
    "json: 4,301 digits": lambda: ask({"runs.json": b'[{"lr": ' + DIGITS + b"}]"}, "{}/runs.json"),
    "csv: 4,301 digits": lambda: ask(
        {"runs.csv": as_csv(rows()).replace(b"0.01,", DIGITS + b",", 1)}, "{}/runs.csv"
    ),
    "csv: 20,000 columns": lambda: ask({"runs.csv": wide(20_000)}, "{}/runs.csv"),
    "csv: 200,000 columns": lambda: ask({"runs.csv": wide(200_000)}, "{}/runs.csv"),
    "csv: 20,000 metrics": lambda: ask({"runs.csv": wide(20_000, "val_loss {}")}, "{}/runs.csv"),
    "csv: 20,000 metrics, init": lambda: (
        {"runs.csv": wide(20_000, "m{}_loss")},
        ["init", "{}/out", "--from", "{}/runs.csv"],
    ),
    "csv: 20,000 rates": lambda: ask({"runs.csv": wide(20_000, "a{}.lr")}, "{}/runs.csv"),
    "csv: 20,000 names like a mistyped one": lambda: ask(
        {"runs.csv": wide(20_000, "learning_rat_{}")}, "{}/runs.csv", "--map", "learning_rate=learning_rate"
    ),
    "csv: 1,000 columns of 1,000 rows": lambda: ask({"runs.csv": wide(1000, count=1000)}, "{}/runs.csv"),
    "csv: a name of 100,000 characters": lambda: ask(
        {"runs.csv": wide(1, "val_loss " * 11_000 + "{}")}, "{}/runs.csv"
    ),
    "csv: a cell of 120,000 spaces": lambda: ask(
        {"runs.csv": as_csv(rows()).replace(b"0.01,", b"0" + b" " * 120_000 + b"1,", 1)}, "{}/runs.csv"
    ),
    "csv: one line of 200 MB": lambda: ask({"runs.csv": b"a,b\n" + b"1" * (200 << 20)}, "{}/runs.csv"),
    "jsonl: one line of 100 MB": lambda: ask(
        {"runs.jsonl": b'{"a": "' + b"1" * (100 << 20)}, "{}/runs.jsonl"
    ),
    "json: a million curves' ends": lambda: ask(
        {"runs.json": json.dumps([{**row, "val_loss": [0.5] * 100_000} for row in rows()]).encode()},
        "{}/runs.json",
    ),
    "parquet: fifty million rows": lambda: ask({"runs.parquet": parquet_rows(50_000_000)}, "{}/runs.parquet"),
    "parquet: a text of 256 MiB": lambda: ask({"runs.parquet": parquet_list()}, "{}/runs.parquet"),
    "yaml: 440 bytes of aliases": lambda: ask(lightning_with(laughs(9, 9)), "lightning:{}"),
    "yaml: 440 bytes of aliases, mappings": lambda: ask(lightning_with(mapping_laughs(9, 9)), "lightning:{}"),
    "yaml: merged keys": lambda: ask(lightning_with(merges(30)), "lightning:{}"),
    "yaml: a hundred thousand aliases": lambda: ask(
        lightning_with("a: &a {x: 1}\n" + "".join(f"k{at}: *a\n" for at in range(20_000))), "lightning:{}"
    ),
    "yaml: 3 MB of text": lambda: ask(
        lightning_with("".join(f"key{at}: value\n" for at in range(200_000))), "lightning:{}"
    ),
    "yaml: 100,000 levels": lambda: ask(lightning_with("[" * 100_000), "lightning:{}"),
    "yaml: hexadecimal of 5,000 digits": lambda: ask(lightning_with(f"lr: 0x{'f' * 5000}\n"), "lightning:{}"),
    "yaml: sexagesimal without end": lambda: ask(
        lightning_with("lr: 1" + ":10" * 100_000 + "\n"), "lightning:{}"
    ),
    "mlflow: aliases": lambda: ask(
        {**mlflow_source(), "1/meta.yaml": laughs(30, 9).encode()}, "mlflow:file://{}#e"
    ),
    "mlflow: a run's merged keys": lambda: ask(
        {**mlflow_source(), f"1/{0:032x}/meta.yaml": merges(30).encode()}, "mlflow:file://{}#e"
    ),
    "tune: params of 100,000 levels": lambda: ask({**tune_source(), "t0/params.json": deep()}, "tune:{}"),
    "tune: state of 100,000 levels": lambda: ask(
        {**tune_source(), "experiment_state-2026.json": deep()}, "tune:{}"
    ),
    "tensorboard: a record of 2^30": lambda: ask(
        {"r/events.out.tfevents.1": record(1 << 30)}, "tensorboard:{}"
    ),
    "tensorboard: a record of 2^40": lambda: ask(
        {"r/events.out.tfevents.1": record(1 << 40)}, "tensorboard:{}"
    ),
    "tensorboard: a record of 2^64-1": lambda: ask(
        {"r/events.out.tfevents.1": record((1 << 64) - 1)}, "tensorboard:{}"
    ),
    "tensorboard: a tensor of 2^29": lambda: ask(
        {"r/events.out.tfevents.1": huge_tensor(1 << 29)}, "tensorboard:{}"
    ),
    "tensorboard: a tensor of 2^40": lambda: ask(
        {"r/events.out.tfevents.1": huge_tensor(1 << 40)}, "tensorboard:{}"
    ),
    "tensorboard: a tensor of 2^62": lambda: ask(
        {"r/events.out.tfevents.1": huge_tensor(1 << 62)}, "tensorboard:{}"
    ),
    "tensorboard: a tensor of -1": lambda: ask(
        {"r/events.out.tfevents.1": huge_tensor(-1)}, "tensorboard:{}"
    ),
    "tensorboard: an empty tensor": lambda: ask(
        {"r/events.out.tfevents.1": huge_tensor(1, value=False)}, "tensorboard:{}"
    ),
    "xlsx: a zip bomb": lambda: ask({"runs.xlsx": stored(bytes(1 << 28), packed=True)}, "{}/runs.xlsx"),
    "csv: a zip bomb": lambda: ask({"runs.csv": stored(bytes(1 << 28), packed=True)}, "{}/runs.csv"),
    "csv: gzip": lambda: ask({"runs.csv": b"\x1f\x8b\x08" + bytes(100)}, "{}/runs.csv"),
    "csv: gzip, by its ending": lambda: ask({"runs.csv.gz": b"\x1f\x8b\x08" + bytes(100)}, "{}/runs.csv.gz"),
    "study: 100,000 levels": lambda: study("x: " + "[" * 100_000),
    "study: a mebibyte of keys": lambda: study("".join(f"k{at}: 1\n" for at in range(80_000))),
    "profile: 100,000 levels": lambda: retime_with(deep().decode()),
    "profile: 16 MiB of numbers": lambda: retime_with("[" + "1," * (8 << 20)),
    "profile: 4,301 digits": lambda: retime_with('{"device": ' + "1" * 4301 + "}"),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table that is well, with which a process imports what it needs."""
    return put(tmp_path_factory.mktemp("small"), csv_source()) / "runs.csv"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that has met its budget."""
    path = tiny_study(tmp_path_factory.mktemp("finished"))
    result = run("run", path, "--serial")
    assert result.exit_code == 0, result.output
    return path


@pytest.mark.parametrize("name", LIMITS)
def test_limits(attack: Any, tmp_path: Path, small: Path, finished: Path, name: str) -> None:
    files, command = LIMITS[name]()
    put(tmp_path, files)
    with attack(f"limit, {name}"):
        command = [
            argument.replace("{}", str(tmp_path)).replace("{study}", str(finished)) for argument in command
        ]
        limited(command, small)


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder_instead(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path.name)


# What stands where a file is expected, and the sources it is tried in.
STRANGE: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "/dev/zero": zero,
    "a folder": folder_instead,
    "a loop": loop,
}
PLACES = {
    "csv": ["runs.csv"],
    "json": ["runs.json"],
    "jsonl": ["runs.jsonl"],
    "parquet": ["runs.parquet"],
    "trainer": ["run0/trainer_state.json", "run0/training_args.bin", "run0/args.json"],
    "lightning": ["v0/hparams.yaml", "v0/metrics.csv"],
    "tune": ["t0/params.json", "t0/result.json", "experiment_state-2027.json"],
    "wandb": ["wandb/run-20260101_000000-id0/run-id0.wandb"],
    "tensorboard": ["r0/events.out.tfevents.1.h"],
    "optuna": ["o.db"],
    "mlflow": ["1/meta.yaml", f"1/{0:032x}/meta.yaml", f"1/{0:032x}/params/lr"],
}


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("strange", STRANGE)
def test_no_regular_files(attack: Any, tmp_path: Path, small: Path, strange: str, kind: str) -> None:
    build, source = SOURCES[kind]
    for number, place in enumerate(PLACES[kind]):
        folder = put(tmp_path / str(number), build())
        (folder / place).unlink(missing_ok=True)
        STRANGE[strange](folder / place)
        command = ["ask", source.replace("{}", str(folder))]
        with attack(f"limit, {kind}: {strange} as {place}"):
            if strange in ("a pipe", "/dev/zero"):
                limited(command, small)
            else:
                well(run(*command), set(), f"{strange} as {place}")


# ---------------------------------------------------------------- parsers

TEXTS = [
    "",
    " ",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "-1e308",
    "-0",
    "0",
    "-1",
    "1e-320",
    "1e999",
    "1e-999",
    "1" * 401,
    "1" * 4301,
]
TEXTS += [
    "0001-01-01",
    "9999-12-31T23:59:59",
    "0001-01-01T00:00:00+14:00",
    "2024-13-45",
    "1/2/3",
    "12:60",
    "99999:99:99",
]
TEXTS += [
    "1 day 00:00:01",
    "999999 days 00:00:01",
    "1h 20m",
    "5%",
    "-5%",
    "nan%",
    "1.00000000000000000000e1%",
    "1e5%",
    "1,5",
]
TEXTS += [
    "1.000,5",
    "٢",
    "²",
    "½",
    "1_000",
    "0x10",
    "4xA100",
    "0,1,2,3",
    "[0, 1]",
    "(1, 2)",
    "None",
    "true",
    "False",
    "never",
]
TEXTS += [
    "x" * 5000,
    "[bold]",
    "[/bold]",
    "\x1b[31mred",
    "a\u009bb",
    "\u202eabc",
    "a\nb: c",
    "'",
    '"',
    '"""',
    "\\",
    "{0}",
    "%s",
    "#",
]
TEXTS += [
    "!!python/object:os.system",
    "a: b",
    "- a",
    "&a",
    "*a",
    "=1+1",
    "running",
    "failed",
    "finished",
    "OOM",
    "maximize",
    "~",
]
NUMBERS: list[Any] = [
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    -1e308,
    -0.0,
    0,
    -1,
    1,
    5e-324,
    1e-320,
    10**400,
    -(10**400),
    2**53,
    2**63,
]
NUMBERS += [2**64, 1e16, 1e15, 0.1, 3, 1.5, True, False, 1.7e9, 1.7e12, 1e300]
OTHERS: list[Any] = [
    None,
    [],
    {},
    [1] * 9,
    [[[]]],
    {"a": {"b": 1}},
    {"": ""},
    [None],
    ["x", 1],
    {"lr": 0.1, "batch_size": 8},
]
NAMES = [
    "acc²",
    "val_acc²",
    "val loss ½",
    "class",
    "val_class",
    "lr",
    "learning_rate",
    "config/lr",
    "loss",
    "val_loss",
    "eval/accuracy",
]
NAMES += [
    "rule",
    "reference_rate",
    "effective_batch",
    "effective_batch_",
    "epochs",
    "steps",
    "step",
    "max_steps",
    "samples_seen",
]
NAMES += [
    "devices",
    "gpus",
    "world_size",
    "nodes",
    "gradient_accumulation_steps",
    "per_device_train_batch_size",
    "status",
    "state",
]
NAMES += [
    "started",
    "ended",
    "start_time",
    "end_time",
    "run",
    "id",
    "seed",
    "dataset",
    "model",
    "optimizer",
    "beta1",
    "dropout",
]
NAMES += [
    "epochs_to_target",
    "samples_to_target",
    "to_target",
    "time_to_train",
    "target",
    "watts",
    "energy_to_target",
    "tta",
    "time",
]
NAMES += [
    "runtime (h)",
    "setup",
    "self",
    "inputs",
    "labels",
    "torch",
    "nn",
    "x" * 400,
    "val_" + "x" * 5000,
    "é_loss",
    "损失",
    "ﬁ_acc",
]
NAMES += [
    "",
    " ",
    ".",
    "/",
    "..",
    "a.b.c",
    "params.lr",
    "params.width",
    "param_class",
    "metrics.val_acc",
    "config.hidden²",
    "hidden½",
]
NAMES += [
    "api_key",
    "password",
    "direction",
    "training_iteration",
    "exit_code",
    "1e5",
    "0",
    "-",
    "params.if",
    "params.1st",
    "choices",
]
NAMES += [
    "params.low",
    "params.value",
    "params.devices",
    "params.noise_batch",
    "params.batch",
    "params.betas",
    "params.rule",
]


class Dice(random.Random):
    """Chooses mutations, the same for the same seed."""

    def scalar(self) -> Any:
        return self.choice(self.choice([TEXTS, NUMBERS, NUMBERS]))

    def anything(self) -> Any:
        return self.choice(self.choice([TEXTS, NUMBERS, OTHERS]))

    def damaged(self, content: bytes) -> bytes:
        """Bits flipped, a part cut out or repeated, bytes put in, or the end cut off."""
        data = bytearray(content)
        for _ in range(self.choice([1, 1, 2, 8])):
            at = self.randrange(len(data) + 1)
            end = min(len(data), at + self.choice([1, 2, 7, 64, 500]))
            match self.randrange(6):
                case 0 | 1 if data:
                    data[min(at, len(data) - 1)] ^= 1 << self.randrange(8)
                case 2:
                    del data[at:end]
                case 3:
                    data[at:at] = data[at:end]
                case 4:
                    data[at:at] = self.choice(
                        [b"\0", b"\xff\xff\xff\xff", b"\n", b'"', b"[[[", b"{", b"!!int ''", b"9" * 30]
                    )
                case 5:
                    del data[at:]
        return bytes(data)

    def changed(self, document: Any) -> Any:
        """A document of JSON with one of its parts, or of its names, replaced."""
        if isinstance(document, dict) and document and self.random() < 0.93:
            name = self.choice(list(document))
            if self.random() < 0.15:
                return {self.choice(NAMES) if key == name else key: value for key, value in document.items()}
            return {**document, name: self.changed(document[name])}
        if isinstance(document, list) and document and self.random() < 0.93:
            at = self.randrange(len(document))
            return [*document[:at], self.changed(document[at]), *document[at + 1 :]]
        return self.anything()

    def table(self) -> Rows:
        """Rows of which some names and cells are replaced, in one row or in all."""
        found = rows()
        for _ in range(self.choice([1, 1, 2, 3])):
            name = self.choice(list(found[0]))
            if self.random() < 0.4:
                new = self.choice(NAMES)
                found = [{new if key == name else key: value for key, value in row.items()} for row in found]
            elif self.random() < 0.5:
                found[self.randrange(len(found))][name] = self.scalar()
            else:
                few = [self.scalar() for _ in range(self.choice([1, 2, 12]))]
                for row in found:
                    row[name] = self.choice(few)
        if self.random() < 0.2:
            extra = self.choice(NAMES)
            for row in found:
                row.setdefault(extra, self.scalar())
        return found


def mutated_document(dice: Dice, content: bytes) -> bytes:
    """JSON, JSON lines or YAML with a value or a name replaced."""
    try:
        return json.dumps(dice.changed(json.loads(content))).encode()
    except ValueError:
        pass
    lines = content.splitlines()
    at = dice.randrange(len(lines))
    try:
        lines[at] = json.dumps(dice.changed(json.loads(lines[at]))).encode()
        return b"\n".join(lines) + b"\n"
    except ValueError:
        return dice.damaged(content)


YAML_TEXTS = [
    "!!int ''",
    "!!float ''",
    "!!bool x",
    "!!timestamp x",
    "!!binary '!'",
    "!!set {a, b}",
    "!!omap [a]",
    "!!pairs [a]",
]
YAML_TEXTS += [
    "!!null x",
    "!!str [a]",
    "!!map x",
    "!!python/object/apply:os.system [x]",
    "!!python/tuple [1, 2]",
    "2024-99-99",
]
YAML_TEXTS += [
    "0001-01-01",
    "9999-12-31 23:59:59 -10:00",
    ".nan",
    ".inf",
    "0x" + "f" * 30,
    "1:60",
    "190:20:30.15",
    "0o7",
    "0b1",
]
YAML_TEXTS += [
    "{1: [1, 2]}",
    "{null: 1}",
    "{2024-01-01: 3}",
    "{[1]: 2}",
    "? {a: b}",
    "{<<: x}",
    "{<<: [1]}",
    "&a [*a]",
    "&a {k: *a}",
]
YAML_TEXTS += [
    "!",
    "!!",
    "*none",
    "|\n  x",
    "=",
    "<<",
    "~",
    "''",
    "!!merge <<",
    "!<tag:yaml.org,2002:int> x",
    "!!value =",
    "0b",
    "0x",
]
YAML_TEXTS += [
    "!!python/object/apply:numpy.core.multiarray.scalar [{state: [1], args: [f8]}, !!binary AAAA]",
    "!!python/object/apply:numpy.core.multiarray.scalar [{state: [1, '<'], args: [[f8]]}, x]",
]


def mutated_yaml(dice: Dice, content: bytes) -> bytes:
    lines = content.decode().splitlines()
    at = dice.randrange(len(lines))
    name, colon, _ = lines[at].partition(":")
    text = dice.choice(YAML_TEXTS) if dice.random() < 0.7 else json.dumps(dice.anything())
    if dice.random() < 0.2:
        name = dice.choice([*YAML_TEXTS, *map(json.dumps, NAMES)])
    lines[at] = f"{name}{colon} {text}"
    return "\n".join(lines).encode("utf-8", "replace") + b"\n"


def mutated_table(dice: Dice, content: bytes) -> bytes:
    """A table of metrics with cells replaced."""
    table = list(csv.reader(io.StringIO(content.decode())))
    row = dice.choice(table)
    row[dice.randrange(len(row))] = str(dice.choice(NAMES) if row is table[0] else dice.scalar())
    text = io.StringIO()
    csv.writer(text).writerows(table)
    return text.getvalue().encode()


def mutated_wandb(dice: Dice, place: int) -> bytes:
    record_type = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record
    records = wandb_records(rows()[place], place)
    at = dice.randrange(len(records) - 1)
    if dice.random() < 0.3:
        records[at] = dice.damaged(records[at])
        return wandb_log(records)
    found = record_type.FromString(records[at])
    items = [*found.run.config.update, *found.history.item, *found.summary.update]
    item = dice.choice(items)
    if dice.random() < 0.2:
        item.key = dice.choice(NAMES)
    item.value_json = (
        dice.choice(["", "{", "nul", "1" * 4301, "[" * 5000])
        if dice.random() < 0.2
        else json.dumps(dice.anything())
    )
    records[at] = found.SerializeToString()
    return wandb_log(records)


def mutated_events(dice: Dice, row: dict[str, Any]) -> bytes:
    event_type = pytest.importorskip("tensorboard.compat.proto.event_pb2").Event
    hparams = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2").HParamsPluginData
    events = events_of(row)
    at = dice.randrange(len(events))
    event = event_type.FromString(events[at])
    kind = dice.randrange(5)
    if kind == 0 or not event.summary.value:
        events[at] = dice.damaged(events[at])
        return event_file(events)
    value = event.summary.value[0]
    if kind == 1:
        value.tag = dice.choice(NAMES)
    elif kind == 2:
        value.metadata.plugin_data.plugin_name = dice.choice(["scalars", "hparams", "", "x"])
        value.metadata.plugin_data.content = dice.damaged(value.metadata.plugin_data.content)
    elif kind == 3:
        value.tensor.dtype = dice.choice([0, 1, 2, 3, 7, 8, 10, 14, 19, 20, 21, 23, 101])
        for _ in range(dice.choice([0, 1, 2])):
            value.tensor.tensor_shape.dim.add(size=dice.choice([-1, 0, 1, 3]))
        value.tensor.tensor_content = dice.choice([b"", b"\0\0\0\x3f", b"x"])
        value.tensor.string_val.extend(dice.choice([[], [b"\xff"], [b"1.5"]]))
        value.metadata.plugin_data.plugin_name = "scalars"
    else:
        value.simple_value = dice.choice([math.nan, math.inf, -math.inf, 1e38, 0.0, -1.0])
        event.wall_time = dice.choice([math.nan, math.inf, -math.inf, 1e308, -1.0, 0.0])
        event.step = dice.choice([-1, 0, 2**63 - 1, -(2**63)])
        content = hparams.FromString(value.metadata.plugin_data.content)
        for name in content.session_start_info.hparams:
            given = content.session_start_info.hparams[name]
            match dice.randrange(5):
                case 0:
                    given.number_value = dice.choice([math.nan, math.inf, -math.inf, 1e308, 0.0, -1.0])
                case 1:
                    given.list_value.values.add(number_value=1.0)
                case 2:
                    given.struct_value.fields["a"].string_value = "x"
                case 3:
                    given.null_value = 0
        value.metadata.plugin_data.content = content.SerializeToString()
    events[at] = event.SerializeToString()
    return event_file(events)


def mutated_database(dice: Dice, path: Path) -> None:
    """A cell of an SQLite database replaced, whatever its column's type."""
    with closing(sqlite3.connect(path)) as connection:
        tables = [
            name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")
        ]
        full = [name for name in tables if connection.execute(f"select count(*) from {name}").fetchone()[0]]  # noqa: S608
        table = dice.choice(full)
        column = dice.choice([row[1] for row in connection.execute(f"pragma table_info({table})")])
        old = connection.execute(f"select {column} from {table} limit 1").fetchone()[0]  # noqa: S608
        new: Any = (
            dice.scalar()
            if dice.random() < 0.7
            else dice.choice([None, b"\xff", "{}", "[]", "[1]", "{", "1", "null", '"x"'])
        )
        if isinstance(old, str) and old[:1] in "[{" and dice.random() < 0.6:
            try:
                new = json.dumps(dice.changed(json.loads(old)))
            except ValueError:
                new = json.dumps(dice.anything())
        if isinstance(new, int) and not -(2**63) <= new < 2**63:
            new = str(new)
        where = f" where rowid = (select rowid from {table} limit 1)" * (dice.random() < 0.6)  # noqa: S608
        try:
            connection.execute(f"update {table} set {column} = ?{where}", (new,))  # noqa: S608
            connection.commit()
        except (sqlite3.Error, OverflowError):
            connection.rollback()


def mutated(dice: Dice, kind: str, name: str, content: bytes) -> bytes:
    if dice.random() < 0.3 or not content:
        return dice.damaged(content)
    if kind in ("csv", "tsv"):
        found = as_csv(dice.table())
        return found if kind == "csv" else found.replace(b",", b"\t")
    if kind == "jsonl" and dice.random() < 0.6:
        return b"".join(json.dumps(row).encode() + b"\n" for row in dice.table())
    if kind == "json" and dice.random() < 0.6:
        each = [dict(zip(("config", "summary"), parts(row), strict=True)) for row in dice.table()]
        return json.dumps(each if dice.random() < 0.5 else dice.table()).encode()
    if name.endswith((".json", ".jsonl")):
        return mutated_document(dice, content)
    if name.endswith(".yaml"):
        return mutated_yaml(dice, content)
    if name.endswith("metrics.csv"):
        return mutated_table(dice, content)
    if kind == "wandb":
        return mutated_wandb(dice, int(re.findall(r"id(\d+)", name)[0]))
    if kind == "tensorboard":
        return mutated_events(dice, rows()[int(name[1 : name.index("/")])])
    if kind == "mlflow":
        return (
            str(dice.scalar()).encode("utf-8", "replace")
            if dice.random() < 0.7
            else content.replace(b" ", b"  ")
        )
    return dice.damaged(content)


@contextmanager
def replaced(path: Path, content: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def emptied(folder: Path) -> Path:
    for name in ("study.yaml", "tasks.py", "old-runs.jsonl"):
        (folder / name).unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize("kind", SOURCES)
def test_mutated_sources(attack: Any, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build, source = SOURCES[kind]
    files, dice, seen = build(), Dice(f"{kind} {SEED}"), set[str]()
    folder = put(tmp_path / "source", files)
    source = source.replace("{}", str(folder))
    assert run("ask", source).exit_code == 0, run("ask", source).stderr
    out = tmp_path / "out"
    for number in range(TIMES):
        name = dice.choice(list(files))
        content = mutated(dice, kind, name, files[name])
        with replaced(folder / name, content):
            if kind == "optuna" and dice.random() < 0.8:
                (folder / name).write_bytes(files[name])
                mutated_database(dice, folder / name)
            what = f"{kind} {number} of seed {SEED}: {name}: {(folder / name).read_bytes()[:600]!r}"
            with attack(f"mutated, {kind} {number}, init"):
                result = run("init", emptied(out), "--from", source)
                well(result, seen, what)
                is_plain(result, what)
                if result.exit_code == 0:
                    is_readable(out, what)
                    checked = run("check", out / "study.yaml") if number % 10 == 0 else result
                    well(checked, seen, what)
                    is_plain(checked, what)
            if number % 3 == 0:
                with attack(f"mutated, {kind} {number}, ask"):
                    result = run("ask", source, *["--json"] * (number % 2))
                    well(result, seen, what)
                    is_plain(result, what)
                    if result.exit_code == 0 and number % 2:
                        json.loads(result.stdout)
            if number % 10 == 5:
                with attack(f"mutated, {kind} {number}, ask --save"):
                    (out / "old.db").unlink(missing_ok=True)
                    saved = run("ask", source, "--save", out / "old.db")
                    well(saved, seen, what)
                    if saved.exit_code == 0:
                        shown = run(
                            "show", f"sqlite:///{out}/old.db#{re.findall(r'study ([^ ]+):', saved.stdout)[0]}"
                        )
                        well(shown, seen, what)
                        is_plain(shown, what)


def test_mutated_studies(attack: Any, tmp_path: Path) -> None:
    dice, seen = Dice(f"study {SEED}"), set[str]()
    path = tmp_path / "study.yaml"
    for number in range(2 * TIMES):
        content = mutated_yaml(dice, STUDY.encode())
        path.write_bytes(dice.damaged(content) if dice.random() < 0.2 else content)
        with attack(f"mutated, study.yaml {number}"):
            result = run("ask", path)
            well(result, seen, f"{content!r}", named="study.yaml" if result.exit_code == 2 else "")
            is_plain(result, f"{content!r}")


def profile() -> dict[str, Any]:
    """A profile of a CPU, as `bsearch profile --out` writes it."""
    law = {
        "points": [[1, 0.01], [64, 0.05]],
        "update_s": 0.001,
        "devices": 1,
        "power": [[1, 50.0]],
        "timed": [],
    }
    known = {
        "kind": "cpu",
        "device": "cpu",
        "training_set": 1000,
        "step_times": [law],
        "largest_micro_batch": 64,
    }
    entry = {"parameters": {}, "profile": {**known, "device_bytes": 1 << 30}}
    return {"device": "cpu", "task": {"name": "Points"}, "training": {}, "profiles": [entry]}


def test_mutated_profiles(attack: Any, tmp_path: Path, finished: Path) -> None:
    dice, seen = Dice(f"profile {SEED}"), set[str]()
    path = tmp_path / "profile.json"
    for number in range(TIMES):
        content = json.dumps(dice.changed(profile())).encode()
        content = dice.damaged(content) if dice.random() < 0.2 else content
        path.write_bytes(content)
        with attack(f"mutated, profile.json {number}"):
            result = run("show", finished, "--profile", path)
            well(result, seen, f"{content!r}")
            is_plain(result, f"{content!r}")


# ---------------------------------------------------------------- output

EVIL = [
    "\x1b[2J\x1b[31mred\x1b]0;title\x07",
    "a\u009b31mb",
    "\u202etxt.exe",
    "[bold]x[/bold]",
    "[/]",
    "[red",
    "x\nstudy: evil",
    "x\rover",
]
EVIL += [
    "a\x00b",
    "a\x7fb",
    "a\u2028b",
    "a\x85b",
    "a\u200fb",
    "\u2066x",
    "x" * 3000,
    "'''",
    '"""',
    "\\N{BULLET}",
    "{x}",
    "{0}",
    "#",
    "\t",
]
EVIL += [
    "a: &a *a",
    "!!python/object/apply:os.system [id]",
    "\n- x\n",
    "é" * 300,
    "\ud800",
    "\N{ZERO WIDTH JOINER}",
    "%(x)s",
    "$(id)",
    "`id`",
]


def evil_tables(text: str) -> Iterator[tuple[str, Rows]]:
    """A text as a value, as a name and beside other names, in each column in turn."""
    for name in rows()[0]:
        yield (
            f"as a value of {name}",
            [{**row, name: text if place == 3 else row[name]} for place, row in enumerate(rows())],
        )
    for name in rows()[0]:
        yield (
            f"in {name}'s name",
            [
                {f"{text}.{key}" if key == name else key: value for key, value in row.items()}
                for row in rows()
            ],
        )
    yield (
        "as choices",
        [{**row, "optimizer": text if place % 2 else "sgd"} for place, row in enumerate(rows())],
    )
    yield "as groups", [{**row, "dataset": text if place % 3 else "b"} for place, row in enumerate(rows())]
    yield (
        "as a setting",
        [{**row, "params.activation": text if place % 2 else "gelu"} for place, row in enumerate(rows())],
    )
    yield "as a run", [{"run": f"{text}{place}", **row} for place, row in enumerate(rows())]
    yield "as a run twice", [{"run": text, **row} for row in rows()]
    yield (
        "as a status",
        [{"status": text if place == 2 else "finished", **row} for place, row in enumerate(rows())],
    )
    yield "as one of two metrics", [{**row, f"{text} loss": place} for place, row in enumerate(rows())]


PRINTED: set[str] = set()  # where something was printed that a terminal interprets, by all texts


@pytest.mark.parametrize("number", range(len(EVIL)))
def test_nothing_that_a_terminal_interprets(attack: Any, tmp_path: Path, number: int) -> None:
    text, out, seen = EVIL[number], tmp_path / "out", set[str]()
    for where, table in evil_tables(text):
        path = tmp_path / "runs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
        what = f"{text[:30]!r} {where}"
        for command in (
            ["ask", path],
            ["ask", "--json", path],
            ["ask", path, "--batch", "64"],
            ["init", emptied(out), "--from", path],
        ):
            with attack(f"output, {what}: {command[0]} {'--json' if '--json' in command else ''}"):
                result = run(*command)
                well(result, seen, what)
                is_plain(result, what, PRINTED, f"{command[0]} {len(command)} {where}")
                if command[0] == "init" and result.exit_code == 0:
                    is_readable(out, what)
                    keys = yaml.safe_load((out / "study.yaml").read_text())
                    assert keys["study"] == "runs-next" and keys["task"] == "tasks.py:MyTask", (
                        f"keys come from a text {what}"
                    )
                    checked = run("check", out / "study.yaml")
                    well(checked, seen, what)
                    is_plain(checked, what)


@pytest.mark.parametrize("number", range(len(EVIL)))
def test_names_of_files(attack: Any, tmp_path: Path, number: int) -> None:
    text, out, seen = EVIL[number].replace("/", "_"), tmp_path / "out", set[str]()
    if "\0" in text or "\ud800" in text or len(text) > 200:
        pytest.skip("no name of a file")
    path = tmp_path / f"{text}.csv"
    path.write_bytes(as_csv(rows()))
    folder = put(tmp_path / text, trainer_source())
    broken = tmp_path / f"{text}.json"
    broken.write_text("{")
    for source in (
        path,
        folder,
        f"trainer:{folder}",
        broken,
        tmp_path / f"none{text}.csv",
        f"{text}:x",
        f"{text}.csv",
    ):
        for command in (["ask", source], ["ask", "--json", source], ["init", emptied(out), "--from", source]):
            with attack(f"output, {text!r} in the name of {str(source)[-20:]!r}: {command[0]}"):
                result = run(*command)
                well(result, seen, f"{text!r}")
                is_plain(result, f"{text!r} in a file's name", PRINTED, f"{command[0]} {len(command)} name")
                if command[0] == "init" and result.exit_code == 0:
                    is_readable(out, f"{text!r} in a file's name")
                    keys = yaml.safe_load((out / "study.yaml").read_text())
                    assert set(keys) <= {
                        "study",
                        "task",
                        "space",
                        "objectives",
                        "budget",
                        "baseline",
                        "warm_start",
                    }, keys
                    assert keys["task"] == "tasks.py:MyTask", keys


LONG = "x" * 5000
ODD = [
    LONG,
    f"{LONG}.csv",
    f"{LONG}/runs.csv",
    "~nobody-of-this-name/x",
    "~nobody-of-this-name/x.csv",
    "",
    " ",
    ":",
    "#",
    "x:",
    ":x",
]
ODD += [
    "/dev/zero",
    "/dev/null",
    "/proc/self/mem",
    ".csv",
    "-",
    "--",
    "http://127.0.0.1:1/x.csv",
    "s3://x/y.csv",
]
ODD += [
    "sqlite:///x",
    "sqlite://",
    "postgresql://a:b@127.0.0.1:1/x",
    "file:///x",
    "a@b:c",
    "%00",
    "x.xlsx",
    "x.csv.gz",
    "..",
    "x/",
    "é.csv",
]
READERS = ("wandb", "mlflow", "optuna", "tensorboard", "trainer", "lightning", "tune")
AFTER = (
    "",
    LONG,
    "~nobody-of-this-name/x",
    "#",
    "x#y",
    "/dev/zero",
    "/dev/null",
    "sqlite:///x#y",
    "sqlite://#",
    "..#..",
)
ODD += [f"{reader}:{rest}" for reader in READERS for rest in AFTER]
ODD += [
    "optuna:x://",
    "optuna:sqlite:///%s?mode=rw",
    "optuna:sqlite:///x?a=b#c",
    "mlflow:http://127.0.0.1:1#e",
    "mlflow:sqlite:///#e",
]
ODD += [
    "mlflow:databricks#e",
    "mlflow:x://y#e",
    "wandb:a/b",
    "wandb:a/b/c",
    "optuna:journal.log",
    "optuna:redis://127.0.0.1:1/0",
]


def test_odd_names(attack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    seen = set[str]()
    for source in ODD:
        for command in (["ask", source], ["init", tmp_path / "out", "--from", source]):
            with attack(f"name, {command[0]} {source[:60]!r}"):
                began = time.monotonic()
                result = run(*command)
                well(result, seen, f"{command[0]} {source[:60]!r}")
                is_plain(result, repr(source[:60]))
                assert len(result.output) < 20_000
                assert time.monotonic() - began < MOST_S
            emptied(tmp_path / "out")


def test_a_source_stays_as_it_is(attack: Any, tmp_path: Path) -> None:
    for kind, (build, source) in SOURCES.items():
        folder = put(tmp_path / kind, build())
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        with attack(f"reads only, {kind}"):
            assert run("ask", source.replace("{}", str(folder))).exit_code == 0
            assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
