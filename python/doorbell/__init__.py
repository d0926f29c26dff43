"""Doorbell from Python: what this machine can do, and what it measured, as objects.

>>> import doorbell
>>> report = doorbell.perf("put-bw", size=[8, 65536], quick=True, check=True)
>>> [(r.size, r.messages_per_s) for r in report.results]   # doctest: +SKIP
>>> for library in doorbell.doctor().libraries:            # doctest: +SKIP
...     print(library.name, library.version, library.who, library.takes)

Every call runs the ``doorbell`` command of this package, with a time limit, and reads its JSON; a failure is a
:class:`DoorbellError` with the command's own words. Nothing is loaded into this process.
"""

from ._command import DoorbellError, command, path, version
from ._model import (
    Change,
    Comparison,
    Doctor,
    Environment,
    Gate,
    Latency,
    Library,
    Path,
    Perf,
    PerfResult,
    Point,
    Record,
    Repetition,
    Result,
    Spread,
    Sweep,
)
from ._results import compare, doctor, info, load, perf, sweep

__all__ = [
    "Change",
    "Comparison",
    "Doctor",
    "DoorbellError",
    "Environment",
    "Gate",
    "Latency",
    "Library",
    "Path",
    "Perf",
    "PerfResult",
    "Point",
    "Record",
    "Repetition",
    "Result",
    "Spread",
    "Sweep",
    "command",
    "compare",
    "doctor",
    "info",
    "load",
    "path",
    "perf",
    "sweep",
    "version",
]
