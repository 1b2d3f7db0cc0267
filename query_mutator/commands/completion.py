"""Shell completion of `qm`: the scripts of `qm --completion SHELL`, and the words that they ask for with each Tab."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from query_mutator.cli.flags import Flag, flags_of
from query_mutator.cli.settings import spelled
from query_mutator.commands import COMMANDS
from query_mutator.errors import UsageError

#: Each calls `qm --complete WORDS`, the words after `qm` up to the cursor; without an answer the shell offers files.
SCRIPTS = {
    "bash": """\
# qm --completion bash > ~/.local/share/bash-completion/completions/qm
_qm() {
    local IFS=$'\\n'
    COMPREPLY=($(qm --complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _qm qm
""",
    "zsh": """\
#compdef qm
# qm --completion zsh > a file named _qm in a folder of $fpath
_qm() {
    local -a found
    found=("${(@f)$(qm --complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "${found[1]}" ]]; then compadd -a found; else _files; fi
}
compdef _qm qm
""",
    "fish": """\
# qm --completion fish > ~/.config/fish/completions/qm.fish
complete -c qm -a '(qm --complete (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'
""",
}


def completion_script(shell: str) -> str:
    """Return what a shell sources to complete `qm`."""
    if shell not in SCRIPTS:
        raise UsageError(f"--completion must be one of {', '.join(SCRIPTS)}, not {shell or 'nothing'!r}")
    return SCRIPTS[shell]


def complete(words: Sequence[str]) -> list[str]:
    """Return the completions of the last word, of which `words` has what is typed so far."""
    *before, last = words or [""]
    return [word for word in dict.fromkeys(_candidates(before, last)) if word.startswith(last)]


def _candidates(before: Sequence[str], last: str) -> Iterator[str]:
    for name in COMMANDS:
        parts = name.split()
        if len(parts) > len(before) and parts[: len(before)] == list(before):
            yield parts[len(before)]
    if not before:
        yield from ("help", "--help", "--version", "--completion")
    elif before[-1] == "--completion":
        yield from SCRIPTS
    names = [" ".join(before[:count]) for count in range(min(len(before), 3), 0, -1)]  # the longest first
    command = next((COMMANDS[name] for name in names if name in COMMANDS), None)
    if command is None:
        return
    flags = flags_of(command.flags)
    by_name = {name: flag for flag in flags.values() if not flag.in_file for name in flag.spellings}
    yield from _values(by_name.get(spelled(before[-1])))
    if last.startswith("-"):
        yield from by_name
        yield from ("--help", "--help-all") if hasattr(command.flags, "FIRST") else ("--help",)


def _values(flag: Flag | None) -> Iterator[str]:
    """Yield the values of a flag that takes one of several."""
    hints: list[Any] = [flag.type] if flag else []
    for hint in hints:
        if get_origin(hint) is Literal:
            yield from map(str, get_args(hint))
        elif get_origin(hint) is not None:
            hints.extend(get_args(hint))
