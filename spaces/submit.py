"""What a study file may say of the batch job that `bsearch submit` makes of it.

Everything here ends in a job script, a manifest or an argument of a cluster's program, so each value is held to the few
characters it can need: what passes here means the same everywhere, quoted or not.
"""

from __future__ import annotations

import contextlib
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictInt, StrictStr

from .domain import Number, Scalar, Section, fault
from .memory import bytes_of


def _like(pattern: str, words: str) -> AfterValidator:
    """A check that a text is of one form; newlines never are."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise fault(f"expected {words}, got {value!r}")
        return value

    return AfterValidator(check)


Name = Annotated[StrictStr, _like(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*", "a name of letters, digits, '_', '.', '@' and '-'")]
Names = Annotated[
    StrictStr, _like(r"[A-Za-z0-9_][A-Za-z0-9_.@,-]*", "a name of letters, digits, '_', '.', '@' and '-', or several with ','")
]
Variable = Annotated[
    StrictStr, _like(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable; its value stays where it is")
]
# Kubernetes' own rules for names (DNS labels), for keys of secrets, and for resources.
Label = Annotated[StrictStr, _like(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "lower-case letters, digits and '-', at most 63")]
SecretKey = Annotated[StrictStr, _like(r"[A-Za-z0-9._][A-Za-z0-9._-]{0,252}", "a key of letters, digits, '.', '_' and '-'")]
Resource = Annotated[
    StrictStr,
    _like(
        r"[a-z0-9][a-z0-9.-]*/[A-Za-z0-9][A-Za-z0-9._-]*",
        "a resource such as nvidia.com/gpu, amd.com/gpu or nvidia.com/mig-1g.5gb",
    ),
]


def _bytes(value: Any) -> Any:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = bytes_of(value)
    if isinstance(value, bool) or (value is not None and (not isinstance(value, int) or value < 1 << 20)):
        raise fault(f"expected bytes such as 16GiB, got {value!r}")
    return value


class RayJob(Section):
    """A job on a Ray cluster that runs already."""

    address: Annotated[
        StrictStr,
        _like(r"auto|(https?|ray)://[A-Za-z0-9.\-\[\]:/_~%]+|[A-Za-z0-9.-]+:[0-9]+", "auto, http://host:8265 or host:6379"),
    ] = Field(
        "auto", description="The cluster's dashboard, http://host:8265, or its head, host:6379; auto: RAY_ADDRESS, or here."
    )
    ship: StrictBool = Field(
        True, description="Send this bsearch along; false where the cluster's Python has the same version installed."
    )


# What the script itself says, or has a key of its own.
_OWNED_OPTIONS = frozenset(
    {"account", "array", "chdir", "constraint", "cpus-per-task", "error", "export", "export-file", "get-user-env", "gres"}
    | {"gpus-per-node", "input", "job-name", "mem", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output"}
    | {"parsable", "partition", "qos", "requeue", "signal", "time", "wait", "wrap"}
)


def _option_name(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise fault(f"expected an option of sbatch by its long name, such as exclude; got {name!r}")
    if name in _OWNED_OPTIONS:
        raise fault(f"expected an option that bsearch does not set itself, got {name!r}")
    return name


def _option_value(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9_./:=,@%+\[\]-]*", value):
        raise fault(f"expected a value without spaces and signs that a shell would read, got {value!r}")
    return value


_SETUP = "one line of words without ; & | $ quotes or other signs of the shell. For more than that write `source my-setup.sh`"


def _one_at_a_time(value: str) -> str:
    if not re.fullmatch(r"[0-9]+(-[0-9]+(:[0-9]+)?)?(,[0-9]+(-[0-9]+(:[0-9]+)?)?)*%1", value):
        raise fault(
            f"expected an array that runs one task at a time, for one driver holds a study, such as 1-4%1; got {value!r}"
        )
    return value


class SlurmJob(Section):
    """A job in a Slurm queue: Ray is started over its nodes and ends with it."""

    partition: Names | None = Field(None, description="Partition, or several with commas; not given: the cluster's default.")
    account: Name | None = Field(None, description="Account that the job is charged to.")
    qos: Name | None = Field(None, description="Quality of service.")
    # & and | belong to Slurm's own grammar of features; in an #SBATCH line, quoted, no shell reads them.
    constraint: Annotated[StrictStr, _like(r"(?!-)[A-Za-z0-9_.,&|*()\[\]-]+", "features such as a100 or 'intel&ib'")] | None = (
        Field(None, description="Features that each node must have, such as a100.")
    )
    gres: (
        Annotated[
            StrictStr,
            _like(r"[A-Za-z0-9_]+(:[A-Za-z0-9_.-]+)*(,[A-Za-z0-9_]+(:[A-Za-z0-9_.-]+)*)*", "resources such as gpu:a100:2"),
        ]
        | None
    ) = Field(
        None, description="Generic resources of each node, as gpu:a100:2; gpus_per_node tells Ray how many of them are GPUs."
    )
    array: Annotated[StrictStr, AfterValidator(_one_at_a_time)] | None = Field(
        None, description="Tasks one after the other, as 1-4%1: each goes on with the study."
    )
    options: dict[Annotated[StrictStr, AfterValidator(_option_name)], Annotated[Scalar, AfterValidator(_option_value)]] = Field(
        {}, description="Further options of sbatch by their long names; true for those without a value."
    )
    setup: tuple[Annotated[StrictStr, _like(r"[A-Za-z0-9_./~:=+@%,-]+( +[A-Za-z0-9_./~:=+@%,-]+)*", _SETUP)], ...] = Field(
        (),
        description="Lines the script begins with, as `module load cuda/12` or `source ~/venv/bin/activate`; "
        "none: the Python that submits.",
    )
    requeues: StrictInt = Field(
        20, ge=0, description="How often the job may queue itself again when its time is over and the study is not."
    )


class SecretReference(Section):
    """One key of a Kubernetes secret."""

    name: Label = Field(description="Name of the secret.")
    key: SecretKey = Field("url", description="Key in it.")


class KubeRayJob(Section):
    """A RayJob of the KubeRay operator: a cluster of its own, gone when the study ends."""

    image: (
        Annotated[StrictStr, _like(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "a container image such as registry/bsearch:0.1.0")] | None
    ) = Field(None, description="Container image that holds Ray, bsearch and what the task imports.")
    namespace: Label = Field("default", description="Kubernetes namespace that the objects are made in.")
    service_account: Label | None = Field(None, description="Service account of the pods; not given: no API token is mounted.")
    storage_claim: Label | None = Field(None, description="Persistent volume claim mounted on every pod, for storage and data.")
    mount_path: Annotated[StrictStr, _like(r"(/[A-Za-z0-9_][A-Za-z0-9._-]*)+", "an absolute path such as /data")] = Field(
        "/data", description="Where the claim is mounted."
    )
    database_secret: SecretReference | None = Field(None, description="Secret whose key holds the storage's URL.")
    environment_secret: Label | None = Field(
        None, description="Secret that holds the variables `environment` names, by those names."
    )
    gpu_resource: Resource = Field("nvidia.com/gpu", description="What the cluster calls its GPUs.")
    ray_version: Annotated[StrictStr, _like(r"[0-9]+(\.[0-9a-z]+)*", "a version such as 2.60.0")] | None = Field(
        None, description="Ray in the image; default: the version here."
    )
    token: StrictBool = Field(False, description="The cluster asks for a token (KubeRay 1.5 and Ray 2.52 on).")
    retries: StrictInt = Field(2, ge=0, description="How often a cluster that failed is made anew; the study goes on.")
    keep_s: StrictInt = Field(600, ge=0, description="Seconds the pods stay after the study's end.")
    run_as_user: StrictInt = Field(1000, ge=1, description="User id in the image; 1000 is Ray's own.")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field("IfNotPresent", description="When nodes pull the image.")


class Submit(Section):
    """The batch job that `bsearch submit` makes of the study; no part of what the study is."""

    launcher: Name | None = Field(None, description="ray, slurm, kuberay, or one that a plug-in brings.")
    nodes: StrictInt = Field(1, ge=1, description="Machines the job gets.")
    gpus_per_node: StrictInt = Field(0, ge=0, description="GPUs of each machine.")
    cpus_per_node: StrictInt = Field(4, ge=1, description="CPU cores of each machine.")
    memory_per_node: Annotated[StrictInt | None, BeforeValidator(_bytes, json_schema_input_type=int | str | None)] = Field(
        None, description="Memory of each machine, such as 16GiB; not given: what the cluster gives."
    )
    hours: Number | None = Field(
        None, gt=0, le=24 * 365, description="Time limit of the job in hours; not given: the cluster's own."
    )
    environment: tuple[Variable, ...] = Field((), description="Environment variables passed on to the job, by name.")
    ray: RayJob = RayJob()
    slurm: SlurmJob = SlurmJob()
    kuberay: KubeRayJob = KubeRayJob()
    plugins: dict[Name, dict[Variable, Scalar]] = Field(
        {}, description="Settings of launchers that plug-ins bring, by launcher."
    )


__all__ = ["KubeRayJob", "RayJob", "SecretReference", "SlurmJob", "Submit"]
