"""A recipe on other devices: what is read of it, the same batch in other micro-batches, and the steps that follow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bsearch.cli import main
from bsearch.extras.port.edit import rewritten
from bsearch.extras.port.memory import Memory, target_of
from bsearch.extras.port.ported import Ported, _step_s, port
from bsearch.extras.port.recipe import Recipe, read_recipe
from bsearch.objectives.language.imagined import Imagined
from bsearch.objectives.profiling.memory.tracing import MemoryProbe
from bsearch.objectives.task import Loss
from bsearch.search.analysis.retime import KnownDevice
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.laws.device import DeviceProfile
from bsearch.spaces.laws.step_time import StepTime
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.trial import TrialSetup
from click.testing import CliRunner
from helpers import setup
from hypothesis import given, settings
from hypothesis import strategies as st
from test_language_exports import LLAMA
from torch import nn

RECIPES = Path(__file__).parents[1] / "data" / "recipes"
# Devices, micro-batch and accumulation of each; and keys that `port` does not know.
EXPECTED: dict[str, tuple[int, int, int, list[str]]] = {
    "axolotl-qlora.yaml": (8, 2, 4, ["plugins"]),
    "axolotl-full.yaml": (4, 4, 8, ["fsdp_config"]),
    "llamafactory-lora.yaml": (4, 1, 8, []),
    "llamafactory-full.yaml": (8, 4, 2, ["deepspeed", "enable_liger_kernel"]),
    "trl-sft.yaml": (8, 16, 1, []),
    "train.sh": (4, 4, 8, ["fsdp", "fsdp_transformer_layer_cls_to_wrap"]),
    "training_args.json": (2, 63, 1, ["group_by_length"]),
}


def ported(recipe: Recipe, to: str = "1x 24GiB", devices: int | None = None, model: str | None = None) -> Ported:
    return port(recipe, target_of(to), devices, model, None)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The recipes, beside two small models."""
    for path in RECIPES.iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    for name in ("model-1b", "model-8b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 4096}))
    return tmp_path


@pytest.mark.parametrize("name", EXPECTED)
def test_recipes_are_read_as_their_libraries_read_them(name: str) -> None:
    devices, micro_batch, accumulation, unknown = EXPECTED[name]
    recipe = read_recipe(RECIPES / name)
    made = ported(recipe, devices=None if name == "train.sh" else devices)
    before = made.before
    assert (before.devices, before.largest_micro_batch, before.accumulation) == (devices, micro_batch, accumulation)
    assert recipe.unknown == unknown
    assert {*recipe.read, *recipe.kept, *recipe.unknown} == set(recipe.settings)
    assert isinstance(made.memory, str)  # its models are not here
    assert "model" in made.memory


@pytest.mark.long
@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_written_back_is_the_same_but_for_its_split(name: str, here: Path) -> None:
    devices = None if name == "train.sh" else EXPECTED[name][0]
    recipe = read_recipe(here / name)
    made = ported(recipe, "1x 24GiB", devices, "model-1b")
    assert made.before.effective_batch == made.written.effective_batch
    text = rewritten(recipe, made.changes, 1)
    (here / "out").mkdir()
    (here / "out" / name).write_text(text)
    again = read_recipe(here / "out" / name)
    assert {**again.settings} == {**recipe.settings, **{key: again.settings[key] for key in made.changes}}
    assert {key: str(again.settings[key]) for key in made.changes} == {key: str(value) for key, value in made.changes.items()}
    now = ported(again, "1x 24GiB", 1, str(here / "model-1b"))
    assert (now.before, now.changes) == (made.written, {})
    assert [line for line in text.splitlines() if line.lstrip().startswith("#")] == [
        line for line in recipe.text.splitlines() if line.lstrip().startswith("#")
    ]


@pytest.mark.long
@pytest.mark.long
def test_activations_are_recomputed_where_nothing_fits_otherwise(here: Path) -> None:
    config = json.loads((here / "model-1b" / "config.json").read_text())
    (here / "model-1b" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 12}))
    recipe = read_recipe(here / "axolotl-full.yaml")
    kept = ported(recipe, "1x 24GiB", 4).memory
    assert isinstance(kept, Memory)
    assert kept.checkpointing == "none"
    (one, least), *_ = kept.points
    assert one == 1
    tight = (500 << 20) + int((least - (64 << 10)) / 0.95)  # a little less than one row takes
    made = ported(recipe, f"1x {tight}", 4)
    assert isinstance(made.memory, Memory)
    assert made.memory.checkpointing == "full"
    assert made.changes["gradient_checkpointing"] is True
    with pytest.raises(StudyFileError, match="expected devices that hold one row"):
        ported(recipe, f"1x {(500 << 20) + 1024}", 4)


class TheirOwn(Imagined):
    """The loss that the model of `transformers` itself computes of labels."""

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        tokens = batch[0].long()
        return Loss(model(input_ids=tokens, labels=tokens, use_cache=False).loss * tokens.numel(), torch.tensor(tokens.numel()))


@pytest.mark.long
@pytest.mark.parametrize("micro_batch", [2, 64])
def test_memory_is_that_of_the_librarys_own_loss(micro_batch: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 9000, "max_position_embeddings": 256}))
    parameters = {"model": str(tmp_path), "tokenizer": "bytes", "length": 128, "packing": False, "dtype": "bfloat16"}
    made = setup(2, budget=4, parameters=parameters, training={"precision": "bf16"})
    ours, theirs = (MemoryProbe(task, made, like_gpu=True).train_peak(micro_batch).live for task in (Imagined(), TheirOwn()))
    assert ours == pytest.approx(theirs, rel=0.05)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 12), st.integers(1, 6))
def test_the_batch_stays_wherever_devices_can_share_it(devices: int, micro_batch: int, accumulation: int, to: int) -> None:
    recipe = read_recipe(RECIPES / "training_args.json")
    own = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": accumulation}
    recipe = replace(recipe, settings={**recipe.settings, **own})
    batch = devices * micro_batch * accumulation
    if batch < to:
        with pytest.raises(StudyFileError, match="expected at most as many devices as the batch has rows"):
            ported(recipe, f"{to}x 24GiB", devices)
        return
    made = ported(recipe, f"{to}x 24GiB", devices)
    if batch % to == 0:
        assert made.written.effective_batch == batch
        assert made.plan is not None
        assert set(made.plan.shares) == {batch // to}
        assert batch // to % made.plan.accumulation == 0
    else:
        assert made.plan is None
        assert made.nearest is not None
        assert abs(made.nearest.plan.effective_batch - batch) <= to * made.nearest.plan.accumulation
        middle, unchanged, linear = made.nearest.rates
        assert min(unchanged, linear) <= middle <= max(unchanged, linear)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"per_device_train_batch_size": "auto"}, "expected a number, got 'auto'"),
        ({"gradient_accumulation_steps": 0}, "expected an integer from 1 to 4194304, got 0"),
        ({"tensor_parallel_size": 2}, "whose devices share the batch alone"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change: dict[str, Any], part: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps({**json.loads((RECIPES / "training_args.json").read_text()), **change}))
    result = CliRunner().invoke(main, ["port", str(tmp_path / "recipe.json"), "--onto", "1x 24GiB"])
    assert result.exit_code == 2
    assert part in result.output
    assert next(iter(change)) in result.output


B, A = "--per_device_train_batch_size", "--gradient_accumulation_steps"
# Of other people's files: devices, micro-batch and accumulation; or what is said of it.
OTHERS: dict[str, tuple[str, tuple[int, int, int] | str]] = {
    "a script behind the processes": (f"torchrun --nproc_per_node 8 train.py {B} 4 {A} 2", (8, 4, 2)),
    "machines": (f"torchrun --nnodes 2 --nproc_per_node=4 train.py {B} 4 {A} 2", (8, 4, 2)),
    "processes of all machines": (f"accelerate launch --num_processes 16 --num_machines 2 t.py {B} 4 {A} 2", (16, 4, 2)),
    "included devices": (f"deepspeed --include localhost:0,1 train.py {B} 4 {A} 2", "change by hand"),
    "another variable": (f"torchrun --nproc_per_node ${{N:-8}} train.py {B} 4", "expected a number of processes"),
    "a log": (f"torchrun --nproc_per_node 2 train.py {A} 2 {B} 4 2>&1 | tee log.txt\necho done {B} 3", (2, 4, 2)),
    "a log without accumulation": (f"torchrun --nproc_per_node 2 t.py {B} 4 > log 2>&1\necho --x 3", (2, 4, 1)),
    "a comment": (f"# was {B} 16\ntorchrun --nproc_per_node 2 train.py {B} 4", (2, 4, 1)),
    "preparation": (f"python3 prepare.py --out data\ntorchrun --nproc_per_node 2 train.py {B} 4", (2, 4, 1)),
    "two trainings": (f"torchrun a.py {B} 4\ntorchrun b.py {B} 8", "expected one command that trains, got 2"),
    "arithmetic": (f"torchrun a.py {B} 4 {A} $((8 / 2))", "expected a number"),
    "CRLF.yaml": ("per_device_train_batch_size: 4\r\noptim: adamw_torch # so\r\n", (1, 4, 1)),
    "quoted.yaml": ('"per_device_train_batch_size": 4\n', (1, 4, 1)),
    "next line.yaml": ("per_device_train_batch_size:\n  4\n", "change by hand"),
    "anchor.yaml": ("per_device_train_batch_size: &b 4\nper_device_eval_batch_size: *b\n", "change by hand"),
    "one line.yaml": ("{per_device_train_batch_size: 4}", "change by hand"),
    "twice.yaml": (
        "per_device_train_batch_size: 16\nper_device_train_batch_size: 4\n",
        "train_batch_size once, got",
    ),
    "true.yaml": ("per_device_train_batch_size: true\n", "expected a number, got True"),
    "default.yaml": ("model_name_or_path: m\nfinetuning_type: lora\n", (1, 8, 1)),
    "preferences.yaml": ("model_name_or_path: m\nfinetuning_type: lora\nstage: dpo\n", "expected supervised fine-tuning"),
    "within.json": ('{"deepspeed": {"gradient_accumulation_steps": 2}, "per_device_train_batch_size": 4}', "outside of it"),
    "beside.json": ('{"deepspeed": {"gradient_accumulation_steps": "auto"}, "per_device_train_batch_size": 4}', (1, 4, 1)),
    "both.yaml": ("base_model: m\nbatch_size: 6\nmicro_batch_size: 3\ngradient_accumulation_steps: 2\n", (1, 3, 2)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_peoples_files_are_read_right_or_refused(name: str, tmp_path: Path) -> None:
    text, expected = OTHERS[name]
    path = tmp_path / (name if "." in name else f"{name}.sh")
    path.write_bytes(text.encode())
    changes: dict[str, Any] = {}
    try:
        recipe = read_recipe(path)
        # To four devices, in micro-batches of at most two.
        made = replace(ported(recipe), plan=None)
        batch = made.before.effective_batch
        made = replace(made, plan=BatchPlan(batch - batch % 4 or 4, max(batch // 4, 1), 4))
        changes = made.changes
        written = rewritten(recipe, changes, 4)
    except StudyFileError as error:
        assert isinstance(expected, str), str(error)
        assert expected in str(error)
        return
    before = made.before
    assert (before.devices, before.largest_micro_batch, before.accumulation) == expected
    path.write_bytes(written.encode())
    again = read_recipe(path)
    assert again.devices in (None, 4)
    assert {key: str(again.settings[key]) for key in changes} == {key: str(value) for key, value in changes.items()}
    assert {key: value for key, value in again.settings.items() if key not in changes} == {
        key: value for key, value in recipe.settings.items() if key not in changes
    }
    assert ("\r\n" in text) == ("\r\n" in written)


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "x: 1", "{}"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    (tmp_path / "recipe.sh").write_text(text)
    for name in ("recipe.yaml", "recipe.sh", "missing.yaml"):
        result = CliRunner().invoke(main, ["port", str(tmp_path / name), "--onto", "1x 24GiB"])
        assert result.exit_code == 2, result.output
        assert name in result.output


@pytest.mark.parametrize("to", ["", "0x 24GiB", "24", "2x Voodoo 3", "1x 100MiB"])
def test_other_devices_are_refused(to: str) -> None:
    with pytest.raises(StudyFileError, match="--onto"):
        target_of(to)


@pytest.mark.long
def test_the_command_prints_and_writes(here: Path) -> None:
    out = here / "ported.yaml"
    line = ["port", str(here / "axolotl-qlora.yaml"), "--onto", "2x 24GiB", "--written-for", "8", "--out", str(out)]
    result = CliRunner().invoke(main, line)
    assert result.exit_code == 0, result.output
    for part in (
        "8 devices x 2 x 4 = 64 rows of at most 4,096 tokens a step",
        "not known:   plugins",
        "averages the means of micro-batches and devices",
        "changes: micro_batch_size 2 -> 32; gradient_accumulation_steps 4 -> 1",
    ):
        assert part in result.output
    assert "lora_r: 32   # rank" in out.read_text()
    document = json.loads(CliRunner().invoke(main, [*line, "--json"]).stdout)
    assert document["identical"] is False
    assert document["plan"] == {"effective_batch": 64, "devices": 2, "micro_batch": 32, "accumulation": 1}


@pytest.mark.long
@pytest.mark.long
def test_a_profile_of_the_same_rows_tells_what_a_step_takes(here: Path) -> None:
    (here / "text.jsonl").write_text("\n".join(json.dumps({"text": f"{number} words " * 9}) for number in range(80)))
    study = {
        "study": "rows",
        "task": "bsearch.objectives.language:CausalLM",
        "space": {
            **{"model": "model-1b", "from_scratch": True, "tokenizer": "bytes", "text": "text.jsonl", "length": 64},
            **{"effective_batch": {"low": 4, "high": 16}, "reference_rate": 0.01},
        },
        "objectives": {"metric": {"name": "val_loss", "direction": "minimize"}},
        "devices": {"kind": "cpu"},
    }
    (here / "study.yaml").write_text(yaml.safe_dump(study))
    profile = here / "profile.json"
    made = CliRunner().invoke(main, ["profile", str(here / "study.yaml"), "--set", "budget.profile_s=1", "--out", str(profile)])
    assert made.exit_code == 0, made.output
    (here / "rows.yaml").write_text("model_name_or_path: model-1b\ncutoff_len: 64\nfinetuning_type: full\n")
    line = ["port", str(here / "rows.yaml"), "--onto", "1x 24GiB", "--profile", str(profile), "--json"]
    document = json.loads(CliRunner().invoke(main, line).stdout)
    assert document["plan"]["effective_batch"] == 8
    assert 0 < document["step_s"] < 60


# ---------------------------------------------------------------- the steps that follow


def first_losses(folder: Path, recipe: str, devices: int) -> list[float]:
    """The losses that `trl sft` has in its first five steps."""
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={devices}",
        "-m",
        "trl.scripts.sft",
    ]
    line += ["--config", recipe, "--ddp_backend", "gloo", "--output_dir", f"out-{recipe}", "--report_to", "none"]
    done = subprocess.run(
        line, cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-5000:]
    (state,) = (folder / f"out-{recipe}").glob("checkpoint-*/trainer_state.json")
    return [line["loss"] for line in json.loads(state.read_text())["log_history"] if "loss" in line]


@pytest.mark.long
@pytest.mark.frameworks
def test_trl_takes_the_same_first_steps_on_other_devices(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from objectives.chat import conversations, tokenizer, write_jsonl
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**LLAMA, initializer_range=0.2)).save_pretrained(tmp_path / "llama")
    tokenizer().save_pretrained(tmp_path / "llama")
    (tmp_path / "chats").mkdir()
    write_jsonl(tmp_path / "chats" / "train.jsonl", conversations(120))
    recipe = {
        **{"model_name_or_path": "llama", "dataset_name": "chats", "max_length": 128, "assistant_only_loss": True},
        **{"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4, "learning_rate": 3e-3, "max_steps": 5},
        **{"logging_steps": 1, "bf16": False, "dtype": "float32", "use_cpu": True, "gradient_checkpointing": False, "seed": 3},
        **{"disable_tqdm": True},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    read = read_recipe(tmp_path / "recipe.yaml")
    for devices, to, name in ((1, "1x 504MiB", "small.yaml"), (1, "2x 24GiB", "two.yaml")):
        made = ported(read, to, devices)
        assert made.differs == ()
        assert made.changes
        (tmp_path / name).write_text(rewritten(read, made.changes, made.target.devices))
    expected = first_losses(tmp_path, "recipe.yaml", 1)
    assert len(expected) == 5
    assert first_losses(tmp_path, "small.yaml", 1) == pytest.approx(expected, rel=1e-5)
    assert first_losses(tmp_path, "two.yaml", 2) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_is_that_of_the_profile_with_the_recipes_parameters(depth: int) -> None:
    laws = {number: StepTime(((1, 1.0 * number), (100, 1.0 * number)), update_s=0.0) for number in (1, 2)}
    profiles = tuple(({"depth": n}, DeviceProfile("cpu", "cpu", 1000, step_times=(law,))) for n, law in laws.items())
    device, plan = KnownDevice("cpu", {"name": "Mine"}, {}, profiles), BatchPlan(100, 1, 1)
    assert _step_s(device, plan, {"depth": depth, "width": 3}) == depth
    for parameters in ({}, {"depth": 3}):
        with pytest.raises(StudyFileError, match="one combination of the recipe's parameters, got depth=1; depth=2"):
            _step_s(device, plan, parameters)
    with pytest.raises(StudyFileError, match="expected a number that the profile was timed on: 1"):
        _step_s(device, BatchPlan(100, 1, 2), {"depth": depth})
