"""The command line: one loss curve for every strategy, exact resumption, errors without tracebacks."""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from seqpar.cli import main
from seqpar.cli.launch import CommandError
from seqpar.cli.trainer.checkpoint import load_checkpoint, save_checkpoint
from seqpar.cli.trainer.config import TrainConfig
from seqpar.cli.trainer.data import MaskChoice, make_batch, read_corpus
from seqpar.cli.trainer.memory import least_memory
from seqpar.cli.trainer.model import IGNORE_INDEX
from seqpar.cli.trainer.worker import launch_training, run_training

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
SMALL = TrainConfig(seq_len=61, batch=2, layers=2, hidden=32, heads=4, kv_heads=2, steps=4, plot=False, deadline=90)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def losses(out: Path) -> list[float]:
    with (out / "losses.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def train_here(config: TrainConfig, out: Path, **changes: Any) -> list[float]:
    run_training(replace(config, out=str(out), **changes))
    return losses(out)


def train_on(ranks: int, config: TrainConfig, out: Path, **changes: Any) -> list[float]:
    config = replace(config, out=str(out), **changes)
    launch_training(config, ranks)
    return losses(out)


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of ``seqpar <arguments>``."""
    monkeypatch.setattr(sys, "argv", ["seqpar", *arguments])
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


RICH = replace(SMALL, mask="window:30+documents:20", dropout=0.2, tied=False)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of ``RICH`` without interruption on one process."""
    return train_here(RICH, tmp_path_factory.mktemp("one"))


def test_two_processes_follow_one(tmp_path: Path, one_process: list[float]) -> None:
    assert train_on(2, RICH, tmp_path, strategy="ring", layout="zigzag") == pytest.approx(one_process, rel=1e-5)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ranks"] == 2 and len(summary["peak_memory_per_rank"]) == 2
    assert summary["attention_bytes_per_token"] > 0 and summary["gradient_bytes_per_step"] > 0
    assert summary["parameters"] == 2 * 256 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 96 + 2 * 32) + 32


def test_resuming_is_exact_and_changes_ranks(tmp_path: Path, one_process: list[float]) -> None:
    first = train_here(RICH, tmp_path, steps=2)
    assert first == one_process[:2]
    # tp_sp shards weights and moments: the checkpoint holds them in full.
    assert train_on(2, RICH, tmp_path, steps=3, resume=True, strategy="tp_sp") == pytest.approx(
        one_process[:3], rel=1e-5
    )
    assert train_here(RICH, tmp_path, steps=4, resume=True, strategy="local") == pytest.approx(one_process, rel=1e-5)
    again = tmp_path / "again"
    train_here(RICH, again, steps=2, save_every=2)
    assert train_here(RICH, again, resume=True) == one_process


def test_an_interrupted_run_goes_on_from_its_last_checkpoint(
    tmp_path: Path, one_process: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    from seqpar.cli.trainer import training

    def fail_at_3(*arguments: Any) -> Any:
        if arguments[-1] == 3:
            raise KeyboardInterrupt
        return make_batch(*arguments)

    monkeypatch.setattr(training, "make_batch", fail_at_3)
    with pytest.raises(KeyboardInterrupt):
        train_here(RICH, tmp_path, save_every=2)
    monkeypatch.undo()
    assert len(load_checkpoint(tmp_path / "checkpoint.pt")["losses"]) == 2
    assert train_here(RICH, tmp_path, resume=True) == one_process


def test_resuming_another_run_is_refused(tmp_path: Path) -> None:
    train_here(SMALL, tmp_path, steps=1)
    for changes, words in (
        ({"seq_len": 62}, "seq_len=61, this run has 62"),
        ({"text": __file__}, "text="),
        ({"steps": 1}, "1 steps are done already; choose a larger --steps"),
    ):
        with pytest.raises(CommandError, match=words):
            train_here(SMALL, tmp_path, resume=True, **changes)
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(CommandError, match="cannot be read"):
        train_here(SMALL, tmp_path, resume=True)
    with pytest.raises(CommandError, match="does not exist"):
        train_here(SMALL, tmp_path / "nowhere", resume=True)


def test_half_and_double_precision(tmp_path: Path) -> None:
    single = train_here(SMALL, tmp_path / "single")
    assert train_here(SMALL, tmp_path / "double", dtype="float64") == pytest.approx(single, rel=1e-5)
    assert train_here(SMALL, tmp_path / "half", dtype="bfloat16") == pytest.approx(single, rel=2e-2)


def test_the_loss_falls_and_is_drawn(tmp_path: Path) -> None:
    curve = train_here(SMALL, tmp_path, steps=30, lr=1e-2, mask="causal", plot=True, deterministic=True)
    torch.use_deterministic_algorithms(False)
    assert curve[-1] < curve[0] - 1
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += ["--nproc-per-node=2", "-m", "seqpar", "train", "--strategy=context_parallel", "--comm=all_gather"]
    command += ["--seq-len=61", "--batch=2", "--layers=2", "--hidden=32", "--heads=4", "--kv-heads=2", "--steps=2"]
    command += ["--no-plot", f"--text={__file__}", f"--out={tmp_path}"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(train_here(SMALL, tmp_path, steps=2, text=__file__), rel=1e-5)


def train_on_two_hosts(folder: Path, *options: str, only_on_1: tuple[str, ...] = ()) -> list[tuple[int, str]]:
    """Exit code and stderr of one torchrun on each of two "hosts": one rank each, and a folder of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    hosts: list[subprocess.Popen[str]] = []
    for host in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}"]
        command += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", "-m", "seqpar", "train"]
        command += ["--seq-len=61", "--batch=2", "--layers=2", "--hidden=32", "--heads=4", "--kv-heads=2", "--no-plot"]
        command += [*options, *(only_on_1 if host else ())]
        (folder / str(host)).mkdir(exist_ok=True)
        where: dict[str, Any] = {"env": environment, "cwd": folder / str(host)}
        hosts.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **where))
    try:
        ended = [host.communicate(timeout=90) for host in hosts]
    finally:
        for process in hosts:
            process.kill()
    return [(host.returncode, stderr) for host, (_, stderr) in zip(hosts, ended, strict=True)]


def test_two_hosts_resume_without_a_shared_disk(tmp_path: Path) -> None:
    """The second host has neither the checkpoint nor the text."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "text").write_bytes(Path(__file__).read_bytes())
    expected = train_here(SMALL, tmp_path, text=__file__)
    train_here(SMALL, tmp_path / "0" / "out", steps=2, text=__file__)
    ended = train_on_two_hosts(tmp_path, "--steps=4", "--out=out", "--text=text", "--resume")
    assert [code for code, _ in ended] == [0, 0], ended
    assert losses(tmp_path / "0" / "out") == pytest.approx(expected, rel=1e-5)
    assert not (tmp_path / "1" / "out").exists()


@pytest.mark.parametrize(
    ("options", "only_on_1", "words"),
    [
        (("--resume",), (), "out/checkpoint.pt does not exist"),  # on rank 0, and rank 1 must not wait for it
        ((), ("--device=cuda",), "device='cuda': 0 GPUs on"),  # on rank 1, and rank 0 must not wait for it
    ],
)
def test_two_hosts_fail_together(tmp_path: Path, options: Any, only_on_1: Any, words: str) -> None:
    ended = train_on_two_hosts(tmp_path, "--steps=1", "--out=out", *options, only_on_1=only_on_1)
    for rank, (code, stderr) in enumerate(ended):
        assert code == 1 and f"error (rank {rank}): " in stderr and words in stderr  # 1: torchrun's own code


def test_gpus_are_counted_on_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    replace(SMALL, device="cuda").check(ranks=16, local_ranks=8)
    with pytest.raises(ValueError, match=r"device='cuda': 8 GPUs on .* for its 16 ranks"):
        replace(SMALL, device="cuda").check(ranks=16, local_ranks=16)


def test_a_step_needs_at_least_what_is_asked_for(tmp_path: Path) -> None:
    config = replace(SMALL, seq_len=1024, steps=1, hidden=128)
    train_on(1, config, tmp_path)  # in a new process, which has no freed memory to use again
    (peak,) = json.loads((tmp_path / "summary.json").read_text())["peak_memory_per_rank"]
    assert peak / 4 < sum(least_memory(config, 1)) < peak


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--strategy rign", "did you mean 'ring'? Choose one of local, ring, ulysses"),
        ("--layout zigzog", "did you mean 'zigzag'"),
        ("--mask prefix:3", "'prefix:3' is not a mask of a language model; choose causal, window:N"),
        ("--mask window", "'window' needs a number of tokens"),
        ("--comm p2p", "comm: not an option of strategy 'ring'"),
        ("--kv-heads 3", "num_kv_heads=3: it must divide num_heads=8"),
        ("--heads 3", "heads=3: hidden=256 must be a multiple of 2 * heads"),
        ("--text /nowhere/at/all", "No such file or directory; name a readable text file"),
        ("--strategy local --nproc 2", "strategy='local' with 2 ranks"),
        ("--nproc 0", "nproc=0: expected at least 1"),
        ("--device cuda --nproc 99", "use --device cpu"),
        ("--steps 0", "steps=0: expected at least 1"),
        ("--lr -1", "lr=-1.0: expected a positive number"),
        ("--dtype int8", "did you mean"),
        ("--steps many", "--steps"),
        ("--stepz 3", "No such option"),
        ("--resume --steps 1 --out /nowhere", "/nowhere/checkpoint.pt does not exist"),
        ("--steps 1 --out /proc/nowhere", "--out /proc/nowhere"),
        ("--seq-len 999999999", "seq_len=999999999, batch=1: on 1 rank(s) a step needs at least"),
    ],
)
def test_bad_options(
    arguments: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "train", *arguments.split()) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


def test_a_loss_that_runs_away(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    small = "--seq-len 32 --hidden 16 --heads 2 --kv-heads 1 --layers 1 --no-plot --lr 1e30"
    assert run_command(monkeypatch, "train", *small.split(), f"--out={tmp_path}") == 1
    assert "choose a lower --lr" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs here")
def test_a_backend_that_cannot_run_here(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"^backend='triton' cannot run here: .*use backend='auto'$") as error:
        train_here(SMALL, tmp_path, backend="triton")
    assert error.value.code == 2


def test_ranks_find_a_bad_option_together() -> None:
    message = r"^ulysses_size=3: expected a divisor of the group's 2 ranks; choose one of 1, 2$"
    with pytest.raises(CommandError, match=message):
        train_on(2, SMALL, Path("unused"), strategy="hybrid", ulysses_size=3)


_WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))  # to import one of them raises ModuleNotFoundError
import seqpar
from seqpar.cli import main
main()
"""


@pytest.mark.parametrize("missing", [("typer",), ("matplotlib", "rich", "typer")])
def test_packages_of_the_extra_are_missing(missing: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT.format(missing=missing)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    needs = ", ".join(missing)
    assert done.returncode == 1
    assert done.stderr == f"error: the seqpar command needs {needs}; install with: pip install 'seqpar[cli]'\n"


def test_batches_are_a_function_of_seed_and_step() -> None:
    corpus = read_corpus(None)
    choice = MaskChoice.parse("causal")
    batch = make_batch(corpus, choice, 2, 100, seed=1, step=5)
    again = make_batch(corpus, choice, 2, 100, seed=1, step=5)
    assert torch.equal(batch.tokens, again.tokens) and torch.equal(batch.labels, again.labels)
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert batch.count == 200
    for other in (make_batch(corpus, choice, 2, 100, 1, 6), make_batch(corpus, choice, 2, 100, 2, 5)):
        assert not torch.equal(batch.tokens, other.tokens)


def test_documents(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"one\n\nthree\n\n\nfive")
    corpus = read_corpus(str(text))
    assert corpus.starts.nonzero().flatten().tolist() == [0, 5, 12]
    batch = make_batch(corpus, MaskChoice.parse("documents"), 1, 40, seed=0, step=0)  # longer than the text: a circle
    seen = batch.mask.dense(40)
    for i in range(40):
        first = int(seen[i].nonzero()[0]) if seen.dim() == 2 else int(seen[0, i].nonzero()[0])
        words = bytes(batch.tokens[0, first : i + 1].tolist())
        assert b"\n\n" not in words[:-3]
        # A document's last token has no label: the next token is another document's.
        assert (batch.labels[0, i] == IGNORE_INDEX) == (
            words.endswith((b"e\n\n", b"\n\n\n", b"five")) and words != b"\n\n\n"
        )


def test_a_corpus_is_read_back_with_its_documents(tmp_path: Path) -> None:
    corpus = read_corpus(None)
    corpus.save(tmp_path / "text")
    again = read_corpus(str(tmp_path / "text"))
    assert torch.equal(corpus.data, again.data) and torch.equal(corpus.starts, again.starts)
    assert corpus.digest == again.digest and int(corpus.starts.sum()) > 10


def test_masks() -> None:
    i = torch.arange(10)
    lo, hi = MaskChoice.parse("window:3 + chunked:4").fixed.intervals(i)
    assert hi.tolist() == (i + 1).tolist()
    assert lo.tolist() == [0, 0, 0, 1, 4, 4, 4, 5, 8, 8]
    assert MaskChoice.parse("documents:50").mean_document == 50


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"step": 1})

    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="the disk is full"):
        save_checkpoint(path, {"step": 2})
    assert load_checkpoint(path)["step"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from seqpar.cli import demo

    some = {"ring, zigzag": demo._STRATEGIES["ring, zigzag"]}
    monkeypatch.setattr(demo, "_STRATEGIES", some)
    arguments = ["demo", "--nproc=2", "--steps=2", "--seq-len=65", f"--text={__file__}", f"--out={tmp_path}"]
    assert run_command(monkeypatch, *arguments) == 0
    with (tmp_path / "demo.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["run"] == "one process" and [row["run"] for row in rows[1:]] == list(some)
    assert all(float(row["largest_difference"]) < 1e-4 for row in rows)
    assert all(float(row["attention_bytes_per_token"]) > 0 for row in rows[1:])
    assert "ring, zigzag" in capfd.readouterr().out
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("seqpar.cli.doctor._LONG_ENOUGH_S", 0.01)
    assert run_command(monkeypatch, "doctor", "--no-check") == 0
    said = capsys.readouterr().out
    for words in ("torch", "gloo yes", "reference", "GFLOP/s", "all-gather"):
        assert words in said


def test_doctor_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The brackets of an extra are printed, not taken for a style."""
    monkeypatch.setattr("seqpar.kernels.flash._no_cuda", lambda: None)
    monkeypatch.setenv("COLUMNS", "400")
    assert run_command(monkeypatch, "doctor", "--no-measure", "--no-check") == 0
    assert "(pip install --pre seqpar[flash4])" in capsys.readouterr().out
