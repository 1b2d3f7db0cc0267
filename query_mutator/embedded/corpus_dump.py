"""Reads the standard library's own docstrings and prints them as JSON; `corpus.py` runs it in a clean interpreter.

    python -I -S corpus_dump.py  ->  [{"name", "aliases", "signature", "summary"}, ...]

It imports nothing of ours, so what it sees does not depend on what its caller has imported. Each object goes in once,
under the first public name met: functions and classes of MODULES first, then methods of METHODS_OF until LIMIT.
What stays out is decided by rules on the object and its docstring, never by a list of wanted names.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import json
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

LIMIT = 1500
MODULES = """
    builtins os os.path shutil pathlib subprocess signal threading multiprocessing concurrent.futures asyncio queue
    sched time datetime calendar random secrets math statistics fractions itertools functools collections heapq
    bisect copy pprint re string textwrap difflib unicodedata json csv configparser pickle shelve sqlite3 zlib
    gzip zipfile tarfile hashlib hmac base64 binascii struct tempfile glob fnmatch linecache fileinput filecmp
    socket select urllib.request urllib.parse urllib.robotparser email.utils smtplib ipaddress uuid html html.parser
    xml.etree.ElementTree webbrowser logging argparse getpass platform locale timeit cProfile tracemalloc traceback
    warnings contextlib atexit gc inspect ast importlib runpy enum dataclasses weakref mimetypes zoneinfo graphlib
    shlex sys
"""
#: Classes whose methods people call by name; the limit cuts at the end of the list.
METHODS_OF = """
    str list dict set tuple pathlib.Path pathlib.PurePath datetime.datetime datetime.date datetime.timedelta
    collections.deque collections.Counter collections.OrderedDict collections.defaultdict collections.ChainMap
    queue.Queue threading.Thread threading.Event threading.Condition threading.Barrier threading.Timer
    threading.Semaphore subprocess.Popen concurrent.futures.Executor concurrent.futures.Future asyncio.Queue
    itertools.chain re.Pattern sched.scheduler sqlite3.Connection sqlite3.Cursor zipfile.ZipFile
    zipfile.ZipInfo tarfile.TarFile configparser.RawConfigParser configparser.ConfigParser
    xml.etree.ElementTree.ElementTree json.JSONEncoder json.JSONDecoder socket.socket smtplib.SMTP logging.Logger
    graphlib.TopologicalSorter urllib.robotparser.RobotFileParser argparse.ArgumentParser csv.Sniffer asyncio.Task
    difflib.SequenceMatcher ipaddress.IPv6Network logging.Handler html.parser.HTMLParser string.Template
    textwrap.TextWrapper contextlib.ExitStack weakref.finalize re.Match statistics.NormalDist fractions.Fraction
    os.DirEntry timeit.Timer hmac.HMAC zoneinfo.ZoneInfo datetime.time
    int float
"""
#: Process groups, descriptor-level variants, interpreter and protocol plumbing: far from everyday questions.
PLUMBING = re.compile(
    r"os\.((set|init|tc[gs]et)\w*(id|grp|groups)$|get(res[gu]|pg|s|e?g)id|getpgrp|getgroup|W[A-Z]+|sched_|posix_"
    r"|(exec|spawn)\w*[lep]+$|(pid|event|mem|timer)fd|l?chflags|[fl]ch(own|mod|dir)$|[glr]\w+xattr$|f?pathconf"
    r"|f?statvfs|\w*(inheritable|blocking)|confstr|sysconf|(ma|mi)[jn]or$|makedev|mknod|p(read|write)v?$"
    r"|(read|write)v$|splice|dup2?$|\w*pty|login_tty|lockf|pipe2|wait(3|4|id)|fdatasync|copy_file_range|\w+b$|ctermid"
    r"|closerange|unshare|setns|\w*pts?(name)?$|unlockpt)"
    r"|sys\.\w*(dlopen|asyncgen|coroutine|audit|displayhook|breakpointhook|unraisable|call_tracing|trampoline|interned)"
    r"|inspect\.(is\w*(descriptor|wrapper)$|is(frame|code|traceback|awaitable|asyncgen)|(find|get)?(indent|block|findso)"
    r"|get(lineno|callargs|frameinfo|modulename|args)$|BlockFinder|BoundArg|walktree|markcoro"
    r"|\w+(locals|state|argvalues|static|frames|class_attrs|annotations)$)"
    r"|socket\.(CMSG|if_\w+to\w+|getproto|[hn]to\w+|\w+_fds|SocketType)|threading\.\w+_all_threads|uuid\.main"
    r"|signal\.(pidfd|set_wakeup|pthread_\w+mask|siginterrupt|sigtimed)|hashlib\.(sha3_|sha224|sha384|shake)"
    r"|platform\.(java|win|ios|android|system_alias|libc|python_(b|c|r|\w+tuple))|time\.(clock_|pthread|tzset)"
    r"|asyncio\.(Abstract|Base|Buffered|Datagram|Multi|Safe|Fast|Threaded|Pidfd|Read|Write|Transport|\w*Handle"
    r"|\w*(Protocol|Watcher|Policy)|\w*(child_watcher|event_loop_policy|unix|eager)|StreamWriter|\w*EventLoop$"
    r"|Timeout|wrap_future|isfuture|(new|set)_event_loop)|enum\.(global|Repr|EnumCheck|FlagB|EnumDict|(non)?member)"
    r"|logging\.\w*(LogRecord|LoggerClass|Buffering)|logging\.Handler\.(acquire|release|createLock|handle)"
    r"|tarfile\.TarFile\.(make|ch(own|mod)|utime|\w+open)|traceback\.(walk_|\w+Summary|extract_tb|format_list|clear)"
    r"|smtplib\.SMTP\.(send$|putcmd|getreply|docmd|e?helo|has_extn|rset|noop|mail|rcpt|data|auth_)"
    r"|random\.(weibull|vonmises|pareto|lognormv|gammav|betav|binomialv)|gc\.(get_debug|set_debug|\w*freeze|is_)"
    r"|multiprocessing\.(allow_|freeze_|set_)|base64\.(a85|b85|z85|b32hex)|email\.utils\.(\w+_rfc2231|decode_params)"
    r"|tracemalloc\.(Frame|Trace|Statistic|get_tracemalloc|get_traceback_l)|xml\.etree\.ElementTree\.(PI|QName|iselem)"
)


def main() -> None:
    """Print the corpus as one JSON list."""
    warnings.simplefilter("ignore")
    modules = {name: importlib.import_module(name) for name in MODULES.split() if _importable(name)}
    things = _collect(modules)
    aliases = _aliases(modules, things)
    rows = [
        {"name": name, "aliases": sorted(aliases[key]), "signature": _signature(name, thing), "summary": summary}
        for key, (name, thing, summary) in things.items()
    ]
    json.dump(rows, sys.stdout)


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:  # not built for this platform, or gone in this version
        return False
    return True


def _collect(modules: dict[str, Any]) -> dict[Any, tuple[str, Any, str]]:
    """Return identity -> (name, object, summary), at most LIMIT, in the order of MODULES, then METHODS_OF."""
    things: dict[Any, tuple[str, Any, str]] = {}
    said: set[tuple[str, str]] = set()
    top_level = (found for name, module in modules.items() for found in _public(name, module))
    methods = (found for name in METHODS_OF.split() for found in _methods(name, modules))
    for group in (top_level, methods):
        for name, thing in group:
            key = _identity(thing)
            if len(things) >= LIMIT or key in things or not _wanted(name, thing):
                continue
            summary = _summary(thing, name.rpartition(".")[2])
            twin = (name.rpartition(".")[0], thing.__doc__)
            if summary and twin not in said:  # a second name with the same words in the same place adds nothing
                said.add(twin)
                things[key] = (name, thing, summary)
    return things


def _public(module_name: str, module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes a module offers, not those it merely imported."""
    tops = {name.partition(".")[0] for name in MODULES.split()} - {module_name.partition(".")[0]}
    declared = getattr(module, "__all__", None)
    for name in sorted(declared or vars(module), key=lambda name: (len(name), name)):
        thing = getattr(module, name, None)
        if name.startswith("_") or not (inspect.isroutine(thing) or inspect.isclass(thing) or _acts_as_function(thing)):
            continue
        home = str(getattr(thing, "__module__", "")).lstrip("_").partition(".")[0]
        if declared or home not in tops or module_name == "builtins":
            yield (name if module_name == "builtins" else f"{module_name}.{name}"), thing


def _acts_as_function(thing: Any) -> bool:
    """Return whether an object is called like a function it replaces: shutil.rmtree, from Python 3.12 on."""
    return callable(thing) and type(thing).__name__.startswith("_") and "__call__" in vars(type(thing))


def _owner(name: str, modules: dict[str, Any]) -> Any:
    module_name, _, attribute = name.rpartition(".")
    return getattr(modules.get(module_name or "builtins"), attribute, None)


def _methods(class_name: str, modules: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    module = modules.get(class_name.rpartition(".")[0])
    owner = _owner(class_name, modules) or object
    package = owner.__module__.partition(".")[0]
    bases = [base for base in owner.__mro__ if base.__module__.partition(".")[0] == package]  # Path's own, not dict's
    members = {name: raw for base in reversed(bases) for name, raw in vars(base).items()}  # the last definition counts
    for name, raw in members.items():
        thing = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
        twin = inspect.isroutine(getattr(module, name, None))  # re.search says what re.Pattern.search does
        if inspect.isroutine(thing) and not name.startswith("_") and not twin:
            yield f"{class_name}.{name}", thing


def _identity(thing: Any) -> Any:
    """Return a key that is equal for two looks at one object: bound methods are made anew at each look."""
    if inspect.ismethod(thing):
        owner = thing.__self__
        return id(thing.__func__) if inspect.isclass(owner) else (id(owner), id(thing.__func__))
    return id(thing.__func__ if isinstance(thing, (staticmethod, classmethod)) else thing)


def _wanted(name: str, thing: Any) -> bool:
    """Return whether an object is something people ask how to do: no errors, constants, plain records or relics."""
    if PLUMBING.match(name):
        return False
    opening = str(getattr(thing, "__doc__", None) or "").strip().partition("\n\n")[0]
    if "deprecated" in opening.lower() or opening.startswith("Same as"):
        return False
    if not inspect.isclass(thing):
        return True
    record = issubclass(thing, tuple) and thing is not tuple
    constants = issubclass(thing, enum.Enum) and not name.startswith("enum.")
    return not (record or constants or issubclass(thing, (BaseException, ast.AST)))


def _summary(thing: Any, short: str) -> str:
    """Return the docstring's first paragraph of prose on one line, without call forms such as `S.find(sub) -> int`."""
    doc = getattr(thing, "__doc__", None)
    if not isinstance(doc, str):
        return ""
    one_line_calls = re.sub(r"\([^()]*\)", lambda found: " ".join(found[0].split()), inspect.cleandoc(doc))
    for fewest_words in (4, 1):  # what stands behind a call's arrow counts when it is more than a type, or all there is
        for paragraph in one_line_calls.split("\n\n"):
            kept = [_prose(line, short, fewest_words) for line in paragraph.splitlines()]
            prose = " ".join(" ".join(kept).split())
            if len(re.findall(r"\w+", prose)) >= 2:
                return prose[:600]
    return ""


def _prose(line: str, short: str, fewest_words: int) -> str:
    """Return a line, or what a line that begins with a call says after it if that has enough words."""
    if not re.match(rf"\W*(\w+\.)?{re.escape(short)}\s?\(|[\w.]+\([^()]*\)\s-+>\s", line):
        return line
    says = re.search(r"\s(--|-+>)\s(?:\w+[.,]\s+)?(.+)", line)
    return says[2] if says and len(says[2].split()) >= fewest_words else ""


def _signature(name: str, thing: Any) -> str:
    """Return the call on one line; builtins without a text signature show the docstring's first line."""
    try:
        signature = inspect.signature(thing)
    except (ValueError, TypeError):
        first = inspect.cleandoc(getattr(thing, "__doc__", "") or "").partition("\n")[0]
        return first if re.match(r"[\w.]+\(", first) and len(first) < 160 else f"{name}(...)"
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    text = re.sub(r" at 0x[0-9a-f]+", "", str(signature.replace(parameters=parameters)))
    text = text.replace(repr(sys.executable), "sys.executable")  # a default of `platform`, and this machine's path
    if len(text) < 200:
        return f"{name}{text}"
    return f"{name}({textwrap.shorten(', '.join(p.name for p in parameters), 160, placeholder=' ...')})"


def _aliases(modules: dict[str, Any], things: dict[Any, tuple[str, Any, str]]) -> dict[Any, set[str]]:
    """Return identity -> the other public names of each object: re-exports, inherited methods, the defining module."""
    aliases: dict[Any, set[str]] = {key: set() for key in things}

    def note(name: str, thing: Any) -> None:
        key = _identity(thing)
        if key in things and things[key][0] != name:
            aliases[key].add(name)

    for module_name, module in modules.items():
        for attribute, thing in vars(module).items():
            if attribute.startswith("_"):
                continue
            name = attribute if module_name == "builtins" else f"{module_name}.{attribute}"
            note(name, thing)
            for base in reversed(thing.__mro__) if inspect.isclass(thing) else ():
                for member, raw in vars(base).items():
                    if inspect.isroutine(raw) and _first_definition(thing, member) is raw:
                        note(f"{name}.{member}", raw)
    for key, (name, thing, _) in things.items():
        home = f"{getattr(thing, '__module__', None)}.{getattr(thing, '__qualname__', '')}"
        if not home.startswith(("None.", "builtins.")) and home != name:
            aliases[key].add(home)
    return aliases


def _first_definition(cls: type, member: str) -> Any:
    return next(vars(base)[member] for base in cls.__mro__ if member in vars(base))


if __name__ == "__main__":
    main()
