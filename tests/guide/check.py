#!/usr/bin/env python3
"""Runs the commands of a guide, and compares what they print with the guide.

check.py GUIDE.md PROGRAM PROGRAMS_FOLDER

Runs in an empty folder that holds PROGRAM under the name of the guide and the files of its blocks: ```json NAME and
```yaml NAME are written to NAME. Each ```sh block is run; the ```text block after it is its whole standard output, in which a
long line may be broken by a backslash. Lines must be equal. Numbers with a decimal point may differ by one in their last printed digit, since processors round sums
differently; all other numbers and words may not. A block that needs a launcher which is not installed is skipped.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+(?![\w.])")


def blocks(text):
    """(language, name, content) of each fenced block."""
    return re.findall(r"^```(\w+) ?([^\n]*)\n(.*?)^```$", text, re.M | re.S)


def digits(number):
    return len(number.partition(".")[2])


def near(a, b):
    step = 10.0 ** -digits(a)
    return digits(a) == digits(b) and abs(float(a) - float(b)) < 1.5 * step


def same(expected, printed):
    if NUMBER.sub("#", expected) != NUMBER.sub("#", printed):
        return False
    return all(near(a, b) for a, b in zip(NUMBER.findall(expected), NUMBER.findall(printed)))


def difference(expected, printed):
    """What differs, or an empty text."""
    for line, (a, b) in enumerate(zip(expected, printed), 1):
        if not same(a, b):
            return f"line {line}:\n  guide:   {a}\n  printed: {b}\n"
    if len(expected) != len(printed):
        return f"the guide has {len(expected)} lines, {len(printed)} were printed\n"
    return ""


def run(command, folder, programs):
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    if ".deepspeed_env" not in command:  # the user's own, in the home folder
        environment["DS_ENV_FILE"] = ""
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=folder, env=environment, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{command}exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


LAUNCHERS = {"mpirun": r"\b(mpirun|openmpi)\b", "srun": r"\b(srun|sbatch|salloc)\b"}


def missing_launcher(command):
    """A program that the command needs and that is not installed, or None."""
    return next((p for p, words in LAUNCHERS.items() if re.search(words, command) and not shutil.which(p)), None)


def check(guide, program, programs):
    runs = 0
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(program, os.path.join(folder, guide.stem))
        command = None
        for language, name, content in blocks(guide.read_text()):
            if language in ("json", "yaml") and name:
                pathlib.Path(folder, name).write_text(content)
            elif language == "sh":
                command = content
            elif language == "text" and command and (missing := missing_launcher(command)):
                print(f"skipped, since {missing} is not installed: {command}", end="")
                command = None
            elif language == "text" and command:
                printed = run(command, folder, programs)
                if found := difference(content.replace("\\\n", "").splitlines(), printed.splitlines()):
                    sys.exit(f"{guide}: {command}{found}\nprinted in full:\n{printed}")
                runs, command = runs + 1, None
    if not runs:
        sys.exit(f"{guide}: no ```sh block with a ```text block after it")


if __name__ == "__main__":
    check(pathlib.Path(sys.argv[1]), os.path.abspath(sys.argv[2]), os.path.abspath(sys.argv[3]))
