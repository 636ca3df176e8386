"""Settings of the batch job that `bsearch submit` creates for a study.

The values end up in job scripts, manifests and command-line arguments, so each is restricted to the few characters it
needs: an accepted value means the same everywhere, quoted or not.
"""

from __future__ import annotations

import contextlib
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictInt, StrictStr

from ..domain import Number, Scalar, Section, fault
from ..laws.memory import bytes_of


def _like(pattern: str, expected: str) -> AfterValidator:
    """A validator that a string matches a pattern; newlines never match."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise fault(f"expected {expected}, got {value!r}")
        return value

    return AfterValidator(check)


Name = Annotated[StrictStr, _like(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*", "a name of letters, digits, '_', '.', '@' and '-'")]
Names = Annotated[
    StrictStr,
    _like(r"[A-Za-z0-9_][A-Za-z0-9_.@,-]*", "a name of letters, digits, '_', '.', '@' and '-', or several separated by ','"),
]
Variable = Annotated[StrictStr, _like(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable, without its value")]
# Kubernetes' rules for names (DNS labels), keys of secrets, and resources.
Label = Annotated[StrictStr, _like(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "lower-case letters, digits and '-', at most 63")]
SecretKey = Annotated[
    StrictStr, _like(r"[A-Za-z0-9._][A-Za-z0-9._-]{0,252}", "a secret's key of letters, digits, '.', '_' and '-'")
]
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
    """A job on a running Ray cluster."""

    address: Annotated[
        StrictStr,
        _like(r"auto|(https?|ray)://[A-Za-z0-9.\-\[\]:/_~%]+|[A-Za-z0-9.-]+:[0-9]+", "auto, http://host:8265 or host:6379"),
    ] = Field(
        "auto",
        description="The cluster's dashboard, http://host:8265, or its head node, host:6379; auto: RAY_ADDRESS, otherwise "
        "this machine.",
    )
    ship: StrictBool = Field(
        True, description="Upload this bsearch with the job; false if the cluster's Python has the same version installed."
    )


# Options that the script sets itself, or that have a key of their own.
_OWNED_OPTIONS = frozenset(
    {"account", "array", "chdir", "constraint", "cpus-per-task", "error", "export", "export-file", "get-user-env", "gres"}
    | {"gpus-per-node", "input", "job-name", "mem", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output"}
    | {"parsable", "partition", "qos", "requeue", "signal", "time", "wait", "wrap"}
)


def _option_name(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise fault(f"expected the long name of an sbatch option, such as exclude; got {name!r}")
    if name in _OWNED_OPTIONS:
        raise fault(f"expected an option that bsearch does not set itself, got {name!r}")
    return name


def _option_value(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9_./:=,@%+\[\]-]*", value):
        raise fault(f"expected a value without spaces and shell metacharacters, got {value!r}")
    return value


_SETUP = "a command without ; & | $ quotes and other shell metacharacters, or `source my-setup.sh` for more than that"


def _one_at_a_time(value: str) -> str:
    if not re.fullmatch(r"[0-9]+(-[0-9]+(:[0-9]+)?)?(,[0-9]+(-[0-9]+(:[0-9]+)?)?)*%1", value):
        raise fault(
            f"expected an array that runs one task at a time, such as 1-4%1, since a study has one driver; got {value!r}"
        )
    return value


class SlurmJob(Section):
    """A job in a Slurm queue: Ray is started on its nodes and ends with the job."""

    partition: Names | None = Field(None, description="Partition, or several separated by commas; default: the cluster's.")
    account: Name | None = Field(None, description="Account that the job is charged to.")
    qos: Name | None = Field(None, description="Quality of service.")
    # & and | are Slurm's operators on features; quoted in an #SBATCH line, no shell interprets them.
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
        None,
        description="Generic resources per node, such as gpu:a100:2; gpus_per_node sets how many of them Ray uses as GPUs.",
    )
    array: Annotated[StrictStr, AfterValidator(_one_at_a_time)] | None = Field(
        None, description="Job array of tasks that run one after another, such as 1-4%1: each resumes the study."
    )
    options: dict[Annotated[StrictStr, AfterValidator(_option_name)], Annotated[Scalar, AfterValidator(_option_value)]] = Field(
        {}, description="Other sbatch options by their long names; true for those without a value."
    )
    setup: tuple[Annotated[StrictStr, _like(r"[A-Za-z0-9_./~:=+@%,-]+( +[A-Za-z0-9_./~:=+@%,-]+)*", _SETUP)], ...] = Field(
        (),
        description="Commands at the start of the script, such as `module load cuda/12` or `source ~/venv/bin/activate`; "
        "default: none, using the Python that submits.",
    )
    requeues: StrictInt = Field(
        20,
        ge=0,
        description="How many times the job may requeue itself when it reaches its time limit before the study is done.",
    )


class SecretReference(Section):
    """One key of a Kubernetes secret."""

    name: Label = Field(description="Name of the secret.")
    key: SecretKey = Field("url", description="Key in it.")


class KubeRayJob(Section):
    """A RayJob of the KubeRay operator: a cluster of its own, deleted when the study ends."""

    image: (
        Annotated[StrictStr, _like(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "a container image such as registry/bsearch:0.1.0")] | None
    ) = Field(None, description="Container image with Ray, bsearch and the task's dependencies.")
    namespace: Label = Field("default", description="Kubernetes namespace of the objects created.")
    service_account: Label | None = Field(None, description="Service account of the pods; default: no API token is mounted.")
    storage_claim: Label | None = Field(None, description="Persistent volume claim mounted on every pod, for storage and data.")
    mount_path: Annotated[StrictStr, _like(r"(/[A-Za-z0-9_][A-Za-z0-9._-]*)+", "an absolute path such as /data")] = Field(
        "/data", description="Where the claim is mounted."
    )
    database_secret: SecretReference | None = Field(None, description="Secret that contains the storage URL.")
    environment_secret: Label | None = Field(
        None, description="Secret that contains the variables listed in `environment`, under the same names."
    )
    gpu_resource: Resource = Field("nvidia.com/gpu", description="Resource name of the cluster's GPUs.")
    ray_version: Annotated[StrictStr, _like(r"[0-9]+(\.[0-9a-z]+)*", "a version such as 2.60.0")] | None = Field(
        None, description="Ray version in the image; default: the version installed here."
    )
    token: StrictBool = Field(False, description="The cluster requires a token (KubeRay 1.5 and Ray 2.52 or later).")
    retries: StrictInt = Field(2, ge=0, description="How many times a failed cluster is recreated; the study then resumes.")
    keep_s: StrictInt = Field(600, ge=0, description="Seconds that the pods are kept after the study ends.")
    run_as_user: StrictInt = Field(1000, ge=1, description="User id in the image; 1000 is that of Ray's images.")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field("IfNotPresent", description="When nodes pull the image.")


class Submit(Section):
    """The batch job that `bsearch submit` creates; not part of the study's identity."""

    launcher: Name | None = Field(None, description="ray, slurm, kuberay, or the launcher of a plug-in.")
    nodes: StrictInt = Field(1, ge=1, description="Machines of the job.")
    gpus_per_node: StrictInt = Field(0, ge=0, description="GPUs per machine.")
    cpus_per_node: StrictInt = Field(4, ge=1, description="CPU cores per machine.")
    memory_per_node: Annotated[StrictInt | None, BeforeValidator(_bytes, json_schema_input_type=int | str | None)] = Field(
        None, description="Memory per machine, such as 16GiB; default: the cluster's."
    )
    hours: Number | None = Field(None, gt=0, le=24 * 365, description="Time limit of the job in hours; default: the cluster's.")
    environment: tuple[Variable, ...] = Field((), description="Environment variables passed on to the job, by name.")
    ray: RayJob = RayJob()
    slurm: SlurmJob = SlurmJob()
    kuberay: KubeRayJob = KubeRayJob()
    plugins: dict[Name, dict[Variable, Scalar]] = Field({}, description="Settings of plug-in launchers, by launcher.")


__all__ = ["KubeRayJob", "RayJob", "SecretReference", "SlurmJob", "Submit"]
