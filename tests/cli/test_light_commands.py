"""What composes and validates a recipe imports no tensor library, and so answers at once (evidence/start)."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "verl", "ray", "numpy", "scipy", "httpx", "huggingface_hub.file_download")
COMMANDS = (
    ["check", "--help"],
    ["explain"],
    ["plan"],
    ["plan", "--hardware", "h100"],
    ["diff", "lab", "lab credit=paper"],
)
ASK = f"""
import contextlib, io, sys
from verl_credit.cli import main
for command in {COMMANDS!r}:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(command)
    print(code, len(printed.getvalue()) > 300, [name for name in {HEAVY!r} if name in sys.modules])
"""


@pytest.mark.slow
def test_explain_plan_diff_and_help_import_no_torch():
    answer = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    codes = ["0", "0", "0", "0", "1"]  # diff: they differ
    assert answer.stdout.splitlines() == [f"{code} True []" for code in codes], answer.stderr
