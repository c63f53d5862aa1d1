"""What launch/programs/options.py reads of a program's source is what the program's own parser takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

from tests.packaging.checkout import ROOT

SCRIPTS = {
    file.name: found[1]
    for file in sorted((ROOT / "launch").iterdir())
    if file.is_file() and (found := re.search(r"read_arguments (launch/\S+\.py)", file.read_text()))
}
"""Scripts whose arguments are checked against a program's source, and the program."""
READ = """
import argparse, json, runpy, sys
from pathlib import Path

class Read(BaseException):
    pass

def stop(parser, *arguments, **keywords):
    raise Read(parser)

argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_known_args = stop
sys.path.insert(0, "launch")
from programs.options import parser_of

def options(parser):
    verbs = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    below = [name for verb in verbs for one in verb.choices.values() for name in one._option_string_actions]
    return sorted({*parser._option_string_actions, *below})

found = {}
for program in sys.argv[1:]:
    source = parser_of(Path(program))
    sys.argv = [program]
    try:
        runpy.run_path(program, run_name="__main__")
    except Read as read:
        found[program] = options(read.args[0]), options(source)
print(json.dumps(found))
"""
"""Prints each program's options by its own parser, and by its source."""


def test_every_option_of_a_program_is_read_from_its_source() -> None:
    """An option that a helper function adds would be refused before the program starts."""
    programs = sorted({*SCRIPTS.values()})
    assert len(programs) > 20
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", READ, *programs]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sorted(found) == programs
    assert not {program: sides for program, sides in found.items() if sides[0] != sides[1]}
