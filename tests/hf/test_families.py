"""The script of ``make families`` finds equal, refused and wrong models. It runs on a few of them here."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from ..pool import Pool
from . import families
from .families import BATCHES, Error, Row, cells_of

EQUAL, REFUSED = ["equal"] * 3, ["refused"] * 3
WITH_ENCODER = ["equal", "equal", "-"]


@pytest.mark.thorough
def test_families_of_each_outcome(pool: Pool) -> None:
    every = {family.name: family for family in families.families() if not family.changes}
    assert {family.kind for family in every.values()} == {*families.KINDS} and len(every) > 100
    expected = {"LlamaForCausalLM": EQUAL, "BertForMaskedLM": EQUAL, "FalconForCausalLM": REFUSED}
    # An encoder with windows that its masks do not have runs whole; and a loss function that gets shifted labels.
    expected |= dict.fromkeys(("T5GemmaForConditionalGeneration", "MoonshineForConditionalGeneration"), WITH_ENCODER)
    for name, cells in expected.items():
        row, other = pool.run(2, families.check, every[name])
        assert row == other and cells_of(row)[0] == cells and cells_of(row)[2], row
        assert cells is not REFUSED or "in layer 'transformer.h.0.self_attention' (FalconAttention)" in cells_of(row)[1]


def test_cells_of_wrong_models() -> None:
    right = dict.fromkeys(BATCHES, Error(1e-6, 1e-5))
    assert cells_of(Row(cells=dict(right))) == (EQUAL, "", True)
    assert cells_of(Row(cells={**right, "left": Error(0.5, 0.05)})) == (["equal", "WRONG (5e-01)", "equal"], "", False)
    assert cells_of(Row(cells={**right, "left": Error(float("nan"), 1e-5)}))[0][1] == "WRONG (nan)"
    assert cells_of(Row(cells={**right, "packed": "IndexError: x"}))[0::2] == (["equal", "equal", "FAILS"], False)
    assert cells_of(Row(cells={**right, "packed": "refused: x"})) == (["equal", "equal", "refused"], "x", True)
    assert cells_of(Row(cells={"plain": "WorkerError: x"}))[2] is False
    assert cells_of(Row(unbuilt="ImportError: x")) == (["-"] * 3, "could not be built: ImportError: x", True)
