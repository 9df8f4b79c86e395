"""Which commands and pieces work on which torch: a table in Markdown. A traceback anywhere makes the exit code 1.

    python tests/torches.py --python OLD/bin/python NEW/bin/python
    python tests/torches.py --install FOLDER 2.6.0 2.9.1 newest       # some 6 GB and five minutes each

A version is installed as a user would have it: torch first, then this package, which must leave torch as it is.
Everything runs from the checkout, in a folder of its own. What a version lacks, as it is said, stands below the table.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 400
FAULT = "traceback"
TRAINING = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
loader = DataLoader(TensorDataset(torch.randn(512, 64), torch.randint(10, (512,))), 16)
for epoch in range(100):
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for row in inputs:
            row.sum().item()
    print(epoch, loss.item())
"""
TOOL = {  # a command a row, in this order: what one writes the next reads
    "profile": ["profile", "--limit", "60", "--output", "saved", "train.py"],
    "diagnose": ["diagnose", "saved"],
    "try": ["try", "--seconds", "40", "train.py"],
    "guard --update": ["guard", "--update", "train.py"],
    "guard": ["guard", "train.py"],
    "fit, one GPU": ["fit", "--batch", "1", "--sequence", "64", "--memory", "8"],
    "fit, 8 ranks": ["fit", "--batch", "8", "--sequence", "64", "--memory", "8", "--strategy", "zero3", "--ranks", "8"],
    "fit, speed": ["fit", "--batch", "1", "--sequence", "64", "--gpu", "h100"],
}
PIECES = {  # a room's import and a use of it
    "amp": "from helpers.amp import DynamicGradScaler; DynamicGradScaler()",
    "batching": "from helpers.batching import BalancedBatchSampler as B; list(B([3, 4, 9, 3], batch_size=2, k=2))",
    "profiling": "from helpers.profiling import ModuleProfiler; ModuleProfiler(torch.nn.Linear(2, 2))",
    "swiglu": "from helpers.swiglu import MemoryOptimizedSwigluMLP as M; M(8, 16)(torch.ones(2, 8)).sum().backward()",
    "kernels": "from helpers.kernels import rms_norm; rms_norm(torch.ones(2, 8))",
    "fit": "from helpers.fit import Plan, peak; peak(Plan(batch=1, sequence=64))",
    "rush": "from helpers.rush import Setup, run; run(Setup(model='tiny', sequence=64), steps=2, loss_steps=2)",
}
PIECE = """
import sys, torch
sys.path.insert(0, {root!r})
try:
    {use}
except ValueError as error:
    if "needs torch" not in str(error):
        raise
    sys.exit(str(error))
"""
VERSION = "import platform, numpy, torch; print(torch.__version__, numpy.__version__, platform.python_version())"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[], metavar="PATH", help="interpreters that have torch")
    parser.add_argument("--install", nargs="+", default=[], metavar="FOLDER VERSION", help="versions to install first")
    options = parser.parse_args()
    if not options.python and len(options.install) < 2:
        parser.error("which torch? give --python PATH …, or --install FOLDER VERSION …")
    folder, *versions = options.install or ["."]
    pythons = [Path(path).absolute() for path in options.python]
    pythons += [installed(Path(folder).absolute() / version, version) for version in versions]
    columns = {version(python): outcomes(python) for python in pythons}
    print_table(columns)
    return int(any(end == FAULT for ends in columns.values() for end, _ in ends.values()))


def installed(home: Path, wanted: str) -> Path:
    """The interpreter of an environment that has this torch and the package, made where it is missing."""
    python = home / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
    if not python.exists():
        venv.create(home, with_pip=True)
        subprocess.run([*pip, "torch" if wanted == "newest" else f"torch=={wanted}", "numpy"], check=True)
        before = version(python)
        subprocess.run([*pip, str(ROOT)], check=True)
        if (after := version(python)) != before:
            sys.exit(f"installing the package made {after} of {before}")
    return python


def version(python: Path) -> str:
    names = subprocess.run([str(python), "-c", VERSION], check=True, capture_output=True, text=True).stdout.split()
    return "torch {}, numpy {}, Python {}".format(*names)


def outcomes(python: Path) -> dict[str, tuple[str, str]]:
    """For each command and piece how it ended, and the line that says why it isn't "ok"."""
    print(version(python), file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(TRAINING)
        start = f"import runpy; runpy.run_path({str(ROOT / 'helpers' / '__main__.py')!r}, run_name='__main__')"
        commands = {name: ["-c", start, *arguments] for name, arguments in TOOL.items()}
        for name, use in PIECES.items():
            commands[f"`helpers.{name}`"] = ["-c", PIECE.format(root=str(ROOT), use=use)]
        return {name: outcome(name, [str(python), *command], folder) for name, command in commands.items()}


def outcome(name: str, command: list[str], folder: str) -> tuple[str, str]:
    # Temporary files lie beside the script, which `try` must not take for the script's own.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": folder}
    try:
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return FAULT, f"no end within {LIMIT_S} s"
    print(f"  {name}: exit code {ended.returncode}", file=sys.stderr)
    lines = [line.removeprefix("dlspeed: ") for line in ended.stderr.strip().splitlines()] or [""]
    if "Traceback (most recent call last)" in ended.stderr + ended.stdout or ended.returncode < 0:
        return FAULT, next(
            (line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)), lines[-1]
        )
    if ended.returncode:
        return "no", lines[-1]
    lack = next((line for line in lines if re.search(r"torch \d", line)), "")
    return "in part" if lack else "ok", lack


def print_table(columns: dict[str, dict[str, tuple[str, str]]]) -> None:
    notes = list(dict.fromkeys(note for ends in columns.values() for _, note in ends.values() if note))
    print("| |", " | ".join(columns), "|")
    print("|---|" + "---|" * len(columns))
    for name in next(iter(columns.values())):
        ends = [ends[name] for ends in columns.values()]
        cells = [f"{end} ({notes.index(note) + 1})" if note else end for end, note in ends]
        print(f"| {name} |", " | ".join(cells), "|")
    for number, note in enumerate(notes, 1):
        print(f"\n({number}) {note}")


if __name__ == "__main__":
    sys.exit(main())
