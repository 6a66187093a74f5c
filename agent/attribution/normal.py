"""What was normal: a clean-step model that was kept, and whether the steps of today are slower.

Pure. A normal is kept for each model, engine settings and machine (`Setting`): only what is alike
in all of them can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dsagent.agent.attribution.model import COEFFICIENTS, KNOTS, CleanStepModel

VERSION = 1
SEVERAL_SIZES = 2
ENOUGH_OF_A_SIZE = 16
# A wider band tells of the machine's noise, of which the lower quartile knows little.
WIDEST_BAND_RATIO = 0.25
MOST_NORMALS = 64
MOST_CHARS = 512
MOST_STEPS = 1 << 40


@dataclass(frozen=True, slots=True)
class Setting:
    """What decides how long a clean step takes, besides what it holds."""

    model: str
    engine: str
    arguments: str  # of the engine's command line, less where it listens
    threads: str  # what its environment says of them
    processor: str
    cores: int
    affinity: str  # the CPUs it may use, as in 0-3


@dataclass(frozen=True, slots=True)
class Normal:
    """A fitted model, as it is kept."""

    unix_ns: int  # when it was learnt
    clean_steps: int
    band_ratio: float
    coefficients: tuple[float, ...]
    sizes: tuple[int, ...]  # segments of the batch's tokens of which enough steps were known

    @classmethod
    def of(cls, model: CleanStepModel, unix_ns: int) -> Normal | None:
        """None while the model is not fitted."""
        if not model.fitted:
            return None
        sizes = (size for size, rows in model.rows.items() if len(rows) >= ENOUGH_OF_A_SIZE)
        return cls(
            unix_ns, model.clean_steps, model.band_ratio, model.coefficients, tuple(sorted(sizes))
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Clean steps of today by what the normal predicts of them: 1.2 is a fifth slower."""

    ratio: float  # the median over the sizes
    sizes: int  # compared
    slower_sizes: int  # of these, slower than either band allows
    normal: Normal

    @property
    def is_slower(self) -> bool:
        """Over several sizes, and over most of them: one size alone may have changed its mix."""
        return self.slower_sizes >= SEVERAL_SIZES and 2 * self.slower_sizes > self.sizes


def compare(normal: Normal, model: CleanStepModel) -> Comparison | None:
    """None where there is too little to compare: a model not fitted, or no size in common."""
    if not model.fitted:
        return None
    then = CleanStepModel.of(normal.coefficients, normal.band_ratio)
    then_ratio, now_ratio = normal.band_ratio, model.band_ratio
    most = (1 + min(then_ratio, WIDEST_BAND_RATIO)) * (1 + min(now_ratio, WIDEST_BAND_RATIO))
    ratios = []
    for size in normal.sizes:
        rows = model.rows.get(size, ())
        if len(rows) < ENOUGH_OF_A_SIZE:
            continue
        found = sorted(ns / max(1, then.predict_ns(item) or 1) for item, ns in rows)
        ratios.append(found[len(found) // 4])  # the model predicts lower quartiles
    if not ratios:
        return None
    ratios.sort()
    slower = sum(ratio > most for ratio in ratios)
    return Comparison(ratios[len(ratios) // 2], len(ratios), slower, normal)


def is_as_good(fresh: Normal, known: Normal, compared: Comparison | None) -> bool:
    """Whether `fresh` may take the place of `known`: never where it is slower, by however little,
    or a normal would creep away run by run."""
    return compared is not None and compared.ratio <= 1.0 and set(known.sizes) <= set(fresh.sizes)


def from_json(document: object) -> dict[Setting, Normal]:
    """Raises ValueError where it is not what `to_json` made."""
    _must(isinstance(document, Mapping))
    assert isinstance(document, Mapping)
    _must(document.get("version") == VERSION)
    entries = document.get("normals")
    _must(isinstance(entries, list) and len(entries) <= MOST_NORMALS)
    assert isinstance(entries, list)
    normals = {}
    for entry in entries:
        _must(isinstance(entry, Mapping) and isinstance(entry.get("setting"), Mapping))
        normals[_setting(entry["setting"])] = _normal(entry.get("normal"))
    return normals


def to_json(normals: Mapping[Setting, Normal]) -> dict[str, Any]:
    """The newest ones."""
    newest = sorted(normals.items(), key=lambda item: item[1].unix_ns)[-MOST_NORMALS:]
    entries = [{"setting": asdict(setting), "normal": asdict(normal)} for setting, normal in newest]
    return {"version": VERSION, "normals": entries}


def _setting(found: Mapping[str, Any]) -> Setting:
    texts = ("model", "engine", "arguments", "threads", "processor", "affinity")
    for name in texts:
        text = found.get(name)
        _must(isinstance(text, str) and len(text) <= MOST_CHARS)
    cores = found.get("cores")
    _must(type(cores) is int and 0 < cores < 1 << 20)
    return Setting(cores=int(cores or 0), **{name: found[name] for name in texts})


def _normal(found: object) -> Normal:
    _must(isinstance(found, Mapping))
    assert isinstance(found, Mapping)
    unix_ns, clean_steps = found.get("unix_ns"), found.get("clean_steps")
    band, sizes = found.get("band_ratio"), found.get("sizes")
    coefficients = found.get("coefficients")
    _must(type(unix_ns) is int and 0 <= unix_ns < 1 << 63)
    _must(type(clean_steps) is int and 0 <= clean_steps < MOST_STEPS)
    _must(_is_number(band, 1e6))
    _must(isinstance(coefficients, list) and len(coefficients) == COEFFICIENTS)
    _must(all(_is_number(each, 1e15) for each in coefficients or ()))
    _must(isinstance(sizes, list) and len(sizes) <= len(KNOTS) + 1)
    _must(all(type(size) is int and 0 <= size <= len(KNOTS) for size in sizes or ()))
    return Normal(
        int(unix_ns or 0),
        int(clean_steps or 0),
        float(band or 0.0),
        tuple(float(each) for each in coefficients or ()),
        tuple(sizes or ()),
    )


def _is_number(value: object, most: float) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= most  # type: ignore[arg-type,operator]


def _must(holds: object) -> None:
    if not holds:
        raise ValueError("no agent writes that")
