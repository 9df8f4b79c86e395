"""The table of faults: what it names exists, and each planted loop has its entry."""

import pytest

from helpers import faults
from helpers.chapters.profiling.planted_faults import PIPELINES
from helpers.chapters.tool import cases
from helpers.trying import changes
from helpers.trying.answer import COUNTED

LOOPS = cases.CASES | cases.cases_in(cases.LOOPS / "gpu")
FIXES = {switch.name for pipeline in PIPELINES.values() for switch in pipeline.switches}


@pytest.mark.parametrize("fault", faults.entries().values(), ids=lambda fault: fault.name)
def test_the_changes_and_loops_of_a_fault_exist(fault):
    assert set(fault.tried) <= {*changes.ALL, *COUNTED.values()}
    assert all(name in FIXES or LOOPS[name]["script"].exists() for name in fault.planted)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_planted_loop_expects_what_was_written_down_before_the_tool_saw_it(loop):
    assert set(faults.planted_by(loop)) == set(LOOPS[loop]["findings"])


def test_a_remedy_is_filled_and_may_be_of_a_case():
    assert faults.remedy("unfused optimizer", "not fused", kind="Rprop").startswith("Rprop(…, foreach=True)")
    assert faults.planted_by("conv_patches") == []  # no profile shows it
