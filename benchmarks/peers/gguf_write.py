"""`python -m benchmarks.peers.gguf_write CHECKPOINT OUT [FORM]`: a GGUF file, in the environment of llama-cpp-python.

F16 and F32 are written by the gguf package; every other form is made of F32 by llama.cpp's own quantiser. llama.cpp's
converter is in no registry, so names and metadata are ours (`gguf_tensors`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.gguf_tensors import ARCHITECTURES, Safetensors, arranged, metadata, planned

FORMS = {"f32": 0, "f16": 1, "q4_0": 2, "q4_0-pure": 2, "q8_0": 7, "q4_k_m": 15, "bf16": 32}
"""What we call a form -> llama_ftype of llama.h. `pure` gives the head the form of the rest."""


def write(checkpoint: Path, out: Path, *, wide: bool) -> None:
    """Write `checkpoint` as F32 or F16, a tensor in memory at a time."""
    import gguf

    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text("utf-8"))
    source = Safetensors(checkpoint / "model.safetensors")
    plans = planned(list(source), config)
    narrow = np.float32 if wide else np.float16
    writer = gguf.GGUFWriter(out, ARCHITECTURES[config["model_type"]])
    for key, value in metadata(config, FORMS["f32" if wide else "f16"]).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for plan in plans:
        shape = list(source.entries[plan.parts[0]]["shape"])
        shape = [len(plan.parts), *shape] if "_exps" in plan.name else shape
        dtype = np.dtype(np.float32 if plan.wide else narrow)
        writer.add_tensor_info(plan.name, shape, dtype, int(np.prod(shape)) * dtype.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for plan in plans:
        writer.write_tensor_data(arranged(plan, source).astype(np.float32 if plan.wide else narrow))
    writer.close()


def quantise(wide: Path, out: Path, form: str, threads: int) -> None:
    """Let llama.cpp's quantiser make `form` of a file. Raises ValueError when it refuses."""
    import llama_cpp  # type: ignore[import-not-found]

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.pure = FORMS[form], threads, form.endswith("-pure")
    if llama_cpp.llama_model_quantize(str(wide).encode(), str(out).encode(), params):
        raise ValueError(f"{wide}: llama.cpp's quantiser does not make {form} of it")


def main() -> None:
    """Write one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("form", choices=sorted(FORMS))
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    if given.form in ("f32", "f16"):
        write(given.checkpoint, given.out, wide=given.form == "f32")
        return
    wide = given.out.with_name(f"{given.out.name}.f32")
    write(given.checkpoint, wide, wide=True)
    quantise(wide, given.out, given.form, given.threads)
    wide.unlink()


if __name__ == "__main__":
    main()
