"""Compile CUDA sources by NVRTC at run time, cache the result on disk, load and launch it.

Neither nvcc nor a CUDA toolkit is needed. Only this module imports cuda-core, and only when a program is compiled.
"""

import contextlib
import ctypes
import hashlib
import importlib
import importlib.util
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from packedkv.atomic import cache_dir, whole_file
from packedkv.errors import UnsupportedError
from packedkv.kernels.spec import CSRC
from packedkv.progress import Progress

INSTALL = "pip install packedkv[cuda]"
MAGIC = b"kvcubin1"
LEAST = (8, 0)
"""Oldest compute capability: mma.m16n8k16 and cp.async."""

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)
_INVALID_CONTEXT = 201


class Program(NamedTuple):
    """A translation unit and how it is compiled.

    ``source`` includes files of ``folders``, which are searched in order. ``fma``: whether the compiler may contract a
    multiply and an add; False for encoders, which must match the reference bit for bit.
    """

    source: str
    fma: bool = True
    folders: tuple[str, ...] = (str(CSRC),)

    @classmethod
    def of(cls, lines: Sequence[str], folders: Iterable[str], *, fma: bool = True) -> "Program":
        """Return a program of these lines that includes files of ``CSRC`` and of ``folders``."""
        return cls("\n".join([*lines, ""]), fma, tuple(dict.fromkeys((str(CSRC), *folders))))


def _core() -> Any:
    """Import cuda-core, version 0.5 or later; raises UnsupportedError if it is not installed."""
    with contextlib.suppress(ImportError):
        if hasattr(module := importlib.import_module("cuda.core"), "ProgramOptions"):
            return module
    raise UnsupportedError(f"the CUDA kernels need cuda-core, which is not installed or does not load; {INSTALL}.")


def refusal(device: torch.device) -> str:
    """Return why the CUDA kernels cannot run on ``device``, or ``""`` if they can; compiles nothing."""
    if device.type != "cuda":
        return f"device {device} is not a CUDA GPU"
    if torch.version.hip is not None:
        return "the CUDA kernels do not run on an AMD GPU, which the PyTorch reference serves"
    if not _installed("cuda.bindings"):
        return f"cuda-bindings is not installed; {INSTALL}"
    if not _installed("cuda.core") and not any(cache_folder().glob("*.cubin")):
        return f"cuda-core is not installed, and nothing was compiled ahead; {INSTALL}"
    if (capability := _capability(device)) < LEAST:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}; {LEAST[0]}.{LEAST[1]} is the least"
    return ""


@lru_cache
def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # the parent package is missing
        return False


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def architecture(device: torch.device) -> str:
    """NVRTC's name for the device, e.g. ``sm_90``."""
    major, minor = _capability(device)
    return f"sm_{major}{minor}"


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Most bytes of shared memory that a block of threads can have."""
    attributes = importlib.import_module("cuda.bindings.driver").CUdevice_attribute
    wanted = attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(_call("tell the size of shared memory", "cuDeviceGetAttribute", wanted, index))


# -- compiling -----------------------------------------------------------------------------------------------------


def included(program: Program) -> dict[str, bytes]:
    """Return the files that the program includes, directly or not: path -> contents, in order of inclusion.

    Raises FileNotFoundError if an included file is in none of the folders.
    """
    files: dict[str, bytes] = {}

    def visit(text: str, beside: tuple[str, ...]) -> None:
        for name in _INCLUDE.findall(text):
            path = next((p for f in (*beside, *program.folders) if (p := Path(f, name)).is_file()), None)
            if path is None:
                if name == "emulator.h":  # only a host compiler's build includes it
                    continue
                raise FileNotFoundError(f"{name!r} is in none of {', '.join(program.folders)}")
            if str(path) not in files:
                files[str(path)] = path.read_bytes()
                visit(files[str(path)].decode(), (str(path.parent),))

    visit(program.source, ())
    return files


def cache_key(program: Program, arch: str) -> str:
    """Digest of everything that the program depends on, paths and the compiler excepted."""
    digest = hashlib.sha256()
    for part in (MAGIC, arch.encode(), str(program.fma).encode(), program.source.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    for path, contents in included(program).items():
        name = Path(path).name.encode()
        digest.update(len(name).to_bytes(8, "little") + name + len(contents).to_bytes(8, "little") + contents)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where compiled programs are kept."""
    return cache_dir() / "cuda"


def cache_file(program: Program, arch: str, compiler: str) -> Path:
    """Path of a program that was compiled by ``compiler``, a ``compiler_version``."""
    return cache_folder() / f"{cache_key(program, arch)}-{compiler.replace(' ', '')}.cubin"


def compiled(program: Program, arch: str) -> bytes | None:
    """Return a program that was compiled before; None: it was not, or by another version of the compiler here."""
    try:
        return read_cached(cache_file(program, arch, compiler_version()))
    except UnsupportedError:  # no compiler
        cubins = map(read_cached, sorted(cache_folder().glob(f"{cache_key(program, arch)}-*.cubin"), reverse=True))
        return next((cubin for cubin in cubins if cubin is not None), None)


def read_cached(path: Path) -> bytes | None:
    """Return a compiled program from the cache; None if it is missing or incomplete."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    head, body = raw[: len(MAGIC) + 32], raw[len(MAGIC) + 32 :]
    return body if head == MAGIC + hashlib.sha256(body).digest() else None


def write_cached(path: Path, cubin: bytes) -> None:
    """Write a compiled program atomically; a folder that cannot be written is ignored."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # if several processes compile at once the last one wins, with the same bytes
        with whole_file(path) as part:
            part.write_bytes(MAGIC + hashlib.sha256(cubin).digest() + cubin)


@lru_cache
def compiler_version() -> str:
    """Return NVRTC's version, e.g. ``nvrtc 13.0``; raises UnsupportedError if NVRTC is not installed."""
    if not _installed("cuda.core"):
        _core()  # says what is missing; its import takes longer than everything else here, and only compiling needs it
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the loader's own errors differ by version
        raise UnsupportedError(
            f"the CUDA kernels need NVRTC, which does not load ({error}); {INSTALL}, with the NVRTC of torch's CUDA "
            f"version {torch.version.cuda} (nvidia-cuda-nvrtc)."
        ) from error
    if int(status):
        raise UnsupportedError(f"NVRTC does not tell its version ({status}); reinstall nvidia-cuda-nvrtc.")
    return f"nvrtc {major}.{minor}"


def compile_program(program: Program, arch: str, label: str = "", progress: Progress | None = None) -> bytes:
    """Compile for ``arch``, ``sm_XX``, or read what was compiled before; returns the cubin. No GPU is needed.

    The progress line names ``label``. Raises UnsupportedError if the program was not compiled before, and cuda-core or
    NVRTC is missing, or NVRTC is too old for the GPU.
    """
    if (cubin := compiled(program, arch)) is not None:
        return cubin
    path = cache_file(program, arch, compiler_version())
    shown = progress or Progress()
    with shown.busy(f"packedkv: compiling {label or 'CUDA kernels'} for {arch} (once; kept in {path.parent})"):
        cubin = _nvrtc(program, arch)
    write_cached(path, cubin)
    return cubin


def _nvrtc(program: Program, arch: str) -> bytes:
    core = _core()
    options = core.ProgramOptions(
        name="packedkv.cu",
        arch=arch,
        std="c++17",
        fma=program.fma,
        include_path=list(program.folders),
        # NVRTC would treat a constexpr function without annotations as a host function, and refuse it
        device_as_default_execution_space=True,
    )
    try:
        return bytes(core.Program(program.source, "c++", options).compile("cubin").code)
    except Exception as error:
        if "invalid value for --gpu-architecture" in str(error):
            raise UnsupportedError(
                f"{compiler_version()} is too old for {arch}; install a torch whose CUDA version knows this GPU."
            ) from error
        raise


# -- loading and launching -----------------------------------------------------------------------------------------


class Kernel:
    """One function on the device of this index, ready to launch; takes one struct by value."""

    def __init__(self, handle: Any, device: int) -> None:
        self.driver = importlib.import_module("cuda.bindings.driver")
        self.handle, self.device = handle, device
        self.lock = threading.Lock()
        self.shared = 0
        self.configs: dict[bool, Any] = {}
        self.params = (ctypes.c_void_p * 1)()

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, args: ctypes.Structure, *, early: bool = False
    ) -> None:
        """Start ``grid`` blocks of threads on torch's current stream, each with ``shared`` bytes of dynamic memory.

        ``args``, one of ``arguments``, is copied before this returns. With ``early`` the kernel may start before the
        kernel ahead of it on the stream has ended (programmatic dependent launch); it then waits for that one's results
        itself. ``early`` is ignored below compute capability 9.0. Raises RuntimeError with the driver's reason.
        """
        with self.lock:  # the config and the pointer are shared by all calls
            if shared > self.shared:
                self._allow(shared)
            config = self.configs.get(early)
            if config is None:
                config = self.configs[early] = self._config(early)
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.blockDimX = threads
            config.sharedMemBytes = shared
            config.hStream = torch._C._cuda_getCurrentRawStream(self.device)  # of ``current_stream``, quicker
            self.params[0] = ctypes.addressof(args)
            status = self._start(config)
            if status == _INVALID_CONTEXT:  # a thread that has not used the device yet
                _make_current(self.device)
                status = self._start(config)
        _check(status, "launch")

    def _start(self, config: Any) -> int:
        with torch.cuda.device(self.device) if torch.cuda.current_device() != self.device else contextlib.nullcontext():
            return int(self.driver.cuLaunchKernelEx(config, self.handle, ctypes.addressof(self.params), 0)[0])

    def _config(self, early: bool) -> Any:
        config = self.driver.CUlaunchConfig()
        config.blockDimY = config.blockDimZ = 1
        config.numAttrs = 0
        if early and _capability(torch.device("cuda", self.device)) >= (9, 0):
            attribute = self.driver.CUlaunchAttribute()
            attribute.id = self.driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        return config

    def _allow(self, shared: int) -> None:
        attributes = self.driver.CUfunction_attribute
        for attribute, value in (
            (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
            (attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
        ):
            with torch.cuda.device(self.device):
                doing = f"give the kernel {shared} bytes of shared memory"
                _call(doing, "cuFuncSetAttribute", self.handle, attribute, value)
        self.shared = shared


def _call(doing: str, function: str, *args: Any) -> Any:
    """Call a function of the driver and return its result; raises RuntimeError with the driver's reason."""
    status, *results = getattr(importlib.import_module("cuda.bindings.driver"), function)(*args)
    _check(int(status), doing)
    return results[0] if results else None


def _check(status: int, doing: str) -> None:
    if status:
        driver = importlib.import_module("cuda.bindings.driver")
        name = driver.cuGetErrorName(driver.CUresult(status))[1]
        text = driver.cuGetErrorString(driver.CUresult(status))[1]
        raise RuntimeError(f"CUDA could not {doing}: {name.decode()}, {text.decode()}")


def _make_current(device: int) -> None:
    """Make the device's primary context, which torch uses, this thread's."""
    context = _call("take the device's context", "cuDevicePrimaryCtxRetain", device)
    _call("use the device's context", "cuCtxSetCurrent", context)


_LOADED: dict[tuple[Program, int], Any] = {}
_LOADING = threading.Lock()


@contextlib.contextmanager
def _current_device(device: int) -> Iterator[None]:
    """Make the device's context current, whichever device this thread used before."""
    with torch.cuda.device(device):
        torch.cuda.current_stream(device)
        status, context = importlib.import_module("cuda.bindings.driver").cuCtxGetCurrent()
        if int(status) or not int(context):
            _make_current(device)
        yield


def load(program: Program, names: Sequence[str], device: torch.device, label: str = "") -> tuple[Kernel, ...]:
    """Compile (or take from the cache) and load a program; return its ``extern "C"`` kernels of these names.

    The progress line names ``label``. Raises UnsupportedError for the reasons of ``refusal`` and ``compile_program``.
    """
    if reason := refusal(device):
        raise UnsupportedError(f"{label or 'CUDA kernels'}: {reason}.")
    index = torch.cuda.current_device() if device.index is None else device.index
    with _LOADING:  # one thread compiles, the others find the result
        if (program, index) not in _LOADED:
            cubin = compile_program(program, architecture(torch.device("cuda", index)), label)
            with _current_device(index):
                _LOADED[program, index] = _call(f"load {label or 'a program'}", "cuModuleLoadData", cubin)
    return tuple(_kernel(program, name, index) for name in names)


@cache
def _kernel(program: Program, name: str, index: int) -> Kernel:
    """One object per function: its shared-memory limit is set once and must not shrink."""
    with _current_device(index):
        handle = _call(f"find {name} in a program", "cuModuleGetFunction", _LOADED[program, index], name.encode())
    return Kernel(handle, index)
