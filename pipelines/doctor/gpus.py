"""GPUs, and everything that makes a target fast on them: driver, compiler, kernels.

Loads torch where it is needed, so that a torch that is broken breaks one row only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from .check import Check, Findings, Gpu, State

FLA = ("flash-linear-attention", "fla-core")
"""The distributions that bring the package `fla`."""
KERNELS_NEED = (8, 0)
FP8_NEEDS = (8, 9)
"""Compute capabilities."""
BUILD = "if the C compiler or Python's headers are missing, put that right first"


def check_gpus(found: Findings) -> Iterator[Check]:
    """GPUs, their memory, and the driver."""
    import torch

    driver = _driver()
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            yield _gpu(number, found)
    elif driver is None:
        yield Check("GPUs", "warning", "none: use --gpus cpu, which is enough for the demo and for small targets")
    else:
        yield _unseen_gpus()
    if driver is not None:
        yield driver


def _gpu(number: int, found: Findings) -> Check:
    import torch

    name, seen = f"GPU {number}", torch.cuda.get_device_properties(number)
    try:
        free, memory = torch.cuda.mem_get_info(number)
    except RuntimeError as error:
        return Check(name, "broken", f"{seen.name} cannot be used: {str(error).splitlines()[0]}", "nvidia-smi")
    found.gpus.append(Gpu(seen.name, (seen.major, seen.minor), memory, free))
    said = f"{seen.name} ({seen.major}.{seen.minor}): {memory / 2**30:.1f} GiB, {free / 2**30:.1f} free"
    if free < memory / 2:
        return Check(name, "warning", f"{said}: another process uses it", "see which: nvidia-smi")
    return Check(name, "ok", said)


def _unseen_gpus() -> Check:
    """A driver is here and torch sees no GPU: why."""
    import torch

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return Check("GPUs", "warning", f"hidden by CUDA_VISIBLE_DEVICES={hidden!r}", "unset CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        said = f"there is a driver, but torch {torch.__version__} is built for CPUs only"
        return Check("GPUs", "broken", said, "pip install --force-reinstall torch")
    try:
        torch.cuda.init()
        reason = "torch sees none"
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    return Check("GPUs", "broken", f"there is a driver, but {reason}", f"a driver for CUDA {torch.version.cuda}")


def _driver() -> Check | None:
    """The driver's version; None without a driver."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Check("NVIDIA driver", "warning", f"nvidia-smi fails: {error}")
    return Check("NVIDIA driver", "ok", next(iter(done.stdout.split()), "no GPU"))


def check_compiler(found: Findings) -> Iterator[Check]:
    """What Triton builds its launchers with: a C compiler and Python's headers."""
    lacking: State = "missing" if found.gpus else "unused"
    why = "Triton builds with it" if found.gpus else "needed with a GPU only"
    named = [name for name in (os.environ.get("CC"), "gcc", "clang") if name]
    compiler = next((path for name in named if (path := shutil.which(name))), None)
    if compiler:
        yield Check("C compiler", "ok", compiler)
    else:
        yield Check("C compiler", lacking, f"none ({why})", _system_install("gcc", "gcc") if found.gpus else "")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if header.is_file():
        yield Check("Python headers", "ok", str(header))
    else:
        of = f"{sys.version_info.major}.{sys.version_info.minor}"
        command = _system_install(f"python{of}-dev", f"python{of}-devel")
        yield Check("Python headers", lacking, f"no {header} ({why})", command if found.gpus else "")


def check_kernels(found: Findings) -> Iterator[Check]:
    """This project's Triton kernels, by compiling one and running it; and fp8 matrix products."""
    if not found.gpus:
        yield Check("Triton kernels", "unused", "no GPU: plain PyTorch does the same on a CPU")
        yield Check("fp8 products", "unused", "no GPU")
        return
    least = min(gpu.capability for gpu in found.gpus)
    if least < KERNELS_NEED:
        said = f"a GPU of compute capability {_dotted(least)}; they need {_dotted(KERNELS_NEED)}"
        yield Check("Triton kernels", "broken", said, "leave that GPU out of --gpus")
    else:
        yield _run_kernel()
    enough = least >= FP8_NEEDS
    said = "target.dtype=fp8 can be used" if enough else f"need {_dotted(FP8_NEEDS)}, here {_dotted(least)}"
    yield Check("fp8 products", "ok" if enough else "unused", said)


def _run_kernel() -> Check:
    try:
        import torch

        from ...train.fp8 import decode_kernel, decode_reference

        codes = torch.arange(120, dtype=torch.uint8, device="cuda")[None]
        scales = torch.full((1,), 0.5, device="cuda")
        right = torch.equal(decode_kernel(codes, scales), decode_reference(codes, scales))
    except Exception as error:  # compilers fail in many ways
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return Check("Triton kernels", "broken", f"one does not compile or run: {reason}", BUILD)
    if not right:
        return Check("Triton kernels", "broken", "one gives a wrong result", "pip install --force-reinstall triton")
    return Check("Triton kernels", "ok", "one was compiled, ran, and is right")


def check_linear_attention(found: Findings) -> Iterator[Check]:
    """The kernels of hybrid targets."""
    name, linear = "flash-linear-attention", found.linear_layers
    if find_spec("fla"):
        here = next((installed for each in FLA if (installed := _version(each))), "of unknown version")
        if found.gpus or linear == 0:
            yield Check(name, "ok", here)
        else:
            said = f"{here}: hybrid targets (Qwen3.5, 3.6) do not run on the CPU while it is installed"
            yield Check(name, "warning", said, f"to run them on the CPU: pip uninstall {' '.join(FLA)}")
    elif linear == 0:
        yield Check(name, "unused", "not installed; this target has no linear attention")
    else:
        yield _without_fla(name, found)
    yield Check("causal-conv1d", "unused", "not needed: the causal convolution is among dflash's own kernels")


def _without_fla(name: str, found: Findings) -> Check:
    from ...extract.target import slow_layers

    remedy = f"pip install {name}" if found.gpus else f"where the GPUs are: pip install {name}"
    if found.settings is None or found.target is None:
        return Check(name, "warning", "not installed: hybrid targets (Qwen3.5, 3.6) run many times slower", remedy)
    said = (
        f"not installed: {slow_layers(found.target)} of {found.target.num_layers} layers of "
        f"{found.settings.target.path} would run many times slower"
    )
    return Check(name, "missing" if found.gpus else "warning", said + " on a GPU" * (not found.gpus), remedy)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _system_install(debian: str, fedora: str) -> str:
    if shutil.which("dnf"):
        return f"sudo dnf install {fedora}"
    return f"sudo apt-get install {debian}"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
