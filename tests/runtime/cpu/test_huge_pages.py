"""Huge pages for memory that a session allocates."""

from __future__ import annotations

import mmap
import sys
from contextlib import closing

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from partita.providers.resolve import parse_chain, resolve
from partita.runtime.chain.open_chain import open_session
from partita.runtime.cpu import huge_pages
from partita.runtime.cpu.huge_pages import HUGE, added_ranges, anonymous_memory, full_blocks, make_huge
from partita.runtime.cpu.settings import memory_before, will_repeat
from partita.runtime.ort.buffers import host_buffer

linux = pytest.mark.skipif(not huge_pages.are_available(), reason="this system makes no huge pages for who asks")


@pytest.mark.parametrize(
    ("before", "now", "new"),
    [
        ([], [(0, 4)], [(0, 4)]),
        ([(0, 4)], [(0, 4)], []),
        ([(2, 4)], [(0, 8)], [(0, 2), (4, 8)]),  # grown on both sides
        ([(0, 2), (6, 8)], [(0, 8)], [(2, 6)]),  # two have become one
        ([(0, 4)], [(2, 3)], []),  # some was given back
        ([(0, 4)], [(3, 6), (8, 9)], [(4, 6), (8, 9)]),
    ],
)
def test_added_ranges_excludes_existing_memory(before, now, new):
    assert added_ranges(before, now) == new


@linux
def test_make_huge_preserves_content_and_untouched_memory():
    count = (24 << 20) // 4
    before = anonymous_memory()
    with mmap.mmap(-1, 40 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        values = np.frombuffer(memory, np.uint32)
        values[:count] = 7  # what is beyond stays untouched; an array to copy from would be new memory beside it
        resident = sum(len(full_blocks(new)) for new in added_ranges(before, anonymous_memory()))
        assert resident >= 11  # a neighbour that the system joins with it is counted, too
        made = make_huge(added_ranges(before, anonymous_memory()))
        assert made in range((resident + 3) * HUGE + 1)  # a kernel before 6.1 refuses
        assert bool((values[:count] == 7).all())
        left = sum(len(full_blocks(new)) for new in added_ranges(before, anonymous_memory()))
        assert left <= resident + 3, (
            "of the 8 blocks that nobody has touched hardly any: others of this process grow, too"
        )
        del values


@pytest.mark.parametrize(
    ("setting", "size", "allowed"),
    [
        ("always [madvise] never", 4096, True),
        ("[always] madvise never", 4096, True),
        ("always madvise [never]", 4096, False),
        ("always [madvise] never", 65536, False),
    ],
)
def test_huge_pages_follow_system_setting_and_page_size(tmp_path, monkeypatch, setting, size, allowed):
    path = tmp_path / "enabled"
    path.write_text(setting)
    monkeypatch.setattr(huge_pages, "SETTING", path)
    monkeypatch.setattr(huge_pages, "_page_size", lambda: size)
    assert huge_pages.are_available() is (allowed and sys.platform == "linux")
    path.unlink()
    assert not huge_pages.are_available()


@linux
def test_huge_pages_are_off_for_other_providers_and_by_option():
    cuda = resolve(parse_chain("cuda,cpu"), ["CUDAExecutionProvider", "CPUExecutionProvider"])
    off = resolve(parse_chain("cpu"), ["CPUExecutionProvider"], {"cpu": {"huge_pages": "0"}})
    assert memory_before(cuda) is None and memory_before(off) is None
    assert memory_before(resolve(parse_chain("cpu"), ["CPUExecutionProvider"]))


@linux
def test_session_output_is_identical_with_huge_pages(tmp_path):
    weights = np.random.default_rng(0).standard_normal((2048, 3072), np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    ports = [helper.make_tensor_value_info(name, 1, [1, size]) for name, size in (("x", 2048), ("y", 3072))]
    graph = helper.make_graph([node], "g", ports[:1], ports[1:], [numpy_helper.from_array(weights, "w")])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    results = {}
    for wanted in ("0", "1"):
        chain = resolve(parse_chain("cpu"), ["CPUExecutionProvider"], {"cpu": {"huge_pages": wanted}})
        with closing(open_session(path, chain, threads=1, observe=False)) as session:
            binding, out = session.binding(), host_buffer((1, 3072), "float32")
            given = host_buffer((1, 2048), "float32")
            given.host[:] = 1
            binding.bind_input("x", given)
            binding.bind_output("y", out)
            assert session.cpu is not None and session.cpu.huge_page_bytes is None  # a prompt does not wait for it
            will_repeat(session)
            binding.run()
            results[wanted] = (out.host.copy(), session.cpu.huge_page_bytes)
            binding.release()
            assert will_repeat(session) == 0  # once
    np.testing.assert_array_equal(results["0"][0], results["1"][0])
    assert results["0"][1] is None
    assert results["1"][1] in (0, *range(16 << 20, 1 << 30, HUGE))  # 0 from a kernel that refuses
