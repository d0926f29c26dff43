"""Running the command and reading what it wrote."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any, List, Union

from . import _model as model
from ._command import DoorbellError, run

File = Union[str, "os.PathLike[str]"]


def _options(options: dict) -> List[str]:
    """``size=[8, 64], check=True`` as ``--size 8,64 --check``; ``None`` and ``False`` are left out."""
    arguments: List[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        arguments.append("--" + name.replace("_", "-"))
        if value is True:
            continue
        many = isinstance(value, (list, tuple, set, frozenset, range))
        arguments.append(",".join(str(v) for v in value) if many else str(value))
    return arguments


def info(timeout: float = 60, **options: Any) -> model.Record:
    """What would be used on this machine, and why (``doorbell info --json``)."""
    return model.Record(json.loads(run(["info", "--json", *_options(options)], timeout)))


def doctor(root: Union[File, None] = None, timeout: float = 60) -> model.Doctor:
    """Which GPU-initiated path each installed library takes here, and why not another (``doorbell doctor --json``).

    ``root`` names the captured file tree of another machine. A verdict, whichever it is, is a result and not an error.
    """
    arguments = ["doctor", "--json", *_options({"root": root})]
    # 0 native, 1 falls back, 4 nothing installed; 2 and 3 are failures.
    return model.Doctor.from_dict(json.loads(run(arguments, timeout, allowed=(0, 1, 4))))


def perf(test: str, timeout: float = 600, **options: Any) -> model.Perf:
    """Runs one of the tests of ``doorbell perf``; options are those of the command, lists join with commas.

    A result has ``size``, ``messages_per_s``, ``latency_ns`` and so on. Raises :class:`DoorbellError` if a check fails (status 3).
    """
    with tempfile.TemporaryDirectory(prefix="doorbell-") as folder:
        file = Path(folder) / "perf.json"
        run(["perf", test, "--json", str(file), *_options(options)], timeout)
        return model.Perf.from_dict(json.loads(file.read_text(encoding="utf-8")))


def sweep(out: Union[File, None] = None, timeout: float = 3600, **options: Any) -> model.Sweep:
    """Runs ``doorbell sweep`` and returns its ``results.json``; ``out`` keeps it and ``report.html`` in a folder.

    Where single points failed, ``complete`` is false, their ``failed`` says why, and ``notes`` what else did.
    """
    if out is None:
        with tempfile.TemporaryDirectory(prefix="doorbell-") as folder:
            return sweep(out=Path(folder) / "sweep", timeout=timeout, **options)
    file = Path(out) / "results.json"
    before = file.stat().st_mtime_ns if file.exists() else None
    try:
        run(["sweep", "--out", str(out), *_options(options)], timeout)
    except DoorbellError as error:
        # Status 1: it ran, and a point failed; or it did not run, and then there is no new file.
        if error.status != 1 or not file.exists() or file.stat().st_mtime_ns == before:
            raise
    return model.Sweep.from_dict(json.loads(file.read_text(encoding="utf-8")))


def compare(
    before: Union[File, model.Result], after: Union[File, model.Result], timeout: float = 60, **options: Any
) -> model.Comparison:
    """What changed beyond noise: result files, or what :func:`sweep` or :func:`perf` returned (``doorbell compare --json``)."""
    with tempfile.TemporaryDirectory(prefix="doorbell-") as folder:
        files = [_file(x, Path(folder) / f"{name}.json") for name, x in (("before", before), ("after", after))]
        said = run(["compare", *files, "--json", *_options(options)], timeout, allowed=(0, 1))
        return model.Comparison.from_dict(json.loads(said))


def load(file: File) -> model.Result:
    """A JSON file of ``perf``, ``sweep``, ``compare`` or ``doctor``, as what the function of that name returns."""
    members = json.loads(Path(file).read_text(encoding="utf-8"))
    schema = members.get("schema") if isinstance(members, dict) else None
    kind = model.SCHEMAS.get(str(schema).rsplit("/", 1)[0])
    if kind is None:
        raise ValueError(f"{file}: its schema is {schema!r}, and {', '.join(model.SCHEMAS)} are known")
    return kind.from_dict(members)


def _file(what: Union[File, model.Result], spare: Path) -> str:
    if isinstance(what, model.Result):
        spare.write_text(json.dumps(what.to_dict()), encoding="utf-8")
        return str(spare)
    return os.fspath(what)
