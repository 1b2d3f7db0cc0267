"""English inflection, as far as a glossary needs it: the forms of a verb and of a noun, and the way back."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from query_mutator.embedded.rules.tables import grammar

VOWELS = "aeiou"

#: base: (third person, -ing, past, participle) where English is irregular or the doubling rule below is wrong.
_IRREGULAR = {
    "be": ("is", "being", "was", "been"),
    "beat": ("beats", "beating", "beat", "beaten"),
    "bleed": ("bleeds", "bleeding", "bled", "bled"),
    "blow": ("blows", "blowing", "blew", "blown"),
    "break": ("breaks", "breaking", "broke", "broken"),
    "bring": ("brings", "bringing", "brought", "brought"),
    "build": ("builds", "building", "built", "built"),
    "burn": ("burns", "burning", "burned", "burnt"),
    "burst": ("bursts", "bursting", "burst", "burst"),
    "catch": ("catches", "catching", "caught", "caught"),
    "choose": ("chooses", "choosing", "chose", "chosen"),
    "come": ("comes", "coming", "came", "come"),
    "cut": ("cuts", "cutting", "cut", "cut"),
    "die": ("dies", "dying", "died", "died"),
    "dig": ("digs", "digging", "dug", "dug"),
    "do": ("does", "doing", "did", "done"),
    "draw": ("draws", "drawing", "drew", "drawn"),
    "drop": ("drops", "dropping", "dropped", "dropped"),
    "find": ("finds", "finding", "found", "found"),
    "fight": ("fights", "fighting", "fought", "fought"),
    "freeze": ("freezes", "freezing", "froze", "frozen"),
    "get": ("gets", "getting", "got", "gotten"),
    "give": ("gives", "giving", "gave", "given"),
    "go": ("goes", "going", "went", "gone"),
    "grow": ("grows", "growing", "grew", "grown"),
    "hang": ("hangs", "hanging", "hung", "hung"),
    "have": ("has", "having", "had", "had"),
    "hide": ("hides", "hiding", "hid", "hidden"),
    "hit": ("hits", "hitting", "hit", "hit"),
    "hold": ("holds", "holding", "held", "held"),
    "keep": ("keeps", "keeping", "kept", "kept"),
    "know": ("knows", "knowing", "knew", "known"),
    "lead": ("leads", "leading", "led", "led"),
    "leave": ("leaves", "leaving", "left", "left"),
    "lie": ("lies", "lying", "lay", "lain"),
    "lose": ("loses", "losing", "lost", "lost"),
    "make": ("makes", "making", "made", "made"),
    "open": ("opens", "opening", "opened", "opened"),
    "order": ("orders", "ordering", "ordered", "ordered"),
    "put": ("puts", "putting", "put", "put"),
    "read": ("reads", "reading", "read", "read"),
    "rip": ("rips", "ripping", "ripped", "ripped"),
    "run": ("runs", "running", "ran", "run"),
    "see": ("sees", "seeing", "saw", "seen"),
    "send": ("sends", "sending", "sent", "sent"),
    "set": ("sets", "setting", "set", "set"),
    "shoot": ("shoots", "shooting", "shot", "shot"),
    "shut": ("shuts", "shutting", "shut", "shut"),
    "slay": ("slays", "slaying", "slew", "slain"),
    "sling": ("slings", "slinging", "slung", "slung"),
    "spit": ("spits", "spitting", "spat", "spat"),
    "split": ("splits", "splitting", "split", "split"),
    "stand": ("stands", "standing", "stood", "stood"),
    "steal": ("steals", "stealing", "stole", "stolen"),
    "stick": ("sticks", "sticking", "stuck", "stuck"),
    "strike": ("strikes", "striking", "struck", "struck"),
    "swap": ("swaps", "swapping", "swapped", "swapped"),
    "take": ("takes", "taking", "took", "taken"),
    "tear": ("tears", "tearing", "tore", "torn"),
    "tell": ("tells", "telling", "told", "told"),
    "think": ("thinks", "thinking", "thought", "thought"),
    "throw": ("throws", "throwing", "threw", "thrown"),
    "overthrow": ("overthrows", "overthrowing", "overthrew", "overthrown"),
    "override": ("overrides", "overriding", "overrode", "overridden"),
    "overwrite": ("overwrites", "overwriting", "overwrote", "overwritten"),
    "understand": ("understands", "understanding", "understood", "understood"),
    "write": ("writes", "writing", "wrote", "written"),
}
#: The last consonant of these doubles although they have more than one syllable ("cancelled").
_STRESSED_LAST = grammar("stressed-last")


class Forms(NamedTuple):
    """The five forms of a verb."""

    base: str
    third: str  # kills
    gerund: str  # killing
    past: str  # killed
    participle: str  # killed


@cache
def forms(verb: str) -> Forms:
    """Return the forms of a verb; of a phrase ("get rid of") the first word is inflected."""
    first, _, rest = verb.partition(" ")
    found = Forms(first, *_IRREGULAR[first]) if first in _IRREGULAR else _regular(first)
    return Forms(*(f"{form} {rest}" for form in found)) if rest else found


def _regular(verb: str) -> Forms:
    if verb.endswith(("s", "x", "z", "ch", "sh", "o")):
        third = f"{verb}es"
    elif verb.endswith("y") and verb[-2:-1] not in VOWELS:
        third = f"{verb[:-1]}ies"
    else:
        third = f"{verb}s"
    if verb.endswith("e") and not verb.endswith(("ee", "oe", "ye")):
        return Forms(verb, third, f"{verb[:-1]}ing", f"{verb}d", f"{verb}d")
    if verb.endswith("y") and verb[-2:-1] not in VOWELS:
        return Forms(verb, third, f"{verb}ing", f"{verb[:-1]}ied", f"{verb[:-1]}ied")
    if verb.endswith("e"):
        return Forms(verb, third, f"{verb}ing", f"{verb}d", f"{verb}d")
    stem = verb + verb[-1] if _doubles(verb) else verb
    return Forms(verb, third, f"{stem}ing", f"{stem}ed", f"{stem}ed")


def _doubles(verb: str) -> bool:
    if len(verb) < 3 or verb[-1] in "aeiouwxyhc" or verb[-2] not in VOWELS or verb[-3] in VOWELS:
        return False
    syllables = sum(
        letter in "aeiouy" and before not in "aeiouy" for before, letter in zip(f" {verb}", verb, strict=False)
    )
    return syllables == 1 or verb in _STRESSED_LAST


@cache
def plural(noun: str) -> str:
    """Return the plural of a noun; of a phrase the last word is inflected."""
    head, _, last = noun.rpartition(" ")
    if last.endswith(("s", "x", "z", "ch", "sh")):
        found = f"{last}es"
    elif last.endswith("y") and last[-2:-1] not in VOWELS:
        found = f"{last[:-1]}ies"
    else:
        found = f"{last}s"
    return f"{head} {found}" if head else found


@cache
def stems(word: str) -> tuple[str, ...]:
    """Return the words that `word` may be an inflection of, likeliest first, itself included."""
    found = [word]
    for suffix, repairs in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= 2:
            stem = word[: -len(suffix)]
            found += [stem + repair for repair in repairs]
            if len(stem) > 2 and stem[-1] == stem[-2] and suffix != "s":
                found.append(stem[:-1])
    return tuple(dict.fromkeys(found))


_SUFFIXES = (
    ("ies", ("y",)),
    ("es", ("", "e")),
    ("s", ("",)),
    ("'s", ("",)),
    ("s'", ("",)),
    ("ing", ("", "e")),
    ("ied", ("y",)),
    ("ed", ("", "e")),
)
