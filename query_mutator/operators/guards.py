"""Guards: checks that a rewrite must pass to replace the wording that it was made from.

A mutator may answer a question in place of rewriting it, lose a number or reply in another language. A rewrite that
fails a guard of its operator is not used: the wording stays as it is. Guards read texts alone, and where they cannot
tell a rewrite passes.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any

from query_mutator.reading.clauses import content
from query_mutator.reading.text import spelled
from query_mutator.reading.values import NUMERALS, ORDINALS, numbers_in

MAX_GROWTH = 4.0  # times the question's characters, for questions longer than SHORT_CHARS
SHORT_CHARS = 60
SHORT_NAME = 3  # letters of one, as EU, that has one spelling
MAX_NAMES = 40  # whose spellings are compared
CLOSE = 0.75  # similarity of a word and its spelling in a rewrite
MAX_SPELLINGS = 40  # words that are compared so
FOREIGN_SHARE = 0.5  # of the letters that a rewrite has more or fewer of beyond extended Latin
LAST_LATIN = 0x24F
FUNCTION_WORDS = 2  # of another language that make a text one of it


@dataclass(frozen=True)
class _Pair:
    """A wording, its rewrite, and further texts that the mutator was given."""

    question: str
    rewrite: str
    given: Sequence[str]

    @cached_property
    def known(self) -> str:
        """Return all that the mutator was given."""
        return " ".join((self.question, *self.given))

    @cached_property
    def plain(self) -> tuple[str, str]:
        """Return question and rewrite without filler, in lower case."""
        return without_filler(self.question), without_filler(self.rewrite)


def _squeezed(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


_WORD = re.compile(r"[^\W\d_]+")
_TABLES: dict[str, Any] = tomllib.loads(
    resources.files("query_mutator.operators").joinpath("meaning.toml").read_text(encoding="utf-8")
)


def words_in(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return [word.lower() for word in _WORD.findall(text)]


# --- a question stays a question -------------------------------------------------------------------------------------

#: Beginnings of a reply in place of a rewrite, and tags as prompts have them.
_REPLY = re.compile(
    r"\A\W*(?:(?:sure|certainly|of course|okay|yes|no|unfortunately|absolutely)[,!.:]|here(?:'s| is| are)\b"
    r"|i(?:'m| am) (?:sorry|unable|happy|glad|ready|not sure|here to|just an?|an? ai)\b|as an ai\b"
    r"|i (?:can't|cannot|apologi[sz]e)\b|i'd be (?:happy|glad)\b|to \w+ [^?]{20,}\byou (?:can|should|need)\b"
    r"|you (?:can|should|could|need to)\b|use `|the (?:answer|rewritten|corrected|revised)\b[^?]*(?:\bis\b|:))"
    r"|</?[a-z][a-z ]{2,20}>",
    re.IGNORECASE,
)
#: A subject of a few words and a verb that states something about it: "The capital of Kenya is", "Nairobi is".
_STATEMENT = re.compile(
    r"\A\W*(?:(?i:the|an?|this|that|these|those|its?|they|there|he|she)\b"
    r"(?: (?!(?:that|which|who)\b)[\w'’\"“”`().-]+){0,6}?"
    r"|[A-Z][\w'’-]*(?: [A-Z][\w'’-]*)*) (?:is|are|was|were|means|refers to|equals|asks|wants) "
)
_OPEN = (
    r"\b(?:how|what|why)(?:'?s|'re|'d)?\b"
    r"|(?:\A\W*|[.!?;:,]\s*|\b(?:and|or|but|so|please|pls|plz|hi|hey|hello)\s+)"
    r"(?:is|are|was|were|am|can|could|would|will|shall|should|may|might|must|do|does|did|has|have|had"
    r"|explain|describe|tell|show|give|list|name|find|write|compute|calculate|help|define|compare|translate|solve"
    r"|suggest|recommend|summari[sz]e)\b"
    r"|\b(?:i|we)(?:'d| would| really| just|'m| am)? (?:want|need|like|wish|wonder(?:ing)?|look(?:ing)?|try(?:ing)?)\b"
    r"|\b(?:is|are) there\b|\bany(?:one|body)? (?:way|idea|knows?)\b|\bneed(?:ed)? (?:to|an?|help)\b|\blooking for\b"
)
_ASKS_OPENLY = re.compile(rf"\?|\A\W*(?:which|who|whom|whose|when|where)\b|{_OPEN}", re.IGNORECASE)
_ASKS = re.compile(rf"\b(?:which|who|whom|whose|when|where)(?:'?s|'re|'d)?\b|{_OPEN}", re.IGNORECASE)


def _asks(text: str) -> bool:
    return "?" in text or _ASKS.search(text) is not None


def _states(text: str) -> bool:
    is_statement = text.rstrip().endswith(":") or _STATEMENT.search(text) is not None
    return is_statement and not _ASKS_OPENLY.search(text)


def _answers(pair: _Pair) -> bool:
    """Return whether the rewrite is a reply or a statement, and the question is not."""
    if _REPLY.search(pair.rewrite) and not _REPLY.search(pair.question):
        return True
    return _states(pair.rewrite) and not _states(pair.question)


def _asks_nothing(pair: _Pair) -> bool:
    """Return whether the question asks for something, and the rewrite does not and says mostly something else.

    "Delete a file" for "can I delete a file" says the same.
    """
    if not _ASKS.search(pair.question) or _asks(pair.rewrite):
        return False
    said = content(pair.rewrite)
    return 2 * len(said - content(pair.question)) > len(said)


# --- what a question names stays -------------------------------------------------------------------------------------

_QUOTED = re.compile(r"\"([^\"\n]{1,200})\"|“([^”\n]{1,200})”|`([^`\n]{1,200})`|(?<!\w)'([^'\n]{2,200})'(?!\w)")
_NAME = re.compile(r"(?<![.!?]\s)(?<!^)(?<![\w'])([A-Z][a-z]+[A-Z]\w*|[A-Z]{2,}\w*|[A-Z][a-z]{2,})\b")
#: Two alternatives that are one: "is it weird or weird".
_SAME = re.compile(r"\b(\w+)\W{1,3}or\W{1,3}\1\b", re.IGNORECASE)
_SHORTHAND = "idk imo imho fyi btw tbh omg lol asap ok okay pls thx lmao wtf hi hey pm am"
#: Flags, paths, calls, comparisons and the like.
_CODE = re.compile(
    r"(?<!\S)(?:--?[a-z]\S*|[~/]\S*\w/\S+|\S*(?:[_@\\{}\[\]|]|\w[+=]\w|::|=>|->)\S*|[=!<>]=+)(?!\S)", re.IGNORECASE
)
_IDENTIFIER = re.compile(r"\b\w+(?:[._]\w+)+\b|\b\w+\(\)")


def _lost_quote(pair: _Pair) -> bool:
    """Return whether quoted text of the question is missing, or one of two alternatives took the place of the other."""
    quoted = ["".join(groups).rstrip(".,;:!?") for groups in _QUOTED.findall(pair.question)]
    if any(_compact(text) not in _compact(pair.rewrite) for text in quoted):
        return True
    return _SAME.search(pair.rewrite) is not None and _SAME.search(pair.question) is None


def _lost_code(pair: _Pair) -> bool:
    """Return whether an identifier or another piece of code of the question is missing; "e.g" and "2.5" are none."""
    found = _IDENTIFIER.findall(pair.question)
    names = [name for name in found if any(len(part) > 1 and not part.isdigit() for part in re.split(r"[._()]", name))]
    code = [_compact(part.strip("\"'“”(),;:?!")) for part in _CODE.findall(pair.question)]
    kept = _squeezed(pair.rewrite)
    return any(_squeezed(name) not in kept for name in names) or any(
        part not in _compact(pair.rewrite) for part in code
    )


def _compact(text: str) -> str:
    return re.sub(r"[\s`'\"“”‘’]", "", text.casefold())


def _lacks_name(text: str, other: str) -> bool:
    """Return whether a capitalized word of a text is missing in another one, in any spelling."""
    names = [name for name in _NAME.findall(text) if name.lower() not in _SHORTHAND.split()]
    if len(names) > len(text.split()) / 2:  # A Title, OR ALL CAPITALS
        return False
    words, squeezed = list(dict.fromkeys(words_in(other))), _squeezed(other)
    return not all(
        name.lower() in words
        if len(name) <= SHORT_NAME
        else _squeezed(name) in squeezed or _has_spelling(name.lower(), words)
        for name in names[:MAX_NAMES]
    )


# --- numbers, marks and opposites, statements -----------------------------------------------------------------------

#: Digits that are words in chat: "how 2 sort", "4 a friend", "2day".
_CHAT = re.compile(
    r"\b1 2 3\b|\b(?:how|need|want|got|have|going|try|love|like) 2(?= [a-z])|\b[24](?=[a-z]{3})"
    r"|\b[24](?= (?:an?|the|my|me|us|u|ur|your?|it|them|this|that|some|any|be|get|do|go)\b)",
    re.IGNORECASE,
)


def has_more_numbers(text: str, other: str) -> bool:
    """Return whether a text has a number that another one lacks; "2day", "4 a friend" and "one should" have none.

    In questions about numerals, "58" and "fifty-eight" are two.
    """
    words, said, there = set(words_in(other)), _numbers(_CHAT.sub("", text)), _numbers(other)
    if _has(other.lower(), _TABLES["numerals"]):
        return not {value for value in said if not value[1]} <= there
    known = {value for value, _ in there} | {
        float(value) for value, names in _TABLES["may_stand_for"].items() if not words.isdisjoint(names.split())
    }
    return any(value not in known and (value, is_word) != (1, True) for value, is_word in said)


def _numbers(text: str) -> set[tuple[float, bool]]:
    """Return the numbers of a text, each with whether it is in words; "third" is 3."""
    ordinals = {(float(ORDINALS[word]), True) for word in words_in(text) if ORDINALS.get(word, 0) > 2}
    return ordinals | {(one.value, one.is_word) for one in numbers_in(spelled(text), words=True)}


_NUMBERS = "|".join(NUMERALS)
_UNITS, _OPPOSITES = _TABLES["units"].values(), _TABLES["opposites"]
_MARKS = {name: ("|".join(mark["strong"]), "|".join(mark["weak"])) for name, mark in _TABLES["marks"].items()}
_NOT, _NOT_OTHERWISE = _MARKS.pop("not")
_CLAUSE = re.compile(r"[.!?;:,\n]|\b(?:and|but|or|because|although|though|so|if|when|while|that|which|who)\b")


@cache  # compiled when they are needed: an import must not wait for a hundred of them
def _pattern(alternatives: str) -> re.Pattern[str]:
    number = rf"(?:(?<!\d)\d{{1,12}}(?:[.,]\d{{1,12}}){{0,3}}|an?(?= (?:dozen|hundred|thousand|million))|{_NUMBERS})"
    return re.compile(rf"(?<![a-z])(?:{alternatives})(?![a-z])".replace("N", number))


def _has(text: str, alternatives: str) -> bool:
    return _pattern(alternatives).search(text) is not None


def without_filler(text: str) -> str:
    """Return a text in lower case without the phrases that say nothing of what is asked."""
    return _pattern("|".join(_TABLES["filler"])).sub(" ", text.lower().replace("’", "'"))


def denies_more(text: str, other: str) -> bool:
    """Return whether more clauses of a text are negative than of another one, where "avoid" may be a negation."""
    counts = [sum(_has(clause, _NOT) for clause in _CLAUSE.split(one)) for one in (text, other)]
    return counts[0] > counts[1] + len(_pattern(_NOT_OTHERWISE).findall(other))


def has_more_marks(text: str, other: str) -> bool:
    """Return whether a text has a mark, as "only" or "at least", that another one has not."""
    return any(_has(text, strong) and not _has(other, f"{strong}|{weak}") for strong, weak in _MARKS.values())


def is_turned(question: str, rewrite: str) -> bool:
    """Return whether the rewrite lost a unit, or has the opposite of a word of the question in its place."""
    return any(_has(question, unit) and not _has(rewrite, unit) for unit in _UNITS) or any(
        _has(question, one) and _has(rewrite, other) and not _has(rewrite, one) and not _has(question, other)
        for pair in _OPPOSITES
        for one, other in (pair, pair[::-1])
    )


_SENTENCE = re.compile(
    rf"[.!?;:]+(?=\s|\Z)|\n+|,\s+(?=(?:but |so |and )?(?:{_TABLES['asks']})\b)"
    r"|\s(?=(?:if|unless|because|although|assuming)\b)|\s(?:when|while)\s"
)
_BEGINS_ASKING = re.compile(
    rf"\W*(?:(?:but|so|and|hi|hey|hello|please|pls|plz) )*(?:{_TABLES['asks']})\b|.*\b(?:what|how|why)\b"
)
_SAYS_NOTHING = frozenset(_TABLES["little"].split())


def lost_statement(question: str, rewrite: str) -> bool:
    """Return whether the rewrite has fewer statements than the question, and most words of one of them are gone.

    What the asker heard, read or was told is no condition.
    """
    stated, words = list(_statements(question)), words_in(rewrite)
    if len(stated) <= len(list(_statements(rewrite))):
        return False
    return any(2 * sum(_has_spelling(word, words) for word in one) <= len(one) for one in stated)


def _has_spelling(word: str, words: Sequence[str]) -> bool:
    """Return whether a word, or a similar one, is among the first of some."""
    return bool(difflib.get_close_matches(word, words[:MAX_SPELLINGS], n=1, cutoff=CLOSE))


def _statements(text: str) -> Iterator[list[str]]:
    """Yield the stems of the words that say something of each sentence that does not ask."""
    for sentence in _SENTENCE.split(text):
        said = [word for word in words_in(sentence) if word not in _SAYS_NOTHING and len(word) > 1]
        if said and not _BEGINS_ASKING.match(sentence) and not _has(sentence, "|".join(_TABLES["backstory"])):
            yield said


# --- language and length ---------------------------------------------------------------------------------------------

#: Frequent words of some languages.
LANGUAGES: Mapping[str, frozenset[str]] = {
    name: frozenset(words.split())
    for name, words in {
        "en": "the and of how what which is are with from this that can does my your when where",
        "de": "der und ist wie ich ein eine einen das nicht mit für auf den dem von kann zu sich welche",
        "fr": "le les et est comment je une des pour dans avec pas du qui sur au vous quel quelle",
        "es": "el los las y es cómo una para con qué por del puedo cuál está cual",
        "it": "il gli è sono una con che della nel di posso quale questo",
        "pt": "os é um uma para com como não dos posso qual você",
        "nl": "het een van hoe ik en niet op dat met voor zijn kan welke deze",
    }.items()
}


def _other_language(pair: _Pair) -> bool:
    """Return whether the rewrite is in another script than the question, or another of these languages."""
    if abs(_foreign_share(pair.question) - _foreign_share(pair.rewrite)) > FOREIGN_SHARE:
        return True
    asked, written = set(words_in(pair.question)), set(words_in(pair.rewrite))
    language = max(LANGUAGES.values(), key=lambda frequent: len(frequent & asked))
    if len(language & asked) < FUNCTION_WORDS or language & written:
        return False
    return any(len(frequent & written) >= FUNCTION_WORDS for frequent in LANGUAGES.values())


def _foreign_share(text: str) -> float:
    letters = [letter for letter in text if letter.isalpha()]
    return sum(ord(letter) > LAST_LATIN for letter in letters) / max(1, len(letters))


def _too_long(pair: _Pair) -> bool:
    """Return whether the rewrite is far longer than what the mutator was given."""
    return len(pair.rewrite) > MAX_GROWTH * max(SHORT_CHARS, *map(len, (pair.question, *pair.given)))


_CHECKS: Mapping[str, Callable[[_Pair], bool]] = {
    "answer": _answers,
    "question": _asks_nothing,
    "numbers": lambda pair: has_more_numbers(pair.question, pair.rewrite),
    "new_numbers": lambda pair: has_more_numbers(pair.rewrite, pair.known),
    "quotes": _lost_quote,
    "code": _lost_code,
    "names": lambda pair: _lacks_name(pair.question, pair.rewrite),
    "new_names": lambda pair: _lacks_name(pair.rewrite, pair.known),
    "negations": lambda pair: any(map(denies_more, pair.plain, pair.plain[::-1])),
    "constraints": lambda pair: is_turned(*pair.plain) or any(map(has_more_marks, pair.plain, pair.plain[::-1])),
    "statements": lambda pair: lost_statement(*pair.plain),
    "language": _other_language,
    "length": _too_long,
}
#: All guards, in the order in which they are checked.
GUARDS = tuple(_CHECKS)


def failed_guard(guards: Sequence[str], question: str, rewrite: str, *, given: Sequence[str] = ()) -> str | None:
    """Return the first of `guards` that a rewrite of `question` fails, None if it passes.

    `given` are further texts that the mutator saw: a rewrite may have their numbers, and be as long as they are.
    """
    if rewrite == question:
        return None
    pair = _Pair(question, rewrite, given)
    return next((name for name in GUARDS if name in guards and _CHECKS[name](pair)), None)
