"""What results look like: a class for each object of the command's JSON, with the fields by name.

A newer command may add fields: those are attributes too, as plain values or :class:`Record`, and ``to_dict()`` has all of them.
Absent figures are ``None``. Sizes are bytes, times nanoseconds where the name ends in ``_ns``.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Dict, Iterator, List, Optional, Type, TypeVar

T = TypeVar("T", bound="Result")


class Record(Mapping):
    """A JSON object whose members are attributes, read only; also a mapping."""

    def __init__(self, members: Dict[str, Any]):
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

    def to_dict(self) -> Dict[str, Any]:
        """The plain dictionary, as the command wrote it."""
        return self._members


def _wrap(value: Any) -> Any:
    if isinstance(value, dict):
        return Record(value)
    if isinstance(value, list):
        return [_wrap(v) for v in value]
    return value


def _build(kind: Any, value: Any) -> Any:
    """``value`` as its field is declared."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if value is None:
        return None
    if origin is typing.Union:
        return _build(next(a for a in arguments if a is not type(None)), value)
    if origin is list:
        return [_build(arguments[0], v) for v in value]
    if isinstance(kind, type) and issubclass(kind, Result):
        return kind.from_dict(value)
    return _wrap(value)


@dataclasses.dataclass(frozen=True)
class Result:
    """An object of the command's JSON."""

    @classmethod
    def from_dict(cls: Type[T], members: Dict[str, Any]) -> T:
        """From the plain dictionary; fields that are not there are ``None``."""
        kinds = typing.get_type_hints(cls)
        known = {f.name: _build(kinds[f.name], members.get(f.name)) for f in dataclasses.fields(cls)}
        built = cls(**known)
        object.__setattr__(built, "_raw", members)
        return built

    def __getattr__(self, name: str) -> Any:
        raw = self.__dict__.get("_raw", {})
        if name in raw:
            return _wrap(raw[name])
        raise AttributeError(f"{type(self).__name__} has no {name!r}; there are {', '.join(raw)}")

    def to_dict(self) -> Dict[str, Any]:
        """The plain dictionary, as the command wrote it."""
        return self.__dict__.get("_raw", {})


@dataclasses.dataclass(frozen=True)
class Environment(Result):
    """Where and with what a run was made."""

    version: str
    git: Optional[str]
    profile: Optional[str]
    target: Optional[str]
    command: List[str]
    started: str
    kernel: Optional[str]
    cpu: Optional[str]
    cpus: int
    cpu_quota: Optional[float]
    memory_bytes: Optional[int]
    gpu: Optional[str]
    driver: Optional[str]
    cuda: Optional[str]
    hca_cores: Optional[int]
    seed: Optional[int]


@dataclasses.dataclass(frozen=True)
class Latency(Result):
    """Nanoseconds; each is a sample that was measured."""

    min: int
    p50: int
    p99: int
    max: int


@dataclasses.dataclass(frozen=True)
class PerfResult(Result):
    """A measured case of :func:`doorbell.perf`."""

    test: str
    gpu: str
    initiator: str
    sharing: str
    link: Optional[str]
    mem: Optional[str]
    blocks: int
    threads: int
    qps: int
    depth: int
    batch: int
    size: int
    messages: int
    seconds: float
    messages_per_s: Optional[float]
    bytes_per_s: Optional[float]
    latency_ns: Optional[Latency]
    cpu_cores_used: Optional[float]
    baseline_ns: Optional[float]
    checked: bool
    errors: int


@dataclasses.dataclass(frozen=True)
class Perf(Result):
    """What :func:`doorbell.perf` measured."""

    schema: str
    environment: Environment
    results: List[PerfResult]


@dataclasses.dataclass(frozen=True)
class Spread(Result):
    """A figure over the repetitions."""

    median: float
    min: float
    max: float
    times: Optional[int] = None


@dataclasses.dataclass(frozen=True)
class Repetition(Result):
    """One measurement of a point."""

    at_s: float
    messages: int
    seconds: float
    messages_per_s: Optional[float]
    latency_ns: Optional[Latency]
    cpu_cores_used: Optional[float]
    errors: int
    baseline_ns: Optional[float]


@dataclasses.dataclass(frozen=True)
class Point(Result):
    """A case of a sweep and what was measured of it."""

    experiment: str
    test: str
    gpu: str
    initiator: str
    sharing: str
    link: str
    mem: str
    blocks: int
    threads: int
    qps: int
    depth: int
    batch: int
    size: int
    command: str
    messages_per_s: Optional[Spread]
    bytes_per_s: Optional[Spread]
    cpu_cores_used: Optional[Spread]
    p50_ns: Optional[Spread]
    p99_ns: Optional[Spread]
    percentiles_ns: List[float]
    baseline_ns: Optional[float]
    failed: Optional[str]
    repetitions: List[Repetition]


@dataclasses.dataclass(frozen=True)
class Sweep(Result):
    """What :func:`doorbell.sweep` measured."""

    schema: str
    environment: Environment
    quick: bool
    complete: bool
    repeat: int
    seconds: float
    notes: List[str]
    percentiles: List[float]
    points: List[Point]

    def of(self, **wanted: Any) -> List[Point]:
        """Points whose fields have these values: ``of(experiment="sizes", link="roce")``."""
        return [p for p in self.points if all(getattr(p, name) == value for name, value in wanted.items())]


@dataclasses.dataclass(frozen=True)
class Change(Result):
    """A figure before and after."""

    what: str
    metric: str
    before: Optional[Spread]
    after: Optional[Spread]
    repetitions: List[int]
    ratio: Optional[float]
    noise: Optional[float]
    verdict: str


@dataclasses.dataclass(frozen=True)
class Comparison(Result):
    """What :func:`doorbell.compare` found; ``verdict`` of a figure is ``worse``, ``better``, ``same``, ``unknown`` or ``failed``."""

    schema: str
    differences: List[str]
    worse: int
    better: int
    same: int
    unknown: int
    failed: int
    only_before: List[str]
    only_after: List[str]
    figures: List[Change]


@dataclasses.dataclass(frozen=True)
class Gate(Result):
    """A condition of a path: ``state`` is ``pass``, ``fail`` or ``unknown``."""

    what: str
    state: str
    setting: bool
    found: str
    fix: str
    source: str


@dataclasses.dataclass(frozen=True)
class Path(Result):
    """A way of a library to the network: ``state`` is ``taken``, ``open``, ``setting`` or ``blocked``."""

    name: str
    who: str
    state: str
    gates: List[Gate]


@dataclasses.dataclass(frozen=True)
class Library(Result):
    """An installed library and the path it takes; ``who`` drives the NIC: ``native``, ``assisted``, ``host`` or ``none``."""

    name: str
    version: Optional[str]
    source: str
    path: str
    takes: Optional[str]
    who: str
    could: List[str]
    paths: List[Path]
    notes: List[str]


@dataclasses.dataclass(frozen=True)
class Doctor(Result):
    """What :func:`doorbell.doctor` says: ``verdict`` is ``native``, ``falls-back`` or ``nothing-installed``."""

    schema: str
    verdict: str
    libraries: List[Library]
    gpus: List[Record]
    nics: List[Record]


#: Which class the JSON of a schema becomes.
SCHEMAS: Dict[str, Type[Result]] = {
    "doorbell-perf": Perf,
    "doorbell-sweep": Sweep,
    "doorbell-compare": Comparison,
    "doorbell-doctor": Doctor,
}
