"""Memory of an export: freed trace objects, block sizes of quality, process limits and allocation errors."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np
import pytest
import torch

from partita.errors import ResourceError
from partita.export.checkpoint.description import open_checkpoint
from partita.export.trace.attention import lowering
from partita.export.trace.fake_model import build_fake_model, translate_errors
from partita.export.trace.ports import TraceSpec
from partita.export.trace.tracing import trace
from partita.export.verify import quality
from tests.conftest import TinyCheckpoint


def traced_nodes() -> int:
    """Nodes of torch's graphs that are in memory."""
    gc.collect()
    return sum(issubclass(type(each), torch.fx.Node) for each in gc.get_objects())


def test_trace_frees_torch_graph_nodes(tiny_checkpoint: TinyCheckpoint) -> None:
    fake = build_fake_model(open_checkpoint(str(tiny_checkpoint("llama"))).config, "float32", 1, 64)
    before = traced_nodes()
    graph = trace(fake, lowering("gqa"), TraceSpec(1, 64, None, 21, "contrib")).model.graph
    assert len(graph) > 10
    assert traced_nodes() <= before


def test_quality_is_independent_of_comparison_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    vocabulary, positions = 50, 7
    theirs = torch.randn(2, positions, vocabulary, generator=random) * 3
    ours = theirs + torch.randn(2, positions, vocabulary, generator=random)
    theirs[0, 2, 5] = ours[0, 2, 5] = -torch.inf  # a token that both rule out says nothing
    windows = torch.randint(0, vocabulary, (2, positions + 1), generator=random).numpy()
    monkeypatch.setattr(quality, "BLOCK_ELEMENTS", 3 * vocabulary)
    found = quality.Measured(windows, vocabulary)
    for window, position in ((row, place) for place in range(positions) for row in range(2)):
        found.note(window, position, ours[window, position].numpy().copy(), theirs[window, position])
    found.flush()
    mine, other = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    token = torch.from_numpy(windows[:, 1:, None])
    np.testing.assert_allclose(found.losses, -mine.gather(-1, token)[..., 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.original, -other.gather(-1, token)[..., 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.best, other.argmax(-1))
    np.testing.assert_array_equal(found.agrees, mine.argmax(-1) == other.argmax(-1))
    expected = torch.nan_to_num(other.exp() * (other - mine)).sum(-1)
    np.testing.assert_allclose(found.divergence, expected, rtol=1e-4, atol=1e-6)


LIMITED = """
import resource, sys
from partita.process import free_bytes
unlimited = free_bytes()
import psutil
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (64 << 20), resource.RLIM_INFINITY))
assert 0 < free_bytes() <= 64 << 20 < unlimited, (free_bytes(), unlimited)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_free_memory_respects_the_process_limit() -> None:
    """RLIMIT_AS (`ulimit -v`), as clusters set it."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried", "out of memory"),
        ("can't start new thread", "no thread can be started; raise the limit"),
    ],
)
def test_memory_and_thread_limits_raise_resource_error(said: str, words: str) -> None:
    with (
        pytest.raises(ResourceError, match=f"running the model failed: {words}"),
        translate_errors("running the model"),
    ):
        raise RuntimeError(said)
