"""Build the pretend NVIDIA libraries for the torch and triton of constraints.txt, once for each version, in the user's cache.

    python tests/pretend_cuda/build.py      # prints the folder

Downloads the CUDA builds of torch and triton and CUDA's headers with pip (0.9 GB, 3 GB unpacked). Reads from torch's and
bitsandbytes' libraries which functions of NVIDIA's libraries they call, compiles the ones that src/ defines, and makes every
other one a function that returns success. Needs g++ and nm. PRETEND_CUDA_HOME: another folder.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
CONSTRAINTS = HERE.parent.parent / "constraints.txt"


class DownloadError(Exception):
    """pip could not download a package."""

    exit_code = 75
    """EX_TEMPFAIL: the only failure that continuous integration tolerates."""


@dataclass(frozen=True)
class Library:
    """One of NVIDIA's libraries: its file, the pattern of its functions, and the source that defines some of them."""

    file: str
    functions: str
    source: str
    define: str = ""
    """The macro that selects this library's part of the source."""

    @property
    def stem(self) -> str:
        return self.file.partition(".")[0]

    @property
    def version_nodes(self) -> str:
        """The functions as a pattern of a linker version script."""
        plain = re.sub(r"\(\?!\w+\)|\[A-Z\]|\(__\)\?", "", self.functions)
        return f"{plain}*; __{plain}*;" if "(__)" in self.functions else f"{plain}*;"


LIBRARIES = (
    Library("libcudart.so.13", r"(__)?cuda[A-Z]", "cudart.cpp"),
    Library("libcuda.so.1", r"cu(?!File)[A-Z]", "cuda.cpp"),
    Library("libnvidia-ml.so.1", r"nvml[A-Z]", "nvml.cpp"),
    Library("libcublas.so.13", r"cublas(?!Lt)[A-Z]", "cublas.cpp", "CUBLAS"),
    Library("libcublasLt.so.13", r"cublasLt[A-Z]", "cublas.cpp", "CUBLASLT"),
    Library("libcudnn.so.9", r"cudnn[A-Z]", "others.cpp", "CUDNN"),
    Library("libcufft.so.12", r"cufft[A-Z]", "others.cpp", "CUFFT"),
    Library("libcusparse.so.12", r"cusparse(?!Lt)[A-Z]", "others.cpp", "CUSPARSE"),
    Library("libcusparseLt.so.0", r"cusparseLt[A-Z]", "others.cpp", "CUSPARSELT"),
    Library("libcurand.so.10", r"curand[A-Z]", "others.cpp", "CURAND"),
    Library("libcufile.so.0", r"cuFile[A-Z]", "others.cpp", "CUFILE"),
    Library("libnccl.so.2", r"nccl[A-Z]", "nccl.cpp"),
    Library("libnvrtc.so.13", r"nvrtc[A-Z]", "others.cpp", "NVRTC"),
    Library("libnvshmem_host.so.3", r"nvshmem", "others.cpp", "NVSHMEM"),
    Library("libcusolver.so.12", r"cusolver[A-Z]", "others.cpp", "CUSOLVER"),
    Library("libcupti.so.13", r"cupti[A-Z]", "others.cpp", "CUPTI"),
)
RETURNS_TEXT = re.compile(r"(Get(Error|Status)\w*(String|Name)|GetLastError)$")
MAKES_HANDLE = re.compile(r"[cC]reate(?!IdentityPermutation)")
"""Functions that write a new handle through their first argument."""


@dataclass(frozen=True)
class Build:
    """The folder of torch's CUDA build and of CUDA's headers, and in it a folder with the libraries for this environment.

    Environments with other versions of bitsandbytes have other libraries, and may use theirs at the same time.
    """

    home: Path

    @property
    def site(self) -> Path:
        return self.home / "site"

    @property
    def folder(self) -> Path:
        return self.home / fingerprint()[:16]

    @property
    def libraries(self) -> Path:
        """torch looks for NVIDIA's libraries in the first folder of this name on sys.path."""
        return self.folder / "nvidia" / "cu13" / "lib"


def environment(built: Build, cards: str) -> dict[str, str]:
    """The variables of a process that runs on the pretend `cards`."""

    def before(variable: str, *folders: Path) -> str:
        return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get(variable)])])

    return {
        "PRETEND_GPU": cards,
        # a card that computes does so on the CPU: the thread of autograd and the one that launches a graph may have other
        # numbers of threads, and their sums other last bits
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PRETEND_CUDA_HOME": str(built.home),
        "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", built.libraries),
        "PYTHONPATH": before("PYTHONPATH", built.folder, built.site, HERE.parent),
    }


def pinned(package: str) -> str:
    """The version of `package` in constraints.txt."""
    found = re.search(rf"^{re.escape(package)}==(\S+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{CONSTRAINTS} does not pin {package}"
    return found[1]


def home_folder() -> Path:
    """The folder of the build: PRETEND_CUDA_HOME, or one in the user's cache for each version of torch and of Python."""
    if chosen := os.environ.get("PRETEND_CUDA_HOME"):
        return Path(chosen).resolve()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    tag = "cp{}{}".format(*sys.version_info[:2])
    return cache / "hwopt" / f"pretend-cuda-{pinned('torch')}-{tag}"


def build() -> Build:
    """The libraries and the CUDA build of torch, made if they are missing or out of date.

    Raises DownloadError if pip fails, and CalledProcessError if the compiler fails.
    """
    from filelock import FileLock

    built = Build(home_folder())
    built.home.mkdir(parents=True, exist_ok=True)
    with FileLock(built.home / "build.lock"):
        stamp = built.folder / "built"
        if not stamp.is_file():
            download(built.site, f"torch=={pinned('torch')}", f"triton=={pinned('triton')}")
            cuda = cuda_version(built.site)
            download(built.home / "headers", f"nvidia-cuda-runtime=={cuda}.*", f"nvidia-cuda-crt=={cuda}.*")
            compile_all(built)
            stamp.touch()
    return built


def fingerprint() -> str:
    """A hash of everything that the libraries are built from."""
    libraries = [(path.name, path.stat().st_size) for path in bitsandbytes_libraries()]
    found = hashlib.sha256(repr((pinned("torch"), pinned("triton"), libraries)).encode())
    for path in (Path(__file__), *sorted(SOURCES.iterdir())):
        found.update(path.read_bytes())
    return found.hexdigest()


def download(target: Path, *packages: str) -> None:
    """Install `packages` without their dependencies into the folder `target`, unless it exists. Raises DownloadError."""
    if target.is_dir():
        return
    # the settings of this machine's pip may prefer a build of torch for CPUs
    variables = {name: value for name, value in os.environ.items() if name not in ("PIP_FIND_LINKS", "PIP_CONSTRAINT")}
    partial_target = target.with_name(f"{target.name}.part")
    shutil.rmtree(partial_target, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    print(f"pretend-cuda: downloading {', '.join(packages)} to {target}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [*command, "--only-binary=:all:", "--target", partial_target, *packages],
        env=variables | {"PIP_CONFIG_FILE": os.devnull},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise DownloadError(f"pretend-cuda: pip could not download {', '.join(packages)}:\n{done.stderr.strip()}")
    partial_target.rename(target)


def cuda_version(site: Path) -> str:
    """The CUDA version, such as "13.2", for which the torch in `site` was built; the library names above are those of CUDA 13."""
    found = re.search(r"^cuda.* = '(13\.\d+)'", (site / "torch/version.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{site}/torch was not built for CUDA 13"
    return found[1]


def compile_all(built: Build) -> None:
    """Compile all libraries."""
    print(f"pretend-cuda: compiling the libraries in {built.libraries}", file=sys.stderr, flush=True)
    shutil.rmtree(built.folder, ignore_errors=True)
    shutil.rmtree(built.site / "nvidia", ignore_errors=True)  # torch's own libraries look there first
    library_folder, work, torch = built.libraries, built.folder / "work", built.site / "torch"
    for folder in (library_folder, work):
        folder.mkdir(parents=True)
    flags = ["-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden", f"-I{built.home / 'headers/nvidia/cu13/include'}"]
    core = library_folder / "libpretend.so"
    output("g++", *flags, "-shared", "-Wl,-soname,libpretend.so", SOURCES / "core.cpp", "-o", core)
    wanted = undefined_functions([*sorted((torch / "lib").glob("*.so*")), *bitsandbytes_libraries()])
    wanted |= dict.fromkeys(functions_by_name(built.site) - wanted.keys(), "")
    for library in LIBRARIES:
        compile_library(library, wanted, library_folder, work, flags)
    includes = [f"-I{torch / folder}" for folder in ("include", "include/torch/csrc/api/include")]
    needed = ["-L", torch / "lib", "-L", library_folder, "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda", "-lpretend"]
    hook = library_folder / "libpretend_torch.so"
    path = f"-Wl,-rpath-link,{library_folder}"
    output("g++", *flags, "-shared", "-w", *includes, SOURCES / "torch_hook.cpp", "-o", hook, *needed, path)


def compile_library(library: Library, wanted: dict[str, str], folder: Path, work: Path, flags: list[str]) -> None:
    """Compile `library` into `folder`: the functions of its source, and for the other `wanted` ones a function that succeeds."""
    ours, stubs, stub_code = work / f"{library.stem}.o", work / f"{library.stem}_stubs.o", work / f"{library.stem}_stubs.c"
    output("g++", *flags, *([f"-D{library.define}"] if library.define else []), "-c", SOURCES / library.source, "-o", ours)
    defined = {line.split()[-1] for line in output("nm", "--defined-only", "-g", ours).splitlines() if " T " in line}
    functions = {name: version for name, version in wanted.items() if re.match(library.functions, name)}
    lines = ["#include <stdlib.h>", "void pretend_stub(const char *);", *map(stub, sorted(functions.keys() - defined)), ""]
    stub_code.write_text("\n".join(lines), encoding="utf-8")
    output("gcc", "-O2", "-w", "-fPIC", "-c", stub_code, "-o", stubs)
    link = [f"-Wl,-soname,{library.file}", "-Wl,-rpath,$ORIGIN", "-L", str(folder)]
    if versions := sorted(set(functions.values()) - {""}):
        script = work / f"{library.stem}.map"
        script.write_text(f"{versions[0]} {{ global: {library.version_nodes} local: *; }};\n", encoding="utf-8")
        link.append(f"-Wl,--version-script={script}")
    needed = ["-Wl,--no-as-needed", "-lpretend", "-ldl", "-lrt"]
    if library.stem == "libcuda":
        needed.append("-l:libcudart.so.13")
    output("g++", "-shared", "-fPIC", *link, ours, stubs, "-o", folder / library.file, *needed)


def stub(name: str) -> str:
    """C code of the function `name`, which returns success."""
    if RETURNS_TEXT.search(name):
        return f'const char *{name}(void) {{ return "pretend"; }}'
    if MAKES_HANDLE.search(name):
        return f'int {name}(void **out) {{ pretend_stub("{name}"); *out = calloc(1, 256); return 0; }}'
    return f'int {name}(void) {{ pretend_stub("{name}"); return 0; }}'


def undefined_functions(users: Iterable[Path]) -> dict[str, str]:
    """Function -> its symbol version, or "", for everything that the libraries `users` do not define themselves."""
    found: dict[str, str] = {}
    for user in users:
        for line in output("nm", "-D", "--undefined-only", "--with-symbol-versions", user).splitlines():
            name, _, version = line.split()[-1].partition("@")
            found[name] = version.lstrip("@")
    return found


def functions_by_name(site: Path) -> set[str]:
    """The functions of libcuda and libnvidia-ml that torch and triton look up by name at run time."""
    read = partial(Path.read_text, encoding="utf-8")
    names = set(re.findall(r"_\((\w+)(?:, \d+)?\)", read(site / "torch/include/c10/cuda/driver_api.h"))) - {"name"}
    return names | set(re.findall(r"\b(cu[A-Z]\w+)\(", read(site / "triton/backends/nvidia/driver.c")))


def bitsandbytes_libraries() -> list[Path]:
    """bitsandbytes' libraries for CUDA 13; none if it is not installed."""
    found = importlib.util.find_spec("bitsandbytes")
    folders = found.submodule_search_locations if found else None
    return sorted(Path(folders[0]).glob("libbitsandbytes_cuda13?.so")) if folders else []


def output(*command: object) -> str:
    """The standard output of `command`. Raises CalledProcessError, after its standard error is shown."""
    return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    try:
        print(build().folder)
    except DownloadError as error:
        print(error, file=sys.stderr)
        sys.exit(DownloadError.exit_code)
