"""``seqpar demo`` and ``examples/bytelm.py``: one loss curve for every strategy, and exact resumption."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

from seqpar.cli import demo
from seqpar.examples import bytelm

from ..pool import OwnPool, on_ranks, start
from ..reference import assert_close, assert_error
from .command import exit_code

SMALL = ["--seq-len=61", "--layers=2", "--hidden=32", "--heads=4", "--kv-heads=2", "--steps=4", "--device=cpu"]
SMALL += ["--mask=window:30+documents"]
Train = Callable[..., list[float]]
_runs = count()


@on_ranks
def losses_of_rank(group: ProcessGroup, port: int, run: str, argv: list[str]) -> list[float]:
    start(port, run, group.rank(), group.size())
    losses: list[float] = bytelm.main(argv)["losses"]
    return losses


@pytest.fixture
def train(own: OwnPool) -> Train:
    def train(ranks: int, *options: str) -> list[float]:
        """The losses of ``bytelm.py`` with the options of ``SMALL`` and others, on some ranks."""
        argv = [*SMALL, *options]
        by_rank = own.pool.run(ranks, losses_of_rank, own.port, f"run {next(_runs)}", argv)
        assert all(losses == by_rank[0] for losses in by_rank)
        return by_rank[0]

    return train


@pytest.mark.slow
@pytest.mark.thorough(ranks=[4])
@pytest.mark.thorough(options=[["--strategy=tp_sp", "--layout=contiguous"]])
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, ["--strategy=ring", "--layout=striped"]),
        (2, ["--strategy=context_parallel"]),
        (2, ["--strategy=tp_sp", "--layout=contiguous"]),
        (4, ["--strategy=ulysses", "--layout=contiguous"]),
        (4, ["--strategy=hybrid"]),
    ],
)
def test_ranks_have_the_losses_of_one_process(train: Train, ranks: int, options: list[str]) -> None:
    assert_close(train(ranks, *options), train(1))


@pytest.mark.slow
def test_resuming_is_exact_on_any_number_of_ranks(train: Train, tmp_path: Path) -> None:
    whole, folder = train(1), f"--checkpoints={tmp_path}"
    assert train(1, folder, "--save-every=2") == whole
    assert train(1, f"--resume={tmp_path}/2") == whole[2:]
    assert_close(train(4, f"--resume={tmp_path}/2", "--strategy=ring"), whole[2:])


@pytest.mark.slow
def test_sharded_weights_and_moments_are_resumed(train: Train, tmp_path: Path) -> None:
    whole, folder, sharded = train(1), f"--checkpoints={tmp_path}", ["--strategy=tp_sp", "--layout=contiguous"]
    train(1, folder, "--steps=2")
    assert_close(train(2, f"--resume={tmp_path}/2", *sharded, "--steps=3", folder), whole[2:3])
    assert_close(train(1, f"--resume={tmp_path}/3"), whole[3:])


@pytest.mark.slow
def test_the_loss_falls(train: Train) -> None:
    losses = train(1, "--steps=30", "--lr=1e-2", "--mask=causal")
    assert losses[-1] < losses[0] - 1
    assert_close(train(1, "--bf16"), train(1), torch.bfloat16)


def test_documents() -> None:
    text = b"one\n\nthree\n\n\nfive"
    starts = bytelm.document_starts(text)
    assert starts.nonzero().flatten().tolist() == [0, 5, 12]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    args = bytelm.arguments(["--mask=documents", "--seq-len=40", "--batch=1"])  # longer than the text: a circle
    tokens, labels, mask = bytelm.make_batch(data, starts, 0, args)
    seen = mask.dense(40).reshape(40, 40)
    for i in range(40):
        words = bytes(tokens[0, int(seen[i].nonzero()[0]) : i + 1].tolist())
        assert b"\n\n" not in words[:-3]
        # A document's last token has no label: the next token is another document's.
        assert (labels[0, i] == bytelm.IGNORED) == words.endswith((b"e\n\n", b"\n\n\n", b"five"))


@pytest.mark.slow
@pytest.mark.thorough
def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    some = {"ring, zigzag": demo._STRATEGIES["ring, zigzag"]}
    monkeypatch.setattr(demo, "_STRATEGIES", some)
    assert exit_code("demo", "--nproc=2", "--steps=2", "--seq-len=65", f"--text={__file__}", f"--out={tmp_path}") == 0
    with (tmp_path / "demo.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["one process", *some]
    for row in rows:
        assert_error(float(row["largest_difference"]), 0.0, size=math.log(256))  # of losses of bytes
    assert all(float(row["attention_bytes_per_token"]) > 0 for row in rows[1:])
    assert "ring, zigzag" in capsys.readouterr().out
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    # A wrong loss is an error.
    monkeypatch.setattr(demo, "launch", lambda *_, **__: [{**dict.fromkeys(MEASURED, 1.0), "losses": [next(_runs)]}])
    assert exit_code("demo", "--nproc=2", "--steps=1", f"--out={tmp_path}") == 1
    assert "ring, zigzag: the loss differs from one process's by more than 0.01" in capsys.readouterr().err


def test_a_difference_of_0_is_drawn_at_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(demo, "save_figure", lambda figure, path: figures.append(figure))
    demo._plot(tmp_path / "demo.png", {"one process": [2.0, 1.0], "ring": [2.0, 1.5]}, "title")
    below = figures[0].axes[1]
    assert [list(line.get_ydata()) for line in below.lines] == [[0.0, 0.5]]
    figures[0].canvas.draw()
    shown = {label.get_position()[1]: label.get_text() for label in below.get_yticklabels()}
    assert below.get_ylim()[0] == 0 and shown[0.0] == "$\\mathdefault{0}$"


MEASURED = ("tokens_per_second", "peak_memory", "attention_bytes", "gradient_bytes")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--nproc 3", "nproc=3: expected an even number"),
        ("--steps 0", "steps=0: expected at least 1"),
        ("--device gpu", "device='gpu'"),
        ("--mask window", "mask='window': expected causal, window:N, documents"),
        ("--mask window:0", "mask='window:0': expected"),
        ("--mask documnets", "mask='documnets': expected"),
        ("--text /nowhere/at/all", "No such file or directory; name a readable text file"),
        ("--out /proc/nowhere", "--out /proc/nowhere"),
        ("--stepz 3", "No such option"),
    ],
)
def test_bad_options(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("demo", *arguments.split()) == 2
    assert words in capsys.readouterr().err
