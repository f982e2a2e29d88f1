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
DEFINITION = re.compile(r"^API\b[^(]*?\b(\w+)\(", re.MULTILINE)
OF_CUDA = re.compile(r"^lib(?:cu|nv)\w*\.so")
"""File names of NVIDIA's libraries."""
NAME_OF_CUDA = re.compile(r"^_*(?:cu|nv|nccl)[A-Za-z]\w*$")
"""Names of NVIDIA's functions, for libraries whose symbols have no version."""


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
    source: str | None
    """C file with its implemented functions; None if there are none."""
    lazy: bool = False
    """The provider loads it at run time (dlopen), so its functions are not in the provider's ELF tables."""

    def code(self) -> str:
        """C source of the implemented functions."""
        return c_text(self.source) if self.source else ""

    def harmless(self) -> list[str]:
        """Functions that may do nothing."""
        return [name for names in HARMLESS.values() for name in names.split() if re.match(self.prefix, name)]

    def names(self) -> frozenset[str]:
        """Every function of the stub."""
        return frozenset((*DEFINITION.findall(self.code()), *self.harmless()))


LIBRARIES: tuple[Library, ...] = (
    Library("libcudart.so.13", "(__)?cuda", "cudart.c"),
    Library("libcublas.so.13", "cublas(?!Lt)", "cublas.c"),
    Library("libcublasLt.so.13", "cublasLt", "cublaslt.c"),
    Library("libcurand.so.10", "curand", None),
    Library("libcuda.so.1", "cu[A-Z]", None),
    Library("libcufft.so.12", "cufft", "cufft.c", lazy=True),
    Library("libcudnn.so.9", "cudnn", "cudnn.c", lazy=True),
)


def c_text(name: str) -> str:
    """Text of a file of `standins/`."""
    return (resources.files(__package__) / "standins" / name).read_text(encoding="utf-8")


def exports(provider: Path, build: str) -> dict[str, dict[str, str | None]]:
    """soname -> symbols that its stub must export for the CUDA provider: name -> version or None.

    `build`: the provider library in messages. Raises InstallationError if pyelftools is missing; ProviderError for a
    file without symbol tables, a provider of another CUDA version, and an unknown library or function.
    """
    sonames, symbols = _required(provider)
    known = {library.soname: library.names() for library in LIBRARIES}
    if unknown_libraries := [soname for soname in sonames if soname not in known]:
        raise ProviderError(
            f"{build} needs {', '.join(unknown_libraries)}, for which the dry run has no stub; it covers CUDA "
            f"{CUDA_MAJOR}: install an onnxruntime-gpu for CUDA {CUDA_MAJOR}, or a newer Partita"
        )
    result: dict[str, dict[str, str | None]] = {
        library.soname: dict.fromkeys(sorted(known[library.soname])) if library.lazy else {} for library in LIBRARIES
    }
    unknown = []
    for name, version, origin in symbols:
        soname = origin or next((each for each, names in known.items() if name in names), "")
        if name in known.get(soname, ()):
            result[soname][name] = version
        else:
            unknown.append(name)
    if unknown:
        raise ProviderError(
            f"{build} needs functions that the dry run does not support: {', '.join(sorted(unknown))}; "
            "use an ONNX Runtime that this Partita was tested with, or a newer Partita"
        )
    return result


def _required(library: Path) -> tuple[list[str], list[tuple[str, str | None, str | None]]]:
    """CUDA libraries that a shared library is linked with; name, version and library of its undefined CUDA symbols."""
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
    except ImportError as error:
        raise explain(error) or error from error
    try:
        with library.open("rb") as stream:
            file: Any = ELFFile(stream)
            names = (".dynamic", ".gnu.version_r", ".gnu.version", ".dynsym")
            dynamic, versions, numbers, symbols = map(file.get_section_by_name, names)
            if dynamic is None or versions is None or numbers is None or symbols is None:
                raise ProviderError(f"{library}: an ELF section is missing; the dry run cannot read its dependencies")
            needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED") if OF_CUDA.match(tag.needed)]
            by_index = {
                version["vna_other"]: (version.name, origin.name)
                for origin, listed in versions.iter_versions()
                for version in listed
            }
            found = []
            for index, symbol in enumerate(symbols.iter_symbols()):
                if symbol["st_shndx"] == "SHN_UNDEF" and symbol.name:
                    version, origin = by_index.get(numbers.get_symbol(index)["ndx"], (None, None))
                    if OF_CUDA.match(origin) if origin else NAME_OF_CUDA.match(symbol.name):
                        found.append((symbol.name, version, origin))
            return needed, found
    except ELFError as error:
        raise ProviderError(f"{library}: not a shared library ({error}); reinstall onnxruntime-gpu") from error
