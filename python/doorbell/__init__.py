"""Doorbell from Python: what this machine can do, and what it measured, as objects.

>>> import doorbell
>>> doorbell.info().gpu                                  # doctest: +SKIP
>>> report = doorbell.perf("put-bw", size=[8, 65536], quick=True, check=True)
>>> [(r.size, r.messages_per_s) for r in report.results]   # doctest: +SKIP

Every call runs the ``doorbell`` command of this package, with a time limit, and reads its JSON; a failure is a
:class:`DoorbellError` with the command's own words. Nothing is loaded into this process.
"""

from ._command import DoorbellError, command, path, version
from ._results import Record, compare, doctor, info, perf, sweep

__all__ = [
    "DoorbellError",
    "Record",
    "command",
    "compare",
    "doctor",
    "info",
    "path",
    "perf",
    "sweep",
    "version",
]
