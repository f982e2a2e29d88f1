"""CUDA functions of the stubs, and CUDA functions that the installed CUDA provider needs (from its ELF tables).

Functions are implemented (`API` in the C files of `standins/`) or may do nothing (`LIBRARIES`, with a reason for each
group); any other function is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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


@dataclass(frozen=True, slots=True)
class Library:
    """One CUDA library to replace by a stub."""

    soname: str
    source: str | None
    """C file with its implemented functions; None if there are none."""
    harmless: str = ""
    """Functions that may return 0 and do nothing, separated by blanks."""
    lazy: bool = False
    """The provider loads it at run time (dlopen), so its functions are not in the provider's ELF tables."""

    @property
    def stem(self) -> str:
        """Name without the version, e.g. libcudart."""
        return self.soname.partition(".so")[0]

    def code(self) -> str:
        """C source of the implemented functions."""
        return c_text(self.source) if self.source else ""

    def names(self) -> frozenset[str]:
        """Every function of the stub."""
        return frozenset(DEFINITION.findall(self.code())) | frozenset(self.harmless.split())


@dataclass(frozen=True, slots=True)
class RequiredSymbols:
    """CUDA libraries and functions that one build of the CUDA provider needs."""

    sonames: tuple[str, ...]
    """CUDA libraries that it is linked with."""
    symbols: tuple[tuple[str, str | None, str | None], ...]
    """Name, version and library of each undefined symbol; version and library may be None."""


LIBRARIES: tuple[Library, ...] = (
    Library(
        "libcudart.so.13",
        "cudart.c",
        # Kernels exist on the device only and are never launched.
        "__cudaRegisterFatBinaryEnd __cudaRegisterFunction __cudaRegisterVar __cudaUnregisterFatBinary "
        "__cudaPushCallConfiguration __cudaLaunchKernel cudaLaunchKernel cudaLaunchKernelExC "
        "cudaLaunchCooperativeKernel cudaFuncSetAttribute cudaKernelSetAttributeForDevice cudaLibraryUnload "
        # Work is done when it is queued, so there is nothing to wait for.
        "cudaEventRecord cudaEventRecordWithFlags cudaEventSynchronize cudaStreamWaitEvent "
        # Handles own nothing.
        "cudaEventDestroy cudaGraphDestroy cudaGraphExecDestroy cudaMemPoolDestroy "
        # Its result is device memory, which is never written.
        "cudaGraphLaunch "
        # A pool retains no memory.
        "cudaMemPoolSetAttribute cudaMemPoolTrimTo ",
    ),
    Library(
        "libcublas.so.13",
        "cublas.c",
        # Handles own nothing.
        "cublasDestroy_v2 "
        # It returns nothing, and changes only the device or a handle that is never read.
        "cublasSetMathMode cublasSetStream_v2 "
        # Its result is device memory, which is never written.
        "cublasDgeam cublasSgeam cublasDgemm_v2 cublasSgemm_v2 cublasDgemmBatched cublasSgemmBatched "
        "cublasDgemmStridedBatched cublasSgemmStridedBatched cublasGemmEx cublasGemmBatchedEx "
        "cublasGemmStridedBatchedEx cublasDgetrfBatched cublasSgetrfBatched cublasDgetriBatched "
        "cublasSgetriBatched cublasDcopy_v2 cublasScopy_v2 cublasSscal_v2 ",
    ),
    Library(
        "libcublasLt.so.13",
        "cublaslt.c",
        # Handles own nothing.
        "cublasLtDestroy cublasLtMatmulDescDestroy cublasLtMatrixLayoutDestroy cublasLtMatmulPreferenceDestroy "
        "cublasLtMatrixTransformDescDestroy "
        # It returns nothing, and changes only the device or a handle that is never read.
        "cublasLtMatmulDescSetAttribute cublasLtMatrixLayoutSetAttribute cublasLtMatmulPreferenceSetAttribute "
        "cublasLtMatmulAlgoConfigSetAttribute cublasLtMatmulAlgoInit "
        # Its result is device memory, which is never written.
        "cublasLtMatmul cublasLtMatrixTransform ",
    ),
    Library("libcurand.so.10", None),
    Library(
        "libcuda.so.1",
        None,
        # It returns nothing, and changes only the device or a handle that is never read.
        "cuTensorMapEncodeTiled ",
    ),
    Library(
        "libcufft.so.12",
        "cufft.c",
        # Handles own nothing.
        "cufftDestroy "
        # It returns nothing, and changes only the device or a handle that is never read.
        "cufftSetStream "
        # Its result is device memory, which is never written.
        "cufftXtExec ",
        lazy=True,
    ),
    Library(
        "libcudnn.so.9",
        "cudnn.c",
        # Handles own nothing.
        "cudnnDestroy cudnnBackendDestroyDescriptor cudnnDestroyActivationDescriptor "
        "cudnnDestroyConvolutionDescriptor cudnnDestroyDropoutDescriptor cudnnDestroyFilterDescriptor "
        "cudnnDestroyLRNDescriptor cudnnDestroyPoolingDescriptor cudnnDestroyReduceTensorDescriptor "
        "cudnnDestroyRNNDataDescriptor cudnnDestroyRNNDescriptor cudnnDestroyTensorDescriptor "
        # It returns nothing, and changes only the device or a handle that is never read.
        "cudnnBackendFinalize cudnnBackendSetAttribute cudnnDeriveBNTensorDescriptor "
        "cudnnSetActivationDescriptor cudnnSetConvolutionGroupCount cudnnSetConvolutionMathType "
        "cudnnSetConvolutionNdDescriptor cudnnSetDropoutDescriptor cudnnSetFilterNdDescriptor "
        "cudnnSetLRNDescriptor cudnnSetPoolingNdDescriptor cudnnSetReduceTensorDescriptor "
        "cudnnSetRNNDataDescriptor cudnnSetRNNDescriptor_v8 cudnnSetStream cudnnSetTensorNdDescriptor "
        # Its result is device memory, which is never written.
        "cudnnActivationForward cudnnAddTensor cudnnBackendExecute cudnnBatchNormalizationForwardInference "
        "cudnnBatchNormalizationForwardTraining cudnnConvolutionBiasActivationForward cudnnConvolutionForward "
        "cudnnLRNCrossChannelForward cudnnPoolingForward cudnnReduceTensor cudnnRNNForward cudnnSoftmaxForward ",
        lazy=True,
    ),
)


def c_text(name: str) -> str:
    """Text of a file of `standins/`."""
    return (resources.files(__package__) / "standins" / name).read_text(encoding="utf-8")


def read_required(library: Path) -> RequiredSymbols:
    """CUDA libraries and functions that a shared library needs.

    Raises InstallationError if pyelftools is missing, ProviderError if the file is not a shared library with a symbol
    table.
    """
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
    except ImportError as error:
        raise explain(error) or error from error
    try:
        with library.open("rb") as stream:
            file = ELFFile(stream)
            needed = tuple(
                tag.needed
                for tag in section(file, library, ".dynamic").iter_tags("DT_NEEDED")
                if OF_CUDA.match(tag.needed)
            )
            return RequiredSymbols(needed, tuple(_undefined_symbols(file, library)))
    except ELFError as error:
        raise ProviderError(f"{library}: not a shared library ({error}); reinstall onnxruntime-gpu") from error


def _undefined_symbols(file: Any, library: Path) -> Iterator[tuple[str, str | None, str | None]]:
    """Name, version and library of every undefined CUDA symbol."""
    by_index = {
        version["vna_other"]: (version.name, origin.name)
        for origin, versions in section(file, library, ".gnu.version_r").iter_versions()
        for version in versions
    }
    numbers = section(file, library, ".gnu.version")
    for index, symbol in enumerate(section(file, library, ".dynsym").iter_symbols()):
        if symbol["st_shndx"] != "SHN_UNDEF" or not symbol.name:
            continue
        version, origin = by_index.get(numbers.get_symbol(index)["ndx"], (None, None))
        if OF_CUDA.match(origin) if origin else NAME_OF_CUDA.match(symbol.name):
            yield symbol.name, version, origin


def section(file: Any, library: Path, name: str) -> Any:
    """One section of an ELF file. Raises ProviderError if it is missing."""
    found = file.get_section_by_name(name)
    if found is None:
        raise ProviderError(f"{library}: no ELF section {name}; the dry run cannot read its dependencies")
    return found


def exports(wanted: RequiredSymbols, build: str) -> dict[str, dict[str, str | None]]:
    """soname -> symbols that its stub must export: name -> version or None.

    `build`: the provider library in messages. Raises ProviderError for a provider of another CUDA version, and for an
    unknown library or function.
    """
    by_soname = {library.soname: library for library in LIBRARIES}
    unknown_libraries = [soname for soname in wanted.sonames if soname not in by_soname]
    if unknown_libraries:
        raise ProviderError(
            f"{build} needs {', '.join(unknown_libraries)}, for which the dry run has no stub; it covers CUDA "
            f"{CUDA_MAJOR}: install an onnxruntime-gpu for CUDA {CUDA_MAJOR}, or a newer Partita"
        )
    result: dict[str, dict[str, str | None]] = {
        library.soname: dict.fromkeys(sorted(library.names())) if library.lazy else {} for library in LIBRARIES
    }
    unknown = []
    for name, version, origin in wanted.symbols:
        soname = origin or next((library.soname for library in LIBRARIES if name in library.names()), None)
        library = by_soname.get(soname or "")
        if library is None or name not in library.names():
            unknown.append(name)
        else:
            result[library.soname][name] = version
    if unknown:
        raise ProviderError(
            f"{build} needs functions that the dry run does not support: {', '.join(sorted(unknown))}; "
            "use an ONNX Runtime that this Partita was tested with, or a newer Partita"
        )
    return result
