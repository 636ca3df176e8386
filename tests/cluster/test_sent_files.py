"""What `submit` sends of a folder with forty secrets, and what it leaves out: by name, by rules of a scanner; code is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from bsearch.cluster.submit.files import study_files
from bsearch.spaces.errors import StudyFileError

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjE=\n"
AWS = "AKIA" + "IOSFODNN7EXAMPLQ"
GITHUB = "ghp_" + "abcdefghijklmnopqrstuvwxyz0123456789"
HUB = "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEF12"
SECRETS: dict[str, str | bytes] = {
    **dict.fromkeys(
        (
            "id_rsa",
            "id_ed25519.old",
            "server.pem",
            "tls.key",
            "login.ppk",
            "app.p8",
            "a.p12",
            "b.pfx",
            "c.jks",
        ),
        "x",
    ),
    **dict.fromkeys(
        (
            "vault.kdbx",
            "me.keytab",
            "kubeconfig.yaml",
            "my-service-account.json",
            "prod.env",
            "terraform.tfstate",
        ),
        "x",
    ),
    **dict.fromkeys(
        (
            "terraform.tfstate.backup",
            "prod.tfvars",
            "backup.gpg",
            "key.asc",
            "_netrc",
            "htpasswd",
            "pgpass.conf",
        ),
        "x",
    ),
    **dict.fromkeys(
        (
            "credentials.ini",
            "aws_credentials",
            "token",
            "hf_token.txt",
            "secret.json",
            "passwords.txt",
            "api_key.txt",
        ),
        "x",
    ),
    **dict.fromkeys(("client_secret_1.json", "wandb-token.cfg", "work.ovpn"), "x"),
    "secrets.sh": "export PASSWORD=hunter2x\n",
    "late.txt": "x" * 9000 + "\n" + KEY,
    "utf16.ini": f"aws = {AWS}\n".encode("utf-16"),
    "config.ini": "[db]\npassword = hunter2x\n",
    "settings.yaml": "db:\n  url: postgresql://ann:hunter2x@host/db\n",
    "push.sh": f"git push https://{GITHUB}@github.com/a/b\n",
    "note.md": f"export HF={HUB}\n",
    "run.ipynb": '{"cells": [{"source": ["key = \'' + AWS + "'\"]}]}",
    "pip.conf": "index-url = https://ann:hunter2x@pypi.example.org/simple\n",
}
CODE = {
    "tasks.py": "token = tokenizer(batch)\npassword = getpass()\nsecret_of = {'key': 1}\n",
    "secrets.py": "def token(): ...\n",
    "tokens.py": "SPECIAL = ['<pad>']\n",
    "tokenizer.json": '{"added_tokens": [], "model": {"vocab": {"a": 0}}}',
    "special_tokens_map.json": '{"pad_token": "<pad>"}',
    "study.yaml": "study: a\nstorage: sqlite:///a.db\n",
    "requirements.txt": "torch==2.11 --hash=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\n",
    "environment.yaml": "dependencies: [python]\n",
    "allowed.ini": "password = example1  # pragma: allowlist secret\n",
}


def test_forty_secrets_stay_and_code_is_sent(tmp_path: Path) -> None:
    assert len(SECRETS) == 41
    for name, content in (SECRETS | CODE).items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    found = study_files(tmp_path)
    assert {str(path) for path in found.kept} == set(CODE)
    assert {name.partition(" (")[0] for name in found.left_out} == set(SECRETS)
    assert "utf16.ini (may hold a secret: AWS Access Key in line 1)" in found.left_out
    print("sent:", *found.kept, "\nnot sent:", *found.left_out, sep="\n  ")


@pytest.mark.parametrize(
    "code", [f"key = '{AWS}'\n", f"token = '{HUB}'\n", f"\nURL = 'https://{GITHUB}@github.com'\n"]
)
def test_code_with_a_secret_is_refused_by_its_line(tmp_path: Path, code: str) -> None:
    (tmp_path / "tasks.py").write_text(code)
    with pytest.raises(StudyFileError, match=r"got tasks.py: .* in line \d.*allowlist"):
        study_files(tmp_path)
