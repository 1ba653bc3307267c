"""The tables of docs/diffusers.md have every class of the installed diffusers."""

from __future__ import annotations

import re
from functools import partial

import pytest
from torch import nn

from ..observe import message_of

diffusers = pytest.importorskip("diffusers")
from seqpar.diffusers import parallelize  # noqa: E402
from seqpar.diffusers.plans import PLANS  # noqa: E402

from .models import installed  # noqa: E402
from .table import NOT_WRITTEN, PAGE, compared, refused  # noqa: E402


@pytest.mark.skipif(not diffusers.__version__.startswith("0.42"), reason="the tables are of 0.42")
def test_the_docs_name_every_class() -> None:
    page = PAGE.read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| \de[-+]", page, re.M)
    assert dict(rows) == {name: compared(name) for name in PLANS} and len(rows) == len(PLANS)
    assert "\n".join(refused()) in page, "run make families"


def test_classes_without_a_plan_are_refused_with_the_reason() -> None:
    reason: dict[str, str] = {}
    for row in refused()[2:]:
        names, why = row.strip("| ").split(" | ")
        reason |= dict.fromkeys(re.findall("`(.*?)`", names), why)
    classes = installed()
    assert reason.keys() == classes.keys() - PLANS.keys()
    for name, why in reason.items():
        cls = classes[name]
        model = cls.__new__(cls)
        nn.Module.__init__(model)  # without its modules, which may be large
        message = message_of(partial(parallelize, model))
        assert name in message and (f"because {why}" in message) == (why != NOT_WRITTEN), message
