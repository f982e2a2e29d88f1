"""CUDA functions of the stubs, and CUDA functions that the installed CUDA provider needs (from its ELF tables).

Functions are implemented (`API` in the C files of `standins/`) or may do nothing (`HARMLESS`); any other function is
an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from partita.errors import ProviderError
from partita.extras import explain

CUDA_MAJOR = 13
"""CUDA version of the struct layouts and signatures in the C files; they are stable within a major version."""
COMMON = "common.h"
DEFINITION = re.compile(r"^(?:API\b[^(]*?\b(?=\w+\()|HARMLESS\()(\w+)", re.MULTILINE)
OF_CUDA = re.compile(r"^lib(?:cu|nv)\w*\.so")
"""File names of NVIDIA's libraries."""
NAME_OF_CUDA = re.compile(r"^_*(?:cu|nv|nccl)[A-Za-z]\w*$")
"""Names of NVIDIA's functions."""


HARMLESS = {
    "kernels exist on the device only and are never launched": (
        "__cudaRegisterFatBinaryEnd __cudaRegisterFunction __cudaRegisterVar __cudaUnregisterFatBinary "
        "__cudaPushCallConfiguration __cudaLaunchKernel cudaLaunchKernel cudaLaunchKernelExC "
        "cudaLaunchCooperativeKernel cudaFuncSetAttribute cudaKernelSetAttributeForDevice cudaLibraryUnload"
    ),
    "work is done when it is queued, so there is nothing to wait for": (
        "cudaEventRecord cudaEventRecordWithFlags cudaEventSynchronize cudaStreamWaitEvent"
    ),
    "a pool retains no memory": "cudaMemPoolSetAttribute cudaMemPoolTrimTo",
    "handles own nothing": (
        "cudaEventDestroy cudaGraphDestroy cudaGraphExecDestroy cudaMemPoolDestroy cublasDestroy_v2 cublasLtDestroy "
        "cublasLtMatmulDescDestroy cublasLtMatrixLayoutDestroy cublasLtMatmulPreferenceDestroy "
        "cublasLtMatrixTransformDescDestroy cufftDestroy cudnnDestroy cudnnBackendDestroyDescriptor "
        "cudnnDestroyActivationDescriptor cudnnDestroyConvolutionDescriptor cudnnDestroyDropoutDescriptor "
        "cudnnDestroyFilterDescriptor cudnnDestroyLRNDescriptor cudnnDestroyPoolingDescriptor "
        "cudnnDestroyReduceTensorDescriptor cudnnDestroyRNNDataDescriptor cudnnDestroyRNNDescriptor "
        "cudnnDestroyTensorDescriptor"
    ),
    "it returns nothing, and changes only the device or a handle that is never read": (
        "cublasSetMathMode cublasSetStream_v2 cublasLtMatmulDescSetAttribute cublasLtMatrixLayoutSetAttribute "
        "cublasLtMatmulPreferenceSetAttribute cublasLtMatmulAlgoConfigSetAttribute cublasLtMatmulAlgoInit "
        "cuTensorMapEncodeTiled cufftSetStream cudnnBackendFinalize cudnnBackendSetAttribute "
        "cudnnDeriveBNTensorDescriptor cudnnSetActivationDescriptor cudnnSetConvolutionGroupCount "
        "cudnnSetConvolutionMathType cudnnSetConvolutionNdDescriptor cudnnSetDropoutDescriptor "
        "cudnnSetFilterNdDescriptor cudnnSetLRNDescriptor cudnnSetPoolingNdDescriptor cudnnSetReduceTensorDescriptor "
        "cudnnSetRNNDataDescriptor cudnnSetRNNDescriptor_v8 cudnnSetStream cudnnSetTensorNdDescriptor"
    ),
    "its result is device memory, which is never written": (
        "cudaGraphLaunch cublasDgeam cublasSgeam cublasDgemm_v2 cublasSgemm_v2 cublasDgemmBatched cublasSgemmBatched "
        "cublasDgemmStridedBatched cublasSgemmStridedBatched cublasGemmEx cublasGemmBatchedEx "
        "cublasGemmStridedBatchedEx cublasDgetrfBatched cublasSgetrfBatched cublasDgetriBatched cublasSgetriBatched "
        "cublasDcopy_v2 cublasScopy_v2 cublasSscal_v2 cublasLtMatmul cublasLtMatrixTransform cufftXtExec "
        "cudnnActivationForward cudnnAddTensor cudnnBackendExecute cudnnBatchNormalizationForwardInference "
        "cudnnBatchNormalizationForwardTraining cudnnConvolutionBiasActivationForward cudnnConvolutionForward "
        "cudnnLRNCrossChannelForward cudnnPoolingForward cudnnReduceTensor cudnnRNNForward cudnnSoftmaxForward"
    ),
}
"""Reason -> functions that may return 0 and do nothing, separated by blanks."""


@dataclass(frozen=True, slots=True)
class Library:
    """One CUDA library to replace by a stub."""

    soname: str
    prefix: str
    """Regular expression for the beginning of its functions' names."""
    source: str | None = None
    """C file with its implemented functions; None if there are none."""

    def code(self) -> str:
        """C source of the stub."""
        files = [name for name in (COMMON, self.source) if name is not None]
        parts = [line for name in files for line in (f'#line 1 "{name}"', c_text(name))]
        harmless = (name for names in HARMLESS.values() for name in names.split() if re.match(self.prefix, name))
        return "\n".join([*parts, *(f"HARMLESS({name})" for name in harmless), ""])

    def names(self) -> frozenset[str]:
        """Every function of the stub, and its marker."""
        return frozenset(DEFINITION.findall(self.code()))


LIBRARIES: tuple[Library, ...] = (
    Library("libcudart.so.13", "(__)?cuda", "cudart.c"),
    Library("libcublas.so.13", "cublas(?!Lt)", "cublas.c"),
    Library("libcublasLt.so.13", "cublasLt", "cublaslt.c"),
    Library("libcurand.so.10", "curand"),
    Library("libcuda.so.1", "cu[A-Z]"),
    Library("libcufft.so.12", "cufft", "cufft.c"),
    Library("libcudnn.so.9", "cudnn", "cudnn.c"),
)


def c_text(name: str) -> str:
    """Text of a file of `standins/`."""
    return (resources.files(__package__) / "standins" / name).read_text(encoding="utf-8")


def check_covered(provider: Path, build: str) -> None:
    """Raise an error if the CUDA provider needs more than the stubs have. `build`: the provider library in messages.

    Raises InstallationError if pyelftools is missing; ProviderError for a file that is missing or has no symbol tables,
    a provider of another CUDA version, and an unknown library or function.
    """
    libraries, functions = _required(provider)
    unknown = [name for name in libraries if name not in {library.soname for library in LIBRARIES}]
    if unknown:
        raise ProviderError(
            f"{build} needs {', '.join(unknown)}, for which the dry run has no stub; it covers CUDA {CUDA_MAJOR}: "
            f"install an onnxruntime-gpu for CUDA {CUDA_MAJOR}, or a newer Partita"
        )
    unknown = sorted(functions.difference(*(library.names() for library in LIBRARIES)))
    if unknown:
        raise ProviderError(
            f"{build} needs functions that the dry run does not support: {', '.join(unknown)}; "
            "use an ONNX Runtime that this Partita was tested with, or a newer Partita"
        )


def _required(library: Path) -> tuple[list[str], set[str]]:
    """CUDA libraries that a shared library is linked with, and CUDA functions that it does not define."""
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
    except ImportError as error:
        raise explain(error) or error from error
    try:
        with library.open("rb") as stream:
            file: Any = ELFFile(stream)
            dynamic, symbols = map(file.get_section_by_name, (".dynamic", ".dynsym"))
            if dynamic is None or symbols is None:
                raise ProviderError(f"{library}: an ELF section is missing; the dry run cannot read its dependencies")
            needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED") if OF_CUDA.match(tag.needed)]
            undefined = (symbol.name for symbol in symbols.iter_symbols() if symbol["st_shndx"] == "SHN_UNDEF")
            return needed, {name for name in undefined if NAME_OF_CUDA.match(name)}
    except OSError as error:
        raise ProviderError(
            f"{library}: the CUDA provider cannot be read ({error.strerror}); install partita[gpu]"
        ) from error
    except ELFError as error:
        raise ProviderError(f"{library}: not a shared library ({error}); reinstall onnxruntime-gpu") from error
