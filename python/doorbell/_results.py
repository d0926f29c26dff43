"""Results as objects."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Iterator, List, Union

from ._command import run


class Record(Mapping):
    """A JSON object whose members are attributes, read only; also a mapping. Absent figures are ``None``."""

    def __init__(self, members: dict):
        object.__setattr__(self, "_members", members)

    def __getattr__(self, name: str) -> Any:
        try:
            return _wrap(self._members[name])
        except KeyError:
            raise AttributeError(f"no {name!r} here; there are {', '.join(self._members) or 'no members'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("results are read only")

    def __getitem__(self, key: str) -> Any:
        return _wrap(self._members[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __dir__(self) -> List[str]:
        return sorted({*super().__dir__(), *self._members})

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}={v!r}" for k, v in list(self._members.items())[:4] if not isinstance(v, (dict, list)))
        return f"Record({shown}{', ...' if len(self._members) > 4 else ''})"

    def to_dict(self) -> dict:
        """The plain dictionary, as the command wrote it."""
        return self._members


def _wrap(value: Any) -> Any:
    if isinstance(value, dict):
        return Record(value)
    if isinstance(value, list):
        return [_wrap(v) for v in value]
    return value


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


def info(timeout: float = 60, **options: Any) -> Record:
    """What would be used on this machine, and why (``doorbell info --json``)."""
    return Record(json.loads(run(["info", "--json", *_options(options)], timeout)))


def doctor(root: Union[str, Path, None] = None, timeout: float = 60) -> Record:
    """Which GPU-initiated path each installed library takes here, and why not another (``doorbell doctor --json``).

    ``root`` names the captured file tree of another machine. A verdict that something falls back is a result, not an error.
    """
    arguments = ["doctor", "--json", *_options({"root": root})]
    return Record(json.loads(run(arguments, timeout, allowed=(0, 1))))


def perf(test: str, timeout: float = 600, **options: Any) -> Record:
    """Runs one of the tests of ``doorbell perf``; options are those of the command, lists join with commas.

    The record has ``environment`` and ``results``; a result has ``size``, ``messages_per_s``, ``latency_ns`` and so on
    (seconds, bytes and nanoseconds, as the names say). Raises :class:`DoorbellError` if a check fails (status 3).
    """
    with tempfile.TemporaryDirectory(prefix="doorbell-") as folder:
        file = Path(folder) / "perf.json"
        run(["perf", test, "--json", str(file), *_options(options)], timeout)
        return Record(json.loads(file.read_text()))


def sweep(out: Union[str, Path, None] = None, timeout: float = 3600, **options: Any) -> Record:
    """Runs ``doorbell sweep`` and returns its ``results.json``; ``out`` keeps it and ``report.html`` in a folder."""
    if out is not None:
        run(["sweep", "--out", str(out), *_options(options)], timeout)
        return Record(json.loads((Path(out) / "results.json").read_text()))
    with tempfile.TemporaryDirectory(prefix="doorbell-") as folder:
        return sweep(out=Path(folder) / "sweep", timeout=timeout, **options)


def compare(a: Union[str, Path, Record], b: Union[str, Path, Record], timeout: float = 60) -> Record:
    """What changed beyond noise from ``a`` to ``b``: result files or records of :func:`sweep` (``doorbell compare --json``)."""
    with tempfile.TemporaryDirectory(prefix="doorbell-") as folder:
        files = [_file(x, Path(folder) / f"{name}.json") for name, x in (("a", a), ("b", b))]
        return Record(json.loads(run(["compare", *files, "--json"], timeout, allowed=(0, 1))))


def _file(what: Union[str, Path, Record], spare: Path) -> str:
    if isinstance(what, Record):
        spare.write_text(json.dumps(what.to_dict()))
        return str(spare)
    return str(what)
