"""Finding and running the command."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Optional, Sequence


class DoorbellError(RuntimeError):
    """The command failed.

    ``args_run`` is what was run, ``status`` its exit status (``None``: it was stopped at its time limit) and ``stderr`` what
    it said. Statuses: 1 the run failed, 2 wrong arguments, 3 a check failed.
    """

    def __init__(self, args_run: Sequence[str], status: Optional[int], stderr: str):
        self.args_run = list(args_run)
        self.status = status
        self.stderr = stderr
        said = stderr.strip() or "it said nothing"
        how = "did not end in time" if status is None else f"ended with status {status}"
        super().__init__(f"{' '.join(self.args_run)} {how}: {said}")


def command() -> str:
    """The path of the ``doorbell`` command: ``DOORBELL_COMMAND``, else this environment's own, else one in ``PATH``."""
    named = os.environ.get("DOORBELL_COMMAND")
    if named:
        if not os.access(named, os.X_OK):
            raise FileNotFoundError(f"DOORBELL_COMMAND={named} is not a program; name the doorbell command, or unset it")
        return named
    folders = [sysconfig.get_path("scripts")]
    try:
        folders.append(sysconfig.get_path("scripts", "posix_user"))
    except KeyError:
        pass
    # A package installed with --target has its scripts beside itself.
    folders.append(str(Path(__file__).resolve().parent.parent / "bin"))
    for folder in folders:
        own = Path(folder) / "doorbell"
        if os.access(own, os.X_OK):
            return str(own)
    found = shutil.which("doorbell")
    if found is None:
        raise FileNotFoundError(
            f"no doorbell command in {' or '.join(folders)} nor in PATH: install the wheel (pip install doorbell-gpu), "
            "or name the command in DOORBELL_COMMAND"
        )
    return found


def run(arguments: Sequence[str], timeout: float, allowed: Sequence[int] = (0,)) -> str:
    """Runs the command and returns its standard output; statuses outside ``allowed`` and time-outs raise."""
    line = [command(), *arguments]
    environment = dict(os.environ)
    # The files of a wheel lie inside the package; the command may have been found elsewhere.
    home = Path(__file__).resolve().parent
    if (home / "lib" / "libdoorbell.so.0").exists():
        environment.setdefault("DOORBELL_HOME", str(home))
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    except subprocess.TimeoutExpired as expired:
        stderr = expired.stderr or b""
        raise DoorbellError(line, None, stderr.decode(errors="replace") if isinstance(stderr, bytes) else stderr) from None
    if done.returncode not in allowed:
        raise DoorbellError(line, done.returncode, done.stderr)
    return done.stdout


def path(piece: str = "home") -> Path:
    """Where a piece of the installation is: ``home``, ``c``, ``lib``, ``include``, ``ptx``, ``nccl``, ``nvshmem``, ``nixl``."""
    return Path(run(["path", piece], timeout=10).strip())


def version() -> str:
    """The command's version, with the commit it was built from where that is known."""
    return run(["--version"], timeout=10).strip().split(" ", 1)[1]
