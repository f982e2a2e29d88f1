"""Planted causes of a provider that does not start at all: every node then has the provider's reason."""

from __future__ import annotations

from typing import Any

from tests.planted.case import Case, Run
from tests.planted.graphs import between

PLAIN = between("[planted] p = Sigmoid(h)")
NO_ADAPTER = {"VK_ICD_FILENAMES": "/nonexistent/icd.json", "VK_DRIVER_FILES": "/nonexistent/icd.json"}


def absent(name: str, environment: str, provider: str, planted: str, expected: str, **more: Any) -> Case:
    """A case whose graph every provider takes."""
    run = more.pop("run", Run(PLAIN))
    return Case(f"{environment}-{name}", environment, provider, planted, expected, run, **more)


CASES: tuple[Case, ...] = (
    absent(
        "cuda-libraries",
        "main",
        "cuda",
        "the GPU wheel on a machine without CUDA's libraries",
        "library_missing",
        control=Run(PLAIN, dry_run=True),
    ),
    absent(
        "tensorrt-libraries",
        "main",
        "tensorrt",
        "the GPU wheel on a machine without TensorRT",
        "library_missing",
    ),
    absent("no-webgpu", "main", "webgpu", "the GPU wheel has no WebGPU", "not_in_build"),
    absent("no-openvino", "main", "openvino", "the GPU wheel has no OpenVINO", "not_in_build"),
    absent("no-cuda", "openvino", "cuda", "the wheel of OpenVINO has no CUDA", "not_in_build"),
    absent(
        "two-wheels",
        "openvino",
        "cuda",
        "the wheel of OpenVINO was installed over the GPU wheel",
        "duplicate_runtime",
        two_wheels="onnxruntime-gpu 1.24.1",
    ),
    absent(
        "no-adapter",
        "webgpu",
        "webgpu",
        "no Vulkan driver, and so no WebGPU adapter",
        "device_missing",
        run=Run(PLAIN, variables=NO_ADAPTER),
        control=Run(PLAIN),
    ),
    absent(
        "no-gpu",
        "openvino",
        "openvino",
        "OpenVINO's device GPU, which is not there",
        "device_missing",
        run=Run(PLAIN, {"device_type": "GPU"}),
        control=Run(PLAIN, {"device_type": "CPU"}),
    ),
    absent(
        "device-number-alone",
        "webgpu",
        "webgpu",
        "a device by its number without the instance that it belongs to, which no message calls an option",
        "option_rejected",
        run=Run(PLAIN, {"deviceId": "77"}),
        control=Run(PLAIN),
    ),
    absent(
        "threads-below-zero",
        "openvino",
        "openvino",
        "a number of threads below zero, of which OpenVINO says that it is no number",
        "option_rejected",
        run=Run(PLAIN, {"num_of_threads": "-3"}),
        control=Run(PLAIN, {"num_of_threads": "2"}),
    ),
    absent(
        "webgpu-without-device",
        "plugins",
        "webgpu",
        "the WebGPU plugin on a machine without a GPU",
        "device_missing",
    ),
    absent(
        "bad-json",
        "openvino",
        "openvino",
        "an option that is not the JSON it should be",
        "option_rejected",
        run=Run(PLAIN, {"load_config": "{broken"}),
        control=Run(PLAIN, {"load_config": '{"CPU": {"NUM_STREAMS": "1"}}'}),
    ),
    absent(
        "bad-shape",
        "openvino",
        "openvino",
        "an option with a shape that ends too soon",
        "option_rejected",
        run=Run(PLAIN, {"reshape_input": "x[4,"}),
        control=Run(PLAIN, {"reshape_input": "x[4,16]"}),
    ),
    absent(
        "bfloat16-on-an-older-chip",
        "qnn",
        "qnn",
        "an option that this chip does not have",
        "option_rejected",
        run=Run(PLAIN, {"htp_bf16_enable": "1", "soc_model": "43"}),
        control=Run(PLAIN, {"htp_bf16_enable": "0", "soc_model": "43"}),
    ),
    absent(
        "bfloat16-without-chip",
        "qnn",
        "qnn",
        "an option that needs another one",
        "option_rejected",
        run=Run(PLAIN, {"htp_bf16_enable": "1", "soc_model": "0"}),
        control=Run(PLAIN, {"htp_bf16_enable": "0", "soc_model": "0"}),
    ),
    absent(
        "bad-json-plugin",
        "plugins",
        "openvino",
        "an option of a plugin that is not the JSON it should be",
        "option_rejected",
        run=Run(PLAIN, {"load_config": "{broken"}),
        control=Run(PLAIN, {"load_config": '{"CPU": {"NUM_STREAMS": "1"}}'}),
    ),
    absent(
        "backend-missing",
        "qnn",
        "qnn",
        "a backend library that is not where the option says: QNN is registered, and takes nothing",
        "library_missing",
        run=Run(PLAIN, {"backend_path": "/nonexistent/libQnnHtp.so"}),
        control=Run(PLAIN),
    ),
    absent(
        "newer-plugin",
        "qnn",
        "qnn",
        "a plugin built for a newer ONNX Runtime: it asks for an interface that this one does not have",
        "version_mismatch",
        run=Run(PLAIN, library="WANTED=99"),
        control=Run(PLAIN),
    ),
    absent(
        "plugin-with-an-error",
        "qnn",
        "qnn",
        "a plugin of the right version whose start fails with words of its own",
        "initialisation_failed",
        run=Run(PLAIN, library="WANTED=23"),
        control=Run(PLAIN),
    ),
)
