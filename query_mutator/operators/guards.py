"""Guards: checks that a rewrite must pass to replace the wording that it was made from.

A mutator may answer a question in place of rewriting it, lose a number or reply in another language. A rewrite that
fails a guard of its operator is not used: the wording stays as it is. Guards read texts alone, and where they cannot
tell a rewrite passes.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from query_mutator.operators import meaning

MAX_GROWTH = 4.0  # times the question's characters, for questions longer than SHORT_CHARS
SHORT_CHARS = 60
SHORT_NAME = 3  # letters of one, as EU, that has one spelling
MAX_NAMES = 40  # whose spellings are compared
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
        return meaning.without_filler(self.question), meaning.without_filler(self.rewrite)

    @cached_property
    def kept(self) -> str:
        """Return the letters and digits of the rewrite in lower case."""
        return _squeezed(self.rewrite)

    def lost(self, parts: Sequence[str]) -> Iterator[str]:
        """Yield the parts that are not in the rewrite."""
        return (part for part in parts if _squeezed(part) not in self.kept)


def _squeezed(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


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
_WORD = re.compile(r"[^\W\d_]+")
#: Words that say nothing of what a question is about.
_LITTLE = """
    a an the this that these those it its they there he she we i you your my me in on at of for to with by from as if
    and or but not is are was were be been has have had do does did can will would
"""


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
    said = set(meaning.words_in(pair.rewrite)) - set(_LITTLE.split())
    return 2 * len(said - set(meaning.words_in(pair.question))) > len(said)


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
    return any(pair.lost(names)) or any(part not in _compact(pair.rewrite) for part in code)


def _compact(text: str) -> str:
    return re.sub(r"[\s`'\"“”‘’]", "", text.casefold())


def _lacks_name(text: str, other: str) -> bool:
    """Return whether a capitalized word of a text is missing in another one, in any spelling."""
    names = [name for name in _NAME.findall(text) if name.lower() not in _SHORTHAND.split()]
    if len(names) > len(text.split()) / 2:  # A Title, OR ALL CAPITALS
        return False
    words, squeezed = list(dict.fromkeys(meaning.words_in(other))), _squeezed(other)
    for name in itertools.islice(names, MAX_NAMES):
        if len(name) <= SHORT_NAME:
            is_there = name.lower() in words
        else:
            is_close = difflib.get_close_matches(name.lower(), words, n=1, cutoff=meaning.CLOSE)
            is_there = _squeezed(name) in squeezed or bool(is_close)
        if not is_there:
            return True
    return False


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
    asked, written = set(meaning.words_in(pair.question)), set(meaning.words_in(pair.rewrite))
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
    "numbers": lambda pair: meaning.has_more_numbers(pair.question, pair.rewrite),
    "new_numbers": lambda pair: meaning.has_more_numbers(pair.rewrite, pair.known),
    "quotes": _lost_quote,
    "code": _lost_code,
    "names": lambda pair: _lacks_name(pair.question, pair.rewrite),
    "new_names": lambda pair: _lacks_name(pair.rewrite, pair.known),
    "negations": lambda pair: any(map(meaning.denies_more, pair.plain, pair.plain[::-1])),
    "constraints": lambda pair: (
        meaning.is_turned(*pair.plain) or any(map(meaning.has_more_marks, pair.plain, pair.plain[::-1]))
    ),
    "statements": lambda pair: meaning.lost_statement(*pair.plain),
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
