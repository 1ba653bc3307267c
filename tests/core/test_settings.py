"""The environment variables of the package: one table of what they may be, which the documentation repeats."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seqpar.base.settings import SETTINGS, check_settings, number, switch, text

from ..observe import message_of

ROOT = Path(__file__).parents[2]


def test_every_variable_is_in_the_table_and_on_the_page() -> None:
    sources = [path for folder in ("seqpar", "triton_kernels") for path in (ROOT / folder).rglob("*.py")]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for path in (*sources, *pages) for name in re.findall(r"SEQPAR_[A-Z_]*[A-Z]", path.read_text())}
    assert named - {"SEQPAR_NCCL"} == {*SETTINGS}
    # Nothing reads one past the table. Kernels import nothing of the package; their backend checks the value.
    reading = {path.name for path in sources if re.search(r'os\.environ.*"SEQPAR_', path.read_text())}
    assert reading == {"tune.py"}
    rows = [f"| `{name}` | {s.allowed} | {s.does} | {s.default} |" for name, s in SETTINGS.items()]
    page = (ROOT / "docs" / "settings.md").read_text().splitlines()
    assert [line for line in page if line.startswith("| `SEQPAR")] == rows


@pytest.mark.parametrize("name", SETTINGS)
def test_values(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    setting = SETTINGS[name]
    monkeypatch.delenv(name, raising=False)
    if setting.kind == "text":
        assert text(name) is None
        monkeypatch.setenv(name, "a name")
        assert text(name) == "a name"
        return
    assert (switch(name) if setting.kind == "switch" else number(name)) == {"on": True, "off": False}.get(
        setting.default if setting.kind == "switch" else ""
    )
    read = switch if setting.kind == "switch" else number
    allowed: dict[str, int | None] = {"1": 1, "": read(name)}
    if setting.least == 0:
        allowed |= dict.fromkeys(["0", "off", "OFF", "no", "false", "False"], 0)
    if setting.kind == "switch":
        allowed |= dict.fromkeys(["on", "yes", "true", "ON"], 1)
    else:
        allowed["7"] = 7
    for value, meant in allowed.items():
        monkeypatch.setenv(name, value)
        assert read(name) == meant, value
        check_settings()
    refused = ["2.5", "-1", "maybe", " 1"]
    refused += [str(setting.most + 1)] if setting.most else []
    refused += ["2"] if setting.kind == "switch" else []
    refused += ["0", "off"] if setting.least else []
    for value in refused:
        monkeypatch.setenv(name, value)
        for call in (lambda: read(name), check_settings):
            assert message_of(call).startswith(f"ValueError: {name}={value}: expected {setting.allowed}"), value
