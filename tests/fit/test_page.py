"""The page to play with says what `fit` says."""

import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from helpers.fit import fit, plan_run, speed
from helpers.fit.page import Grid, page, render, setting
from helpers.lab.cards import cards

COMMITTED = Path(__file__).parents[2] / "fit.html"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SMALL = Grid(("tiny",), (64,), (1, 2), ("none",), ("amp-bf16", "bf16"), ("1", "8, ZeRO-3"), ("t4", "h200"))


def data_of(html):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    return json.loads(text)


@pytest.fixture(scope="module")
def small():
    return page(SMALL, 1)


@pytest.mark.long
def test_a_page_asks_for_nothing_and_names_every_choice(small):
    assert not re.search(r"https?://|\b(src|href)=|fetch\(|import\b", small) and len(small) < 2**20
    data = data_of(small)
    assert data["axes"]["batch"] == [1, 2] and len(data["settings"]) == 8
    assert sum(each is None for each in data["settings"]) == 2  # bf16 weights on many GPUs
    assert "All 12 settings" in small


@pytest.mark.long
def test_a_setting_is_what_fit_and_speed_say_of_its_plan(small):
    for plan, found in zip(SMALL.plans(), data_of(small)["settings"], strict=True):
        told = found and fit(plan, None)
        for name, (fits, rate, *_, bound) in zip(SMALL.card, found["cards"] if found else (), strict=False):
            assert (found["peak"], bool(fits)) == (
                round(told["peak_gib"], 2),
                told["peak_gib"] < cards()[name].memory_gib,
            )
            assert found["gib"] == [round(part, 2) for part in told["parts_gib"].values()]
            row = speed(plan_run(plan) | {"gpu": name})
            assert (rate, bound) == (round(row["tokens_per_s_gpu"]), row["bound"])


@pytest.mark.long
def test_the_committed_page_is_what_would_be_written_now():
    html, grid = COMMITTED.read_text(), Grid()
    data, plans = data_of(html), list(grid.plans())
    assert len(html) < 16_000 * len(grid.card) and data["axes"] == {name: list(of) for name, of in vars(grid).items()}
    assert html == render(grid, data["settings"]), "run `dlspeed fit --page fit.html`"
    for place in random.Random(0).sample([at for at, plan in enumerate(plans) if plan], 4):
        assert data["settings"][place] == setting(plans[place], grid.card), "run `dlspeed fit --page fit.html`"


@pytest.mark.skipif(not BROWSER, reason="no Chromium")
def test_a_browser_shows_the_setting_of_its_address(small, tmp_path):
    file = tmp_path / "fit.html"
    file.write_text(small, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    address = f"{file.as_uri()}#model=tiny&sequence=64&batch=2&gpus=8%2C+ZeRO-3&card=h200"
    shown = subprocess.check_output([BROWSER, *options, address], text=True, timeout=60)
    plan = next(each for each in SMALL.plans() if each and (each.batch, each.ranks) == (16, 8))
    assert f"It fits: {setting(plan, SMALL.card)['peak']:.2f} of 141 GiB" in shown


@pytest.mark.skipif(not shutil.which("node"), reason="no node")
def test_the_script_looks_up_the_setting_of_the_chosen_values(small, tmp_path):
    (script,) = re.findall(r"<script>\n(.*?)</script>", small, re.DOTALL)
    functions = script[script.index("function place") : script.index("function row")]
    chosen = {"model": "tiny", "sequence": "64", "batch": "2", "checkpointing": "none", "precision": "amp-bf16"}
    chosen |= {"gpus": "8, ZeRO-3", "card": "h200"}
    program = f"{functions}\nconst data = {json.dumps(data_of(small))};\n"
    program += f"console.log(JSON.stringify(lookup(data, {json.dumps(chosen)})));"
    (tmp_path / "lookup.js").write_text(program)
    told = json.loads(subprocess.check_output(["node", tmp_path / "lookup.js"], text=True))
    plan = next(each for each in SMALL.plans() if each and (each.batch, each.ranks) == (16, 8))
    expected = setting(plan, SMALL.card)
    assert told["peak"] == expected["peak"] and told["card"] == expected["cards"][1]
    assert told["memory"] == cards()["h200"].memory_gib
