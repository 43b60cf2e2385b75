"""A closed table of units with dimension and factor, and a reader of products such as ``kg m^2 s^-2`` or ``km/h``.

Symbols are case-sensitive (``mW`` is not ``MW``), spelled names are not. Left out on purpose because a bare symbol
would be ambiguous: ``pm`` (picometre or afternoon), bytes (1000 or 1024), ton, calorie, horsepower, and
the volume of a gallon.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

Dimension = tuple[tuple[str, int], ...]

_PREFIXES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "c": 1e-2, "d": 1e-1, "h": 1e2, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_PREFIX_NAMES = {"n": "nano", "u": "micro", "m": "milli", "c": "centi", "d": "deci", "h": "hecto", "k": "kilo"} | {
    "M": "mega",
    "G": "giga",
    "T": "tera",
}

# symbol | other spellings | prefixes | factor | dimension in base symbols
_TABLE = """
m | metre meter | n u m c d k | 1 | m
g | gram gramme | n u m k | 1e-3 | kg
s | sec secs second | n u m | 1 | s
A | amp ampere | n u m k | 1 | A
K | kelvin | m | 1 | K
mol | mole | n u m k | 1 | mol
cd | candela | | 1 | cd
rad | radian | m | 1 | rad
N | newton | u m k M | 1 | kg m s-2
J | joule | u m k M G | 1 | kg m2 s-2
W | watt | u m k M G T | 1 | kg m2 s-3
Pa | pascal | m h k M G | 1 | kg m-1 s-2
Hz | hertz | m k M G T | 1 | s-1
C | coulomb | n u m | 1 | A s
V | volt | n u m k M | 1 | kg m2 s-3 A-1
F | farad | n u m | 1 | A2 s4 kg-1 m-2
Ω | ohm | u m k M G | 1 | kg m2 s-3 A-2
S | siemens | u m | 1 | kg-1 m-2 s3 A2
Wb | weber | u m | 1 | kg m2 s-2 A-1
T | tesla | n u m | 1 | kg s-2 A-1
H | henry | n u m | 1 | kg m2 s-2 A-2
L | l litre liter | u m c d h | 1e-3 | m3
cc | | | 1e-6 | m3
M | molar | u m n | 1e3 | mol m-3
t | tonne | | 1e3 | kg
u | amu | | 1.66053907e-27 | kg
Da | dalton | k | 1.66053907e-27 | kg
eV | electronvolt | m k M G T | 1.602176634e-19 | kg m2 s-2
cal | | k | 4.184 | kg m2 s-2
Wh | watthour | k M G | 3600 | kg m2 s-2
min | mins minute | | 60 | s
h | hr hrs hour | | 3600 | s
d | day | | 86400 | s
week | wk wks | | 604800 | s
month | | | 1 | month
yr | yrs year | | 12 | month
Å | angstrom ångström | | 1e-10 | m
in | inch inches | | 0.0254 | m
ft | foot feet | | 0.3048 | m
yd | yds yard | | 0.9144 | m
mi | mile | | 1609.344 | m
ha | hectare | | 1e4 | m2
acre | | | 4046.8564224 | m2
lb | lbs pound | | 0.45359237 | kg
oz | ounce | | 0.028349523125 | kg
gal | gallon | | 1 | gallon
atm | atmosphere | | 101325 | kg m-1 s-2
bar | bars | m k | 1e5 | kg m-1 s-2
mmHg | | | 133.32236842105263 | kg m-1 s-2
torr | Torr | | 133.32236842105263 | kg m-1 s-2
psi | | | 6894.757293168 | kg m-1 s-2
mph | | | 0.44704 | m s-1
kph | kmh kmph | | 0.2777777777777778 | m s-1
knot | kn kt | | 0.5144444444444445 | m s-1
° | deg degs degree | | deg | rad
rev | revolution | | turn | rad
rpm | RPM | | rpm | rad s-1
dB | decibel | | 1 | dB
Bq | becquerel | k M G | 1 | s-1
lm | lumen | | 1 | lm
lx | lux | | 1 | lx
$ | USD US$ dollar | | 1 | usd
¢ | cent | | 0.01 | usd
€ | EUR euro | | 1 | eur
£ | GBP | | 1 | gbp
¥ | JPY yen | | 1 | yen
RMB | CNY yuan | | 1 | yuan
₹ | Rs INR rupee | | 1 | inr
°C | celsius centigrade degC | | 1 | K
°F | fahrenheit degF | | f | K
"""
_ANGLES = {"deg": math.pi / 180, "turn": 2 * math.pi, "rpm": 2 * math.pi / 60, "f": 5 / 9}
_OFFSETS = {"°C": 273.15, "°F": 273.15 - 32 * 5 / 9}
_ALIASES = {
    "Nm": "N m", "Kg": "kg", "KG": "kg", "Km": "km", "KM": "km", "CM": "cm", "MM": "mm", "ML": "mL", "KHz": "kHz",
    "KW": "kW", "kwh": "kWh", "KWh": "kWh", "hz": "Hz", "pa": "Pa", "kj": "kJ", "KJ": "kJ", "kpa": "kPa", "KPa": "kPa",
    "ev": "eV", "rps": "rev s^-1",
}  # fmt: skip
_GENERIC = re.compile(
    r"(?:(?:sq(?:uare)?\.?|cubic)\s+)?units?(?:\s+squared|\s+cubed)?(?:\s*\^?\s*[23])?", re.IGNORECASE
)
_PHRASES = (
    (re.compile(r"\b(?:degrees?|deg\.?)\s*(?:celsius|centigrade|C)\b|°\s*(?:C\b|celsius\b)", re.I), "°C"),
    (re.compile(r"\b(?:degrees?|deg\.?)\s*(?:fahrenheit|F)\b|°\s*(?:F\b|fahrenheit\b)", re.I), "°F"),
    (re.compile(r"\bsq(?:uare)?\.?\s+([A-Za-z]+)", re.I), r"\1^2"),
    (re.compile(r"\b(?:cubic|cu\.?)\s+([A-Za-z]+)", re.I), r"\1^3"),
    (re.compile(r"\b([A-Za-z]+)\s+squared\b", re.I), r"\1^2"),
    (re.compile(r"\b([A-Za-z]+)\s+cubed\b", re.I), r"\1^3"),
    (re.compile(r"\s+per\s+", re.I), "/"),
    (re.compile(r"\bmu\s*(?=[A-Za-zΩ])"), "u"),
    (re.compile(r"(?<![A-Za-z])ms\s*\^\s*\(?-([12])\)?"), r"m s^-\1"),
)
_UNIT_ASKED = re.compile(r"(?:\bin|\bhow many|\bunits?:|[(\[])\s*(?=([A-Za-z°Ω/^*0-9 ]{1,40}))", re.IGNORECASE)
_TOKEN = re.compile(
    r"\s*(?:(?P<op>[*/.()-])|(?P<name>US\$|[$¢€£¥₹]|°[CF]?|[A-Za-zΩÅåö]+)(?:\s*\^\s*\(?(?P<power>[+-]?[0-9])\)?|(?P<plain>[23])(?![0-9]))?)"
)


@dataclass(frozen=True, slots=True)
class Unit:
    """``value * factor + offset`` is the value in base units. ``kelvin`` has offset 0, ``°C`` 273.15."""

    factor: float
    dimension: Dimension
    offset: float = 0.0
    temperature: bool = False

    @property
    def is_currency(self) -> bool:
        return self.dimension in _CURRENCIES

    def convert(self, value: float, target: Unit) -> float:
        """``value`` of this unit expressed in ``target`` (same dimension)."""
        return (value * self.factor + self.offset - target.offset) / target.factor


def _dimension(text: str) -> dict[str, int]:
    parts = (re.fullmatch(r"([a-zA-Z]+)(-?\d)?", p) for p in text.split())
    return {m[1]: int(m[2] or 1) for m in parts if m}


def _freeze(powers: dict[str, int]) -> Dimension:
    return tuple(sorted((base, power) for base, power in powers.items() if power))


def _build() -> tuple[dict[str, Unit], dict[str, Unit]]:
    symbols: dict[str, Unit] = {}
    names: dict[str, Unit] = {}
    for line in _TABLE.strip().splitlines():
        symbol, others, prefixes, factor, dimension = (part.strip() for part in line.split("|"))
        scale = _ANGLES.get(factor) or float(factor)
        base = _freeze(_dimension(dimension))
        unit = Unit(scale, base, _OFFSETS.get(symbol, 0.0), base == (("K", 1),))
        symbols[symbol] = unit
        for prefix in ["", *prefixes.split()]:
            scaled = Unit(scale * _PREFIXES[prefix], base) if prefix else unit
            symbols[prefix + symbol] = scaled
            for other in others.split():
                if len(other) < 3 or other.isupper():
                    symbols[prefix + other] = scaled
                    continue
                name = (_PREFIX_NAMES[prefix] + other if prefix else other).lower()
                names[name] = names[f"{name}s"] = scaled
    for symbol in ("week", "month", "acre", "knot", "bar", "rev"):
        names[symbol] = names[f"{symbol}s"] = symbols[symbol]
    return symbols, names


_SYMBOLS, _NAMES = _build()
_CURRENCIES = frozenset(_freeze({name: 1}) for name in ("usd", "eur", "gbp", "yen", "yuan", "inr"))


def is_generic(text: str) -> bool:
    """``units``, ``square units`` and the like, which say nothing."""
    return _GENERIC.fullmatch(text) is not None


@lru_cache(maxsize=4096)
def parse_unit(text: str) -> Unit | None:
    """The unit that ``text`` is completely, or None. ``parse_unit("km/h").factor`` is 0.2777..."""
    if not text or len(text) > 60 or re.fullmatch(r"[ap]\.?\s*m\.?", text, re.IGNORECASE):
        return None
    for pattern, replacement in _PHRASES:
        text = pattern.sub(replacement, text)
    for alias, spelling in _ALIASES.items():
        text = re.sub(rf"(?<![A-Za-z]){alias}(?![A-Za-z])", spelling, text)
    return _product(text.strip())


def _product(text: str) -> Unit | None:
    factors = _factors(text)
    if not factors:
        return None
    units = [(lookup(name), power) for name, power in factors]
    total, powers = 1.0, dict[str, int]()
    for unit, power in units:
        if unit is None:
            return None
        total *= unit.factor**power
        for base, exponent in unit.dimension:
            powers[base] = powers.get(base, 0) + exponent * power
    return units[0][0] if len(units) == 1 and units[0][1] == 1 else Unit(total, _freeze(powers))


def _factors(text: str) -> list[tuple[str, int]] | None:
    """Names with signed powers; a slash inverts the next name, or all names of the parenthesis behind it."""
    if text.count("(") != text.count(")") or re.search(r"[*/.(-]\s*$", text):
        return None
    factors: list[tuple[str, int]] = []
    sign, group, position = 1, 1, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or not (factors or match["name"]):
            return None
        position = match.end()
        if match["name"]:
            factors.append((match["name"], sign * int(match["power"] or match["plain"] or 1)))
            sign = group
        elif match["op"] in "()":
            group = sign if match["op"] == "(" else 1
            sign = group
        else:
            sign = -group if match["op"] == "/" else group
    return factors


def lookup(name: str) -> Unit | None:
    """One unit by symbol (case-sensitive) or spelled name (any case)."""
    return _SYMBOLS.get(name) or _NAMES.get(name.lower())


def units_of(dimension: Dimension) -> list[Unit]:
    """Every single unit of the table with this dimension."""
    return [unit for unit in _SYMBOLS.values() if unit.dimension == dimension]


def unit_asked_for(question: str, dimension: Dimension) -> Unit | None:
    """The one unit of this dimension that the question names as the unit of its answer, else None."""
    found: set[Unit] = set()
    for match in _UNIT_ASKED.finditer(question):
        words = match[1].split()
        for length in (3, 2, 1):
            unit = parse_unit(" ".join(words[:length])) if len(words) >= length else None
            if unit is not None:
                if unit.dimension == dimension:
                    found.add(unit)
                break
    return found.pop() if len(found) == 1 else None
