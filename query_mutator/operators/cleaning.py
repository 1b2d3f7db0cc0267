"""Cleaning of English questions by rules: chat shorthand, spelling, courtesy, back-story, capitals and question mark.

Each function returns a text that it does not change again, never an empty one; text that is not ordinary English, or
that has code in it, stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, lru_cache, wraps

from query_mutator.operators.english import chat_words, is_english, like, lines_of, pieces, sentences
from query_mutator.operators.typos import speller

REMEMBERED = 4_096  # texts, for each function
MAX_PASSES = 16
MIN_WORDS = 4  # of a question that may stand alone
MAX_FORMULA_WORDS = 16  # of a sentence that is a formula of courtesy

Rewrite = Callable[[str], str]


def _of_english(rewrite: Rewrite) -> Rewrite:
    """Apply a rewrite to ordinary English until it changes nothing; a result without a word is not used.

    A text that it goes on changing after MAX_PASSES stays as it came.
    """

    @lru_cache(maxsize=REMEMBERED)
    @wraps(rewrite)
    def repeated(text: str) -> str:
        last = rewritten = text
        for _ in range(MAX_PASSES):
            if not (is_english(rewritten) and (rewritten := rewrite(last)) != last and re.search(r"\w", rewritten)):
                return last
            last = rewritten
        return text

    return repeated


# --- chat shorthand --------------------------------------------------------------------------------------------------

_LETTERS = {"u", "r", "n"}  # also names of letters and variables
_NAMES_A_LETTER = (
    "letter letters vowel variable integer number numbers value values a an the after before between of many"
)
_NO_AND = (
    "let if for in from to is are where with when and or "
    "every some each any no first last be of equals times plus minus"
)
_FOLLOWS_ARE = re.compile(r"in|on|at|how|what|the|there|you|u|we|they|not|\w{2,}(?:ed|ing)")
_QUESTION_WORDS = "how what where who why when which u you they we these those there whats"
#: Said in chat before or after a question, and no part of it.
_INTERJECTION = (
    r"(?:lol|lmao|lmfao|rofl|haha+|hehe+|xd|omg|smh|ngl|tbh|imo|imho|btw|idk|afaik|fyi|fr|bro|bruh|dude|yo|though|kk)"
)
_EDGES = re.compile(
    rf"\A(?:{_INTERJECTION}\b[\s,.!]+)+|(?<![\s,])(?:[\s,]+{_INTERJECTION})+(?P<end>[.!?]*)\s*\Z"
    r"|(?<!\s)\s*(?:[:;]-?[)(DP]|<3|\^\^)+\s*\Z"
)
_NO_SUM = r"\b(?! *[\d+*/x=%-])"
_SOUNDS = (
    (re.compile(rf"\b(how|wants?|needs?|going|got|trying|belongs?|listen|according) 2{_NO_SUM}"), r"\1 to"),
    (re.compile(r"\b((?:convert|change|translate|turn) [^.?!]*[A-Za-z]) 2 (?=[A-Za-z])"), r"\1 to "),
    (re.compile(rf"\b(stands?|looks?|looking|waits?|waiting|asks?|asking|pays?|search) 4{_NO_SUM}"), r"\1 for"),
)


@_of_english
def shorthand(text: str) -> str:
    """Return the text with chat shorthand spelled out, without interjections around it."""
    text = _EDGES.sub(lambda match: match["end"] or "", text)
    for pattern, replacement in _SOUNDS:
        text = pattern.sub(replacement, text)
    parts = pieces(text)
    words = [at for at, part in enumerate(parts) if not part.isspace()]
    for nth, at in enumerate(words):
        around = (parts[words[nth - 1]] if nth else "", parts[words[nth + 1]] if nth + 1 < len(words) else "")
        parts[at] = _spelled_out(parts[at], *around)
    return "".join(parts)


def _spelled_out(piece: str, before: str, after: str) -> str:
    marks = piece[len(piece.rstrip(".,;:!?)")) :]
    word = piece.removesuffix(marks)
    meant = chat_words().get(word.lower().replace("’", "'"))
    may_be_a_name = not word.islower() and (before or word != word.capitalize() or word.lower() in _LETTERS)
    if meant is None or may_be_a_name:
        return piece
    if word in _LETTERS and not _is_chat(word, before.lower(), after.lower(), bool(marks)):
        return piece
    return like(word, meant) + marks


def _is_chat(letter: str, before: str, after: str, ends: bool) -> bool:
    """Return whether a single letter stands for a word, not for itself."""
    if letter == "n":
        after = after.rstrip(".,?!").replace("-", "")
        is_between = before.replace("-", "").isalpha() and after.isalpha() and min(len(before), len(after)) > 1
        is_between = is_between or (before.isdecimal() and after.isdecimal())
        return is_between and not ends and {before, after}.isdisjoint(f"{_NAMES_A_LETTER} {_NO_AND}".split())
    if letter == "r":
        is_verb = before in _QUESTION_WORDS.split() or (before.isalpha() and _FOLLOWS_ARE.fullmatch(after) is not None)
        return is_verb and not ends and before not in _NAMES_A_LETTER.split()
    return (
        before not in _NAMES_A_LETTER.split() and after not in ("+", "-", "=", "*", "/") and not before[-1:].isdigit()
    )


# --- spelling --------------------------------------------------------------------------------------------------------


@_of_english
def typos(text: str) -> str:
    """Return the text with misspelt words corrected."""
    return speller()(text)


# --- courtesy --------------------------------------------------------------------------------------------------------

_WHO = r"(?:there|all|everyone|everybody|folks|guys|friends?|again|team|sir|madam)"
_GREETING = (
    r"(?:(?:hi|hello|hey|hiya|howdy|greetings|good (?:morning|afternoon|evening|day))"
    rf"(?: {_WHO})*|dear {_WHO}(?: or {_WHO})?)"
)
_THANKS = (
    r"(?:(?:many |kind |a big )?(?:thanks|thank you|cheers)(?: (?:so much|very much|a lot|again|in advance|kindly))*)"
)
_REQUEST = (
    r"(?:name|give|state|list|convert|add|subtract|multiply|divide|translate|spell|write|calculate|compute|find|complete"
    r"|choose|solve|define|describe|explain|identify|simplify|evaluate|count|sort|compare|say|show)"
)
_OPENS = (
    r"(?:so|ok|but|and|can|could|what|who|which|where|when|how|why|please|is|are|do|does|(?:in|on|at|to|of) which"
    rf"|{_REQUEST})"
)
_LEAD = re.compile(
    rf"\A(?:{_GREETING}(?:\s*[,!.:]\s*|\s+[–—-]\s+|\s+(?={_OPENS}\b))"
    rf"|(?:so|ok|okay|well|now|anyway|but|and|alright|right)(?:\s*,\s*|\s+(?={_OPENS}\b))"
    r"|(?:ok|okay|yeah|yes|hey|hi) (?:but|so) (?=\S+ \S)"
    rf"|(?:sorry|excuse me|pardon me)(?: [^,.?]*)?,\s*(?:but )?(?={_OPENS}\b)"
    r"|(?:um+|uh+|erm|please|kindly)\b[\s,]+(?=\S+ \S))",
    re.IGNORECASE,
)
_IF_YOU_CAN = r"(?:if (?:you don't mind|at all possible|possible|you can|you could)|by any chance)"
#: Words after which thanks and "please" are spoken of.
_BEFORE_SPOKEN = "say write word of mean spell for to and or"
_SPOKEN_OF = "".join(rf"(?<!\b{word})" for word in _BEFORE_SPOKEN.split())
_END = re.compile(
    rf"{_SPOKEN_OF}(?<![,\s–—-])(?:[,\s–—-]+(?:{_THANKS}|please|{_IF_YOU_CAN}))+\s*(?=[.!?]*\Z)", re.IGNORECASE
)
_SOMEBODY = r"(?:anyone|anybody|someone|somebody)(?: here)?"
_TELL = r"(?:please |kindly )?(?:tell|explain to|inform|remind) (?:me|us)(?: please)?"
_GLAD = r"(?:be|appreciate it)(?: very)?(?: grateful| glad| happy| thankful)?"
_ASKS_FOR = re.compile(
    rf"\A(?:(?:can|could|would|will) (?:you|{_SOMEBODY})(?: please| kindly| maybe| perhaps)* {_TELL}"
    rf"|{_TELL}|(?:do you|does {_SOMEBODY})(?: happen to)? know"
    r"|(?:i|we)(?:'d| would) (?:really )?(?:like|love) to know|(?:i|we) (?:want|need|wish) to know"
    rf"|(?:i am|i'm|i was|we were|just) (?:just )?wondering(?: if you (?:can|could) {_TELL})?"
    rf"|i(?:'d| would) {_GLAD} if you (?:can|could|would) {_TELL})[,:]?\s+",
    re.IGNORECASE,
)
_WH = r"(?:what|which|who|whom|whose|where|when|why|how)(?:'s)?"
_ORDERS = re.compile(rf"{_REQUEST}\b", re.IGNORECASE)
#: Behind the first word of a formula: then it asks for something too.
_ASKS_INSIDE = re.compile(
    rf"(?<=\s)(?:what|which|who|whose|where|when|why|how (?!are you)|{_REQUEST}\b)", re.IGNORECASE
)
_BE = r"(?:is|are|was|were)"
_AUX = rf"(?:{_BE}|do|does|did|can|could|will|would|should|has|have|had|may|might|must)"
_DIRECT = re.compile(
    rf"(?:{_WH}\s+{_AUX}|(?:what|which|whose|how) \w+ {_AUX}|what's|who's|where's|{_AUX})\b", re.IGNORECASE
)
_SUBJECT = re.compile(
    r"(?:which|whose|what) \w+ (?!is\b|are\b|was\b|were\b)\w+s\b|who \w+s\b|how (?:many|much)\b", re.IGNORECASE
)
_INDIRECT = re.compile(
    rf"(?P<wh>what|who|where|when) (?P<subject>(?:the|an?|this|that|[A-Z\d]).*) (?P<be>{_BE})(?P<end>[.?!]*)",
    re.IGNORECASE,
)


#: Lines of a list: all of them may be what is asked about.
_LIST = re.compile(r"^\s*(?:\d+[.)]|[-*•]) ", re.MULTILINE)


@cache
def _formulas() -> re.Pattern[str]:
    text = "|".join(lines_of("formulas.txt")).replace("<greeting>", _GREETING).replace("<thanks>", _THANKS)
    return re.compile(text, re.IGNORECASE)


@_of_english
def courtesy(text: str) -> str:
    """Return the text without greetings, thanks, apologies and the politeness around a question."""
    found = _sentences(text)
    if _LIST.search(text):
        return text
    kept = [part for part in found if not _is_formula(part)]
    short = "".join(map(_without_courtesy, kept if any(map(_is_asking, kept)) else found))
    return text if short == text else short.strip()


def _sentences(text: str) -> list[str]:
    """Return the sentences of a text, each with the spaces behind it; joining them gives the text."""
    found, at = list[str](), 0
    for sentence in sentences(text)[1:]:
        start = text.find(sentence, at + 1)
        if start > 0:  # of a sentence whose spaces were changed, stay with the one before
            found.append(text[at:start])
            at = start
    return [*found, text[at:]]


def _is_formula(sentence: str) -> bool:
    bare = sentence.strip(" \n.,!?:;…-–—")
    is_one = _formulas().fullmatch(bare) is not None and len(bare.split()) <= MAX_FORMULA_WORDS
    return is_one and not _has_facts(bare) and not _ASKS_INSIDE.search(bare)


def _without_courtesy(part: str) -> str:
    sentence = part.rstrip()
    space = part[len(sentence) :]
    short = _END.sub("", sentence)
    while (next_one := _LEAD.sub("", short)) != short:
        short = next_one
    asked = _ASKS_FOR.match(short)
    if asked and (direct := _direct(short[asked.end() :])):
        short = direct
    if short == sentence or len(short.split()) < 2:
        return part
    return (short[:1].upper() + short[1:] if sentence[:1].isupper() else short) + space


def _direct(question: str) -> str | None:
    """Return an embedded question as a direct one ("what the capital is" inverted), None where that is not sure."""
    mark = "?" if question.rstrip()[-1:] not in ("?", ".", "!") else ""
    if _DIRECT.match(question) or _SUBJECT.match(question):
        return re.sub(r"\.\Z", "?", question.rstrip()) + mark
    if found := _INDIRECT.fullmatch(question.rstrip()):
        return f"{found['wh']} {found['be']} {found['subject']}?"
    return None


# --- back-story ------------------------------------------------------------------------------------------------------

_NUMBER_WORD = (
    r"zero|one(?!s| of them)|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|thirty|forty"
    r"|fifty|sixty|seventy|eighty|ninety|hundred|thousand|[mb]illion|half|third|quarter|dozens?|twice|double|percent"
    r"|pairs?|couple"
)
#: Numbers, quotes, and capitalized words other than the first and "I".
_FACTS = re.compile(rf"\d|[\"“”`%$€£=:<>]|(?<=\s)(?!I\b)[A-Z]\w*|\b(?i:{_NUMBER_WORD})\b")
_SPEAKER = re.compile(r"\b(?:i|i'm|i've|i'd|i'll|me|my|mine|myself|we|we're|we've|we'd|us|our|ours)\b", re.IGNORECASE)
#: What makes a question need what was said before: words that point back, or the speaker as a part of it.
_POINTS_BACK = re.compile(
    r"\b(?:it|its|they|them|their|theirs|he|him|his|she|hers?|this|these|those|such|then|same|others?|another|above"
    r"|that(?= (?:\w+ )?(?:is|was|has|have|does|do)\b|[?.])|there(?! (?:is|are|were|was|in)\b)|here|following|below"
    r"|former|latter|each|both|left|remain(?:s|ing)?|altogether|total|now|next|instead|also|else|again|so|i|me|my|mine"
    r"|we|us|our|ours|someone|somebody|either|neither|the (?:two|three|four|five|six))\b",
    re.IGNORECASE,
)
_CONTENT = re.compile(r"[a-z]{4,}")
_LITTLE = """
    what which where when whose with from that this have does into they them their there been were will would about
    name could should give tell many much long like some just know asked question answer your you're
"""


@_of_english
def core(text: str) -> str:
    """Return the sentences that ask, and all others that may matter to them: only back-story is dropped.

    A sentence is back-story if it is about the speaker and names nothing: no number, quote, name, or word of the
    question. Where the question points back ("it", "my", "left", "in total"), every sentence stays.
    """
    found = _sentences(text)
    asking = [sentence for sentence in found if _is_asking(sentence)]
    needs_context = any(len(one.split()) < MIN_WORDS or _POINTS_BACK.search(one) for one in asking)
    if not asking or needs_context or len(asking) == len(found) or _LIST.search(text):
        return text
    words = _content(" ".join(asking))
    kept = [sentence for sentence in found if sentence in asking or not _is_story(sentence, words)]
    return text if kept == found else "".join(kept).strip()


def _is_asking(sentence: str) -> bool:
    if sentence.rstrip(" \n\"')").endswith("?"):
        return True
    return _ORDERS.match(sentence) is not None or re.match(rf"{_WH}\b.* ", sentence, re.IGNORECASE) is not None


def _is_story(sentence: str, asked: set[str]) -> bool:
    if _has_facts(sentence) or _content(sentence) & asked:
        return False
    return _SPEAKER.search(sentence) is not None


def _has_facts(sentence: str) -> bool:
    return _FACTS.search(sentence) is not None


def _content(text: str) -> set[str]:
    """Return the beginnings of the longer words: enough to tell "apples" from "pears", and not from "apple"."""
    return {word[:5].removesuffix("s") for word in _CONTENT.findall(text.lower()) if word not in _LITTLE.split()}


# --- the sentence ----------------------------------------------------------------------------------------------------

_QUESTION = re.compile(
    rf"(?:(?:in|on|at|to|from|of|by|for|with|under|about) )?(?:{_WH}|{_AUX})\b"
    rf"|.* (?:{_AUX}|in|on|at|of|to|from) (?:how many|how much|which|what)\b",
    re.IGNORECASE,
)


@_of_english
def tidy(text: str) -> str:
    """Return the text with single spaces, a capital at its beginning, and the question mark of a question."""
    text = re.sub(r"[ \t]+", " ", text.strip())
    text = re.sub(r"\?[?!]+|!+\?[?!]*", "?", re.sub(r"!{2,}", "!", text))
    first = re.match(r"[a-z]+(?=[ ,'’])", text)
    if first and len(sentences(text)) == 1:
        text = text[:1].upper() + text[1:]
    last = sentences(text)[-1]
    if " " in last and (last[-1:].isalnum() or last[-1:] in "\"'”’`)"):
        text += "." if _ORDERS.match(last) else "?" if _QUESTION.match(last) else ""
    return text


@_of_english
def clean(text: str) -> str:
    """Return the text after all of these, in this order."""
    for rewrite in (shorthand, typos, courtesy, core, tidy):
        text = rewrite(text)
    return text
