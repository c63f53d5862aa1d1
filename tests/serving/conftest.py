"""Fixtures for tests that involve SGLang: tiny checkpoints, servers, start-ups."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.support.server import Server, ServerPool
from tests.support.start_ups import StartUps

FAULTS = Path(__file__).resolve().parents[1] / "support" / "planted_faults"
SLOW_SECONDS = 0.6
"""What a text with the word "slow" takes more to be tokenised where that is planted."""


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny checkpoint of a format, written once; not to be changed."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def checkpoint(format: str) -> Path:
        path = folder / format
        if not path.exists():
            write_tiny(path, format, seed=1)
        return path

    return checkpoint


@pytest.fixture(scope="session")
def checkpoint(tiny_checkpoints: Callable[[str], Path]) -> Path:
    """The tiny checkpoint in full NVFP4, for files that have none of their own."""
    return tiny_checkpoints("nvfp4-full")


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def server(serve: ServerPool, checkpoint: Path) -> Server:
    """One with default flags. Files ask for it anew, since a pool may have ended it for another."""
    return serve(checkpoint)


@pytest.fixture
def damaged(tiny_checkpoints: Callable[[str], Path], tmp_path: Path) -> Path:
    """A private copy of the tiny NVFP4 checkpoint."""
    path = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoints("nvfp4-full"), path)
    return path


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """``serve(model, *arguments)``: a ready server, shared by tests that ask for the same."""
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def planted_nan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that arms the planted NaN of servers that :func:`watched_arguments` start."""
    return tmp_path_factory.mktemp("planted") / "token"


@pytest.fixture(scope="session")
def watched_arguments(
    tiny_checkpoints: Callable[[str], Path], planted_nan: Path
) -> tuple[Path, tuple[str, ...], dict[str, str]]:
    """Checkpoint, flags and environment of a server with metrics, in which NaN can be planted, and slow texts."""
    environment = {
        "PYTHONPATH": str(FAULTS),
        "PLANTED_FAULT": "nan, slow",
        "PLANTED_NAN": str(planted_nan),
        "PLANTED_SECONDS": str(SLOW_SECONDS),
    }
    return tiny_checkpoints("nvfp4-full"), ("--enable-metrics",), environment


@pytest.fixture
def watched(serve: ServerPool, watched_arguments: tuple[Path, tuple[str, ...], dict[str, str]]) -> Server:
    """A server with metrics, shared by the files of one worker."""
    checkpoint, flags, environment = watched_arguments
    return serve(checkpoint, *flags, environment=environment)


@pytest.fixture(scope="session")
def start_up(tmp_path_factory: pytest.TempPathFactory) -> StartUps:
    """``start_up(model, *arguments)``: exit code and output of a start-up that fails in the launcher."""
    return StartUps(tmp_path_factory.mktemp("start-ups"))
