"""What is computed one by one where one call could do it, and what takes a slow path."""

import math
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from findings.synthetic import BF16, Synthetic, parse
from findings.test_on_cpu import record
from script.recorded import watch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from helpers.findings.diagnose import diagnose
from helpers.findings.rules import needless
from helpers.findings.trace_file import read_trace
from helpers.script import hooks, windows
from helpers.script.settings import Settings
from helpers.script.tensors import dependencies


def found(step):
    """The findings in a profile of a step, with the backward pass of the loss that it may return."""
    graphs = []

    def trained():
        if getattr(loss := step(), "requires_grad", False):
            graphs.append(dependencies(loss))
            loss.backward()

    trace = read_trace(record(trained))
    trace.about["settings"] = {"graphs": graphs}
    return {finding.finding: finding for finding in diagnose(trace, least=0.0).findings}


class Expert(nn.Sequential):
    def forward(self, x):
        return super().forward(x)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Expert(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(6))

    def forward(self, x):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.arange(number, len(x), len(self.experts))
            out = out.index_add(0, rows, expert(x[rows]))  # the loop
        return out.square().mean()


class Layers(Experts):
    def forward(self, x):
        for expert in self.experts:
            x = x + expert(x)
        return x.square().mean()


class Recurrence(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h, states = torch.zeros(8), []
        for row in x:
            h = torch.tanh(self.inner(row[None]) + self.outer(h[None]))[0]
            states.append(h)
        return torch.stack(states).square().mean()


LOOP_LINE = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("# the loop"))


def test_products_of_passes_that_need_not_each_other_are_one_by_one_and_layers_and_recurrences_are_not():
    x = torch.randn(48, 8)
    experts = Experts()
    finding = found(lambda: experts(x))["products one by one"]
    assert f"test_slow_paths.py:{LOOP_LINE} in forward" in finding.where
    assert "12 in a loop" in finding.evidence and finding.gain_ms > 0
    for model in (Layers(), Recurrence()):
        assert "products one by one" not in found(lambda model=model: model(x))


def test_members_of_a_graph_are_on_one_level_however_far_the_rest_goes_back():
    graph = {1: [], 2: [0], 3: [1], 4: [2, 3], 5: [4]}
    members = {number: f"op {number}" for number in (1, 2, 4, 5)}
    assert needless._levels(members, graph) == [["op 1", "op 2"], ["op 4"], ["op 5"]]


def test_micro_batches_of_a_backward_pass_each_are_not_one_by_one():
    model, x = nn.Linear(8, 8), torch.randn(8, 8)
    graphs = []

    def step():
        for _ in range(6):
            loss = model(x).square().mean()
            graphs.append(dependencies(loss))
            loss.backward()

    trace = read_trace(record(step))
    trace.about["settings"] = {"graphs": graphs}
    assert "products one by one" not in {f.finding for f in diagnose(trace, least=0.0).findings}


def test_losses_by_row_are_one_by_one_and_one_of_all_rows_is_not():
    head, x, y = nn.Linear(8, 5), torch.randn(6, 4, 8), torch.randint(5, (6, 4))

    def by_row():
        return torch.stack([F.cross_entropy(row, ids) for row, ids in zip(head(x), y, strict=True)]).mean()

    finding = found(by_row)["losses one by one"]
    assert "in by_row" in finding.where and "6 in a loop" in finding.evidence
    assert "losses one by one" not in found(lambda: F.cross_entropy(head(x).flatten(0, 1), y.flatten()))


@pytest.mark.parametrize("foreach", [False, None])
def test_norms_one_by_one_are_those_without_foreach(foreach):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(10)])
    model(torch.randn(4, 8)).square().mean().backward()
    names = found(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach))
    assert ("norms one by one" in names) == (foreach is False)
    if foreach is False:
        assert "norms a step, a call for each tensor" in names["norms one by one"].evidence


def test_flex_attention_that_is_not_compiled_is_named():
    q = torch.randn(1, 2, 128, 16)
    finding = found(lambda: flex_attention(q, q, q))["uncompiled flex_attention"]
    assert "torch.compile(flex_attention)" in finding.advice and finding.gain_share > 0.1
    assert "uncompiled flex_attention" not in found(lambda: F.scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize(("mask", "named"), [([1, 1, 512, 512], True), ([], False)])
def test_a_mask_keeps_attention_on_a_gpu_off_the_flash_kernel(mask, named):
    gpu = Synthetic()
    for number in range(3):
        with gpu.step():
            gpu.train_step(number)
            shape = [2, 8, 512, 64]
            gpu.op("aten::_scaled_dot_product_efficient_attention", [shape, shape, shape, mask], BF16, kernel="fmha")
    gains = {finding.finding: finding.gain_share for finding in diagnose(parse(gpu.events)).findings}
    assert ("attention with a mask" in gains) == named
    assert not named or gains["attention with a mask"] == pytest.approx(0.5 * 300 / 1105, rel=0.05)  # of its time


@pytest.mark.parametrize(
    ("dtype", "fast", "case"),
    [(torch.float64, True, "fp64"), (torch.float32, False, "mkldnn"), (torch.float32, True, "")],
)
def test_convolutions_on_the_slow_path_are_named_with_what_keeps_them_there(dtype, fast, case):
    layer, x = nn.Conv2d(3, 8, 3, dilation=2, dtype=dtype), torch.randn(2, 3, 64, 64, dtype=dtype)
    with torch.backends.mkldnn.flags(enabled=fast):
        names = found(lambda: layer(x).square().mean())
    assert ("slow convolutions" in names) == bool(case)
    if case:
        assert case in names["slow convolutions"].advice and names["slow convolutions"].gain_ms > 0


@pytest.mark.parametrize(("vocabulary", "named"), [(10_000, True), (100, False)])
def test_logits_of_a_large_vocabulary_in_fp32_are_named(vocabulary, named):
    head, x = nn.Linear(8, vocabulary, dtype=torch.bfloat16), torch.randn(32, 8, dtype=torch.bfloat16)
    names = found(lambda: head(x).float().square().mean())
    assert ("logits in fp32" in names) == named
    if named:
        assert "32 × 10,000 numbers" in names["logits in fp32"].evidence


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library whose fast path needs a package, which `warn` may name."""
    folder = tmp_path / "site-packages" / "scanning"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        textwrap.dedent(
            """
            import logging, torch
            def scan(x, warn):
                if warn:
                    logging.getLogger(__name__).warning("`fastscan` is not installed: falling back to a loop")
                h = x[0]
                for number in range(len(x)):
                    h = torch.lerp(h, x[number], 0.5)
                return h
            """
        )
    )
    monkeypatch.syspath_prepend(str(folder.parent))
    yield __import__("scanning")
    sys.modules.pop("scanning")


@pytest.mark.parametrize("warn", [True, False])
def test_a_package_that_a_library_misses_is_named_with_the_line_that_takes_its_place(library, warn):
    settings, x = Settings(), torch.randn(100, 8)
    with hooks.wrap(settings.arounds()):
        trace = read_trace(record(lambda: library.scan(x, warn)))
    trace.about["settings"] = {"warned": settings.data()["warned"]}
    names = {f.finding: f for f in diagnose(trace, least=0.0).findings}
    assert ("missing package" in names) == warn
    if warn:
        assert names["missing package"].advice.startswith("install fastscan")
        assert "scanning/__init__.py:8 in scan" in names["missing package"].where


def test_a_warning_of_the_users_own_is_no_librarys():
    settings = Settings()
    with hooks.wrap(settings.arounds()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("fastscan is not installed", stacklevel=1)
    assert len(caught) == 1 and caught[0].filename == __file__ and not settings.data()["warned"]


@pytest.mark.long
def test_a_loop_over_experts_is_named_in_a_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {"OBSERVED_S": 0.5, "SLOW_SEEN": math.inf, "SLOW_SHARE": math.inf}.items():
        monkeypatch.setattr(windows, name, value)
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
            import torch
            from torch import nn
            class Experts(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))
                def forward(self, x):
                    parts = x.chunk(len(self.experts))
                    return torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
            model = nn.Sequential(nn.Linear(16, 16), Experts(), nn.Linear(16, 1))
            optimizer = torch.optim.Adam(model.parameters(), fused=True)
            while True:
                optimizer.zero_grad()
                model(torch.randn(96, 16)).square().mean().backward()
                optimizer.step()
            """
        )
    )
    findings = diagnose(watch("train.py").folder).findings
    [where] = [finding.where for finding in findings if "torch.bmm" in finding.advice]
    assert Path(where.split()[0]).name == "train.py:10"
