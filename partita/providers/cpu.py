"""The CPU execution provider, part of every ONNX Runtime build."""

from partita.providers.base import Option, Provider

PROVIDER = Provider(
    name="cpu",
    ort_name="CPUExecutionProvider",
    aliases=(),
    wheels=("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-webgpu"),
    device_memory="Cpu",
    preferred_attention="gqa",
    rank=1,
    options=(Option("use_arena", "bool", "1", "keep freed memory in an arena for the next run"),),
    remedies={"not_in_build": "every ONNX Runtime build has the CPU provider: reinstall onnxruntime"},
)
