"""Every planted case, by environment."""

from __future__ import annotations

from tests.planted import on_cuda, on_everything, on_no_provider, on_openvino, on_plugins, on_qnn, on_webgpu
from tests.planted.case import Case

MODULES = (on_cuda, on_webgpu, on_openvino, on_qnn, on_plugins, on_no_provider, on_everything)
CASES: tuple[Case, ...] = tuple(case for module in MODULES for case in module.CASES)
