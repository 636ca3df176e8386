"""Whatever a training's code does to its process, the next training knows nothing of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from bsearch.objectives.attempts import start_attempt
from bsearch.spaces.trial import Measurement, Outcome
from helpers import setup

TASKS = """
import atexit, builtins, ctypes, decimal, gc, logging, math, multiprocessing, os, random, resource, shutil, signal, socket
import subprocess, sys, threading, time, warnings
import numpy as np, torch
from torch import nn
from torch.utils.data import TensorDataset
from bsearch import Data, Loss, Score, Task

GAIN, OPEN = [1.0], []
DATA = TensorDataset(torch.randn(200, 6, generator=torch.Generator().manual_seed(0)), torch.arange(200) % 3)

class Innocent(Task):
    def data(self, setup): return Data(DATA, DATA)
    def model(self, setup): return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    def loss(self, model, batch, setup):
        logits = GAIN[0] * math.pi * model(batch[0])
        return Loss(nn.functional.cross_entropy(logits, batch[1], reduction="sum"), len(batch[1]))
    def score(self, model, batch, setup):
        right = (model(batch[0]).argmax(1) == batch[1]).sum()
        weight = sum(float(p.double().abs().sum()) for p in model.parameters())
        return {"accuracy": Score(right, len(batch[1])), "weight": Score(weight, 1)}

class Spoils(Innocent):
    def loss(self, model, batch, setup):
        WAY
        return super().loss(model, batch, setup)
"""
WAYS = """
GAIN[0] = 3.0
DATA.tensors[0].mul_(2)
math.pi = 3
nn.functional.relu = torch.tanh
nn.ReLU.forward = lambda self, x: x
nn.init.kaiming_uniform_ = lambda tensor, *a, **k: tensor.data.zero_()
torch.Tensor.backward = lambda self, *a, **k: None
torch.optim.SGD.step = lambda self, *a, **k: None
nn.modules.module.register_module_forward_hook(lambda module, given, output: 2 * output)
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.use_deterministic_algorithms(True)
torch.set_num_threads(3)
torch._C._set_grad_enabled(False)
torch.autograd.set_detect_anomaly(True)
torch.set_flush_denormal(True)
torch.backends.mkldnn.enabled = False
torch.manual_seed(7), random.seed(7), np.random.seed(7)
torch.initial_seed = torch.seed = None
np.seterr(all="raise")
decimal.getcontext().prec = 1
os.chdir("/")
shutil.rmtree(os.getcwd())
os.environ.clear()
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.umask(0o777)
os.nice(3)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os._exit(3)
os.abort()
os.kill(os.getpid(), signal.SIGKILL)
os.kill(os.getppid(), signal.SIGKILL)
os.killpg(0, signal.SIGKILL)
os.fork()
ctypes.string_at(0)
sys.exit(2)
raise KeyboardInterrupt
sys.stdout.close(), sys.stderr.close()
os.close(0), os.close(1), os.close(2)
sys.path.clear()
sys.modules.clear()
sys.setrecursionlimit(60)
sys.settrace(lambda *a: None)
builtins.isinstance = None
gc.disable()
time.perf_counter = lambda: 0.0
warnings.simplefilter("error")
logging.disable()
logging.getLogger().addHandler(logging.FileHandler("/dev/full"))
socket.setdefaulttimeout(1e-6)
multiprocessing.set_start_method("spawn", force=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN), signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.setitimer(signal.ITIMER_REAL, 0.001)
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
OPEN.extend(open("/dev/null") for _ in range(500))
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
subprocess.Popen(["sleep", "5"])
atexit.register(lambda: 1 / 0)
""".strip().splitlines()


def reports(file: Path, name: str) -> list[Measurement | Outcome]:
    return list(start_attempt(f"{file}:{name}", setup(64, budget=512, training={"evaluations": 2})))


def shown(found: list[Measurement | Outcome]) -> list[object]:
    return [
        (each.train_loss, each.scores) if isinstance(each, Measurement) else (each.kind, each.message)
        for each in found
    ]


@pytest.mark.slow
def test_forty_ways_to_spoil_a_process_change_no_other_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(way: str) -> Path:
        folder = tmp_path / "work"
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        file = tmp_path / "tasks.py"
        file.write_text(TASKS.replace("WAY", way))
        return file

    monkeypatch.chdir(tmp_path)  # and back at the end
    before = shown(reports(written("pass"), "Innocent"))
    assert before[-1] == ("complete", "")
    ends = {}
    for way in WAYS:
        file = written(way)
        *_, ends[way] = shown(reports(file, "Spoils"))
        assert shown(reports(file, "Innocent")) == before, way
    assert ends["os._exit(3)"] == ("interrupted", "its process exited with code 3")
    kind, message = ends["ctypes.string_at(0)"]  # type: ignore[misc]
    assert kind == "interrupted"
    assert message.startswith(f"its process was killed by SIGSEGV ({tmp_path}/tasks.py:")
