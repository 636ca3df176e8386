"""kubectl of a Kubernetes that is one folder, named by FAKE_KUBE: it checks what it is given, keeps it and forgets it.

There is no KubeRay in it: a test plays the operator by `tell`, which writes a status and what a pod prints.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("FAKE_KUBE", "/nowhere"))
SCHEMA = Path(__file__).parent.parent / "golden" / "rayjob.schema.json"


def program(folder: Path) -> Path:
    """Write the command into a folder for PATH."""
    folder.mkdir()
    command = folder / "kubectl"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} "$@"\n')
    command.chmod(0o755)
    return folder


def template(folder: Path, **changes: str) -> str:
    """The path of our RayJob with an image and a volume claim in it, and other text changed."""
    from bsearch.cluster.submit.template import OURS

    text = (OURS / "kuberay.yaml").read_text()
    for old, new in {"REGISTRY/IMAGE:TAG": "registry.example/bsearch:0.1.0", "CLAIM": "studies", **changes}.items():
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "rayjob.yaml"
    path.write_text(text)
    return str(path)


def tell(folder: Path, name: str, printed: str = "", **status: str) -> None:
    """What the operator says of a RayJob, and what its pod prints."""
    (path,) = folder.glob(f"*/rayjob/{name}.json")
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "status": status}))
    if printed:
        path.with_suffix(".log").write_text(printed)


def faults(kept: dict[str, Any]) -> list[str]:
    import jsonschema

    if kept["kind"] == "RayJob":
        schema = json.loads(SCHEMA.read_text())
        return [f"{one.json_path}: {one.message}" for one in jsonschema.Draft202012Validator(schema).iter_errors(kept)]
    if (kept["kind"], kept["apiVersion"]) != ("ConfigMap", "v1"):
        return [f"no matches for kind {kept['kind']!r}"]
    size = sum(len(key) + len(value) for part in ("data", "binaryData") for key, value in kept.get(part, {}).items())
    return ["data: Too long: must have at most 1048576 bytes"] if size > 1 << 20 else []


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser("kubectl", allow_abbrev=False)
    parser.add_argument("verb", choices=["apply", "get", "logs", "delete"])
    for option in ("--namespace", "--filename", "--selector", "--output", "--tail"):
        parser.add_argument(option)
    parser.add_argument("--ignore-not-found", action="store_true")
    parser.add_argument("--wait")
    parser.add_argument("names", nargs="*")
    asked = parser.parse_intermixed_args(arguments)
    space = ROOT / asked.namespace
    if asked.verb == "apply":
        import yaml

        given = list(yaml.safe_load_all(sys.stdin))
        if wrong := [fault for one in given for fault in faults(one)]:
            sys.exit("error validating data: " + "; ".join(wrong))
        for one in given:
            path = space / one["kind"].lower() / f"{one['metadata']['name']}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            one["metadata"]["creationTimestamp"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            path.write_text(json.dumps(one))
        return
    if asked.names == ["rayjobs.ray.io"]:
        key, _, value = asked.selector.partition("=")
        kept = [json.loads(path.read_text()) for path in sorted(space.glob("rayjob/*.json"))]
        print(json.dumps({"items": [one for one in kept if one["metadata"]["labels"].get(key) == value]}))
        return
    for name in asked.names:
        kind, _, id = name.partition("/")
        path = space / {"rayjobs.ray.io": "rayjob", "job": "rayjob"}.get(kind, kind) / f"{id}.json"
        if asked.verb == "logs":
            path = path.with_suffix(".log")
        if not path.exists():
            if asked.ignore_not_found:
                continue
            sys.exit(f'Error from server (NotFound): {kind} "{id}" not found')
        if asked.verb == "delete":
            path.unlink()
        else:
            print(path.read_text(), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
