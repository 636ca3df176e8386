"""An agent that improves a training by edits of its code, and keeps one only if `bsearch compare` calls it better.

python loop.py [FOLDER] [--trials 24] [--candidates NAME ...]
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from candidates import CANDIDATES

HERE = Path(__file__).parent
GIT = ["git", "-c", "user.name=agent", "-c", "user.email=agent@localhost", "-c", "commit.gpgsign=false"]


def compare(folder, trials):
    """bsearch's answer: the working tree against the last commit, each at its own best settings."""
    command = [
        sys.executable,
        "-m",
        "bsearch",
        "compare",
        "study.yaml",
        "--against",
        "HEAD",
        "--serial",
        "--json",
    ]
    done = subprocess.run([*command, "--trials", str(trials)], cwd=folder, capture_output=True, text=True)
    # Such as an edit that does not train: an agent reads what was expected, and what to do.
    if done.returncode == 3:
        return {"verdict": "failed", **json.loads(done.stderr.splitlines()[-1])}
    return json.loads(done.stdout)


def improve(folder, candidates, trials):
    """Try each edit on the code as it stands by then; yields its name, the answer, and whether it was kept."""
    for name, pattern, replacement in candidates:  # a language model proposes here
        code = folder / "tasks.py"
        code.write_text(re.sub(pattern, replacement, code.read_text()))
        answer = compare(folder, trials)
        kept = answer["verdict"] == "better"
        then = ["commit", "-q", "--all", "--allow-empty", "-m", name] if kept else ["reset", "-q", "--hard"]
        subprocess.run([*GIT, *then], cwd=folder, check=True)
        yield name, answer, kept


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, help="a new folder for the repository; default: a temporary one"
    )
    parser.add_argument("--trials", type=int, default=24, help="of both sides together, for each candidate")
    parser.add_argument(
        "--candidates", nargs="+", default=[name for name, *_ in CANDIDATES], help="and their order"
    )
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(), "digits")).resolve()
    folder.mkdir(parents=True)
    for name in ("study.yaml", "tasks.py"):
        shutil.copy(HERE / name, folder)
    (folder / ".gitignore").write_text("*.db*\nresults\n__pycache__\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "As it was"]):
        subprocess.run([*GIT, *words], cwd=folder, check=True)
    proposed = {name: (name, *edit) for name, *edit in CANDIDATES}
    for name, answer, kept in improve(
        folder, [proposed[name] for name in options.candidates], options.trials
    ):
        at_end = answer.get("within", [{}])[-1]
        found = (
            "{difference:+.4f} [{low:+.4f}, {high:+.4f}]".format(**at_end)
            if at_end
            else answer.get("error", "")
        )
        note = "(its validation data differ)  " if answer.get("same_data") is False else ""
        print(f"{name:10} {answer['verdict']:12} {found}  {note}{'kept' if kept else 'reset'}", flush=True)
    print(f"{folder}: git log")


if __name__ == "__main__":
    main()
