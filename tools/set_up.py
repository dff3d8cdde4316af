"""Make the virtual environment that the Makefile's targets run in.

Run by ``make``; needs only a Python with ``venv``. Installs the development dependencies with the
versions of ``constraints.txt``, then the wheel built from this tree, so that what is tested is
what users install. Safe to run again: pip does nothing where all is in place.

Which torch: on Linux without an NVIDIA GPU the CPU build, since the default wheel would bring
gigabytes of CUDA libraries that nothing could use; with a GPU the default (CUDA) wheel; elsewhere
the platform's own. ``FIVEFOLD_TORCH=cpu`` or ``=cuda`` decides instead.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

MINIMUM_PYTHON = (3, 11)
ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Do one part; return an exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("part", choices=["dependencies", "wheel"])
    arguments = parser.parse_args()
    if arguments.part == "dependencies":
        return set_up_dependencies(arguments.venv)
    say("building and installing the wheel")
    if not install_wheel(arguments.venv / "bin" / "python"):
        return fail("the wheel could not be built or installed", "see pip's message above")
    return 0


def set_up_dependencies(venv: Path) -> int:
    """Create the environment with everything but fivefold itself; return an exit code."""
    python = venv / "bin" / "python"
    problem = make_environment(venv)
    if problem is not None:
        return fail(*problem)
    say("installing torch")
    if not install_torch(python):
        return fail("torch could not be installed", "see pip's message above")
    say("installing the other dependencies (about a minute)")
    if not pip(python, "-c", str(constraints(venv)), *dependencies()):
        return fail("a dependency could not be installed", "see pip's message above")
    return 0


def make_environment(folder: Path) -> tuple[str, str] | None:
    """Create the virtual environment; return an error and a hint where it cannot be."""
    if sys.version_info < MINIMUM_PYTHON:
        version = ".".join(map(str, sys.version_info[:3]))
        hint = "install Python 3.11 or newer and run: make PYTHON=python3.12 <target>"
        return f"Python {version} is too old", hint
    if (folder / "bin" / "python").exists():
        return None
    say(f"creating {folder.name}")
    result = subprocess.run(
        [sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        shutil.rmtree(folder, ignore_errors=True)
        reason = (result.stderr or result.stdout).strip().splitlines()
        hint = "install the venv module (Debian and Ubuntu: apt install python3-venv)"
        return f"python -m venv failed: {reason[-1] if reason else 'no reason given'}", hint
    return None


def install_torch(python: Path) -> bool:
    """Install the pinned torch in the build that fits this machine."""
    version = pinned_torch()
    requirement = f"torch=={version}"
    if installed(python, version):
        return True
    if not wants_cpu_build():
        return pip(python, requirement)
    # A local version finds the CPU build wherever pip's own configuration offers one.
    if pip(python, f"{requirement}+cpu", quiet=True):
        return True
    # uv knows where PyTorch's CPU wheels are published.
    uv = [str(python), "-m", "uv", "pip", "install", "--python", str(python)]
    if pip(python, "uv", quiet=True) and run([*uv, "--torch-backend", "cpu", requirement]):
        return True
    say("no CPU build of torch can be had here: installing the default one (several GB)")
    return pip(python, requirement)


def pinned_torch() -> str:
    """The version of torch that constraints.txt names."""
    pin = re.search(r"^torch==(\S+)$", Path("constraints.txt").read_text(), re.MULTILINE)
    if pin is None:
        sys.exit(fail("constraints.txt has no line torch==VERSION", "put the pin back"))
    return pin[1]


def wants_cpu_build() -> bool:
    """Whether the CPU-only torch is the right one here."""
    choice = os.environ.get("FIVEFOLD_TORCH", "auto")
    if choice in {"cpu", "cuda"}:
        return choice == "cpu"
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False  # the platform's default wheel is small, or the only one
    return not has_nvidia_gpu()


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver lists a GPU."""
    if any(Path("/proc/driver/nvidia/gpus").glob("*")):
        return True
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listing = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return listing.returncode == 0 and "GPU 0" in listing.stdout


def installed(python: Path, version: str) -> bool:
    """Whether this version of torch is there, in any build."""
    code = "import importlib.metadata as m; print(m.version('torch').partition('+')[0])"
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip() == version


def constraints(venv: Path) -> Path:
    """Write constraints.txt without what the installed torch pins itself; return the file.

    Its CUDA build wants another triton than the one that the tests of the CPU build know.
    """
    code = "import importlib.metadata as m; print(*m.requires('torch') or [], sep='\\n')"
    wanted = subprocess.run(
        [str(venv / "bin" / "python"), "-c", code], capture_output=True, text=True, check=True
    ).stdout
    own = {line.partition("==")[0] for line in wanted.splitlines() if "==" in line}
    lines = Path("constraints.txt").read_text().splitlines()
    file = venv / "constraints.txt"
    file.write_text("\n".join(line for line in lines if line.partition("==")[0] not in own))
    return file


def dependencies() -> list[str]:
    """The project's requirements, with those of the dev extra, from pyproject.toml."""
    import tomllib  # noqa: PLC0415 - an older Python must reach the version message first

    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    found: list[str] = list(project["dependencies"])
    wanted = ["dev"]
    for extra in wanted:  # which grows: an extra may name others
        for member in extras[extra]:
            named = re.fullmatch(r"fivefold\[(.*)\]", member)
            if named:
                wanted += [name for name in named[1].split(",") if name not in wanted]
            else:
                found.append(member)
    return found


def install_wheel(python: Path) -> bool:
    """Build the wheel of this tree and install it over an older one."""
    shutil.rmtree("dist", ignore_errors=True)
    build = ["wheel", "--no-deps", "--no-build-isolation", "-q", "-w", "dist", "."]
    if not run([str(python), "-m", "pip", "--disable-pip-version-check", *build]):
        return False
    wheels = [str(wheel) for wheel in Path("dist").glob("fivefold-*.whl")]
    return pip(python, "--no-deps", "--force-reinstall", *wheels)


def pip(python: Path, *arguments: str, quiet: bool = False) -> bool:
    """Run pip install; return whether it worked."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    return run([*command, *arguments], quiet=quiet)


def run(command: list[str], *, quiet: bool = False) -> bool:
    """Run a command; return whether it worked."""
    silent = subprocess.DEVNULL if quiet else None
    return subprocess.run(command, check=False, stderr=silent, stdout=silent).returncode == 0


def say(message: str) -> None:
    """Tell the person what is going on."""
    print(f"set-up: {message}", flush=True)


def fail(error: str, hint: str) -> int:
    """Print two lines and return the exit code of a user's error."""
    print(f"error: {error}\nhint: {hint}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
