"""`--gguf`: the user's own files as target and mutator, in processes that end with the run."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests

from query_mutator import Rewriter
from query_mutator.errors import UsageError
from query_mutator.files.gguf_file import digest_of
from query_mutator.llm import llama
from query_mutator.llm.backends import resolve_backend
from query_mutator.llm.llama import LlamaBackend
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.llm.stack import build_client
from query_mutator.types import ChatRequest
from tests.integration.conftest import EVERY_STEP
from tests.integration.killing import kill_when, start, train, transcript, weights
from tests.integration.llama_server import CONTEXT, LlamaServer, write_gguf
from tests.qm_command import qm, serving

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def file(tiny_gguf: Path, tmp_path: Path) -> Path:
    """Return a file of this test, so that its processes can be told from those of others."""
    return Path(shutil.copy(tiny_gguf, tmp_path / "small.gguf"))


@pytest.fixture
def backend(file: Path) -> Iterator[LlamaBackend]:
    (found,) = LlamaBackend.open([str(file)], pool_size=4, timeout_s=30.0)
    yield found
    found.close()


def ask(text: str, **fields: object) -> ChatRequest:
    return ChatRequest.user(text, **{"model": "small", "max_tokens": 24, **fields})


def processes(file: Path) -> list[psutil.Process]:
    """Return the processes that run a file."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if str(file) in (process.info["cmdline"] or ()) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return [process for process in found if "llama_child.py" in " ".join(process.info["cmdline"])]


def assert_none_left(file: Path) -> None:
    deadline = time.monotonic() + 20.0
    while processes(file):
        assert time.monotonic() < deadline, processes(file)
        time.sleep(0.05)


# --- calls -----------------------------------------------------------------------------------------------------------


def test_replies_are_those_of_the_same_file_behind_llama_server(backend: LlamaBackend, file: Path) -> None:
    asked = [ask(f"question {number}") for number in range(12)]
    with ThreadPoolExecutor(4) as pool:
        replies = [reply.text for reply in pool.map(backend.complete, asked)]
    with LlamaServer(file, slots=4) as server:
        behind = OpenAIBackend(server.url)
        assert [behind.complete(ask(f"question {number}", model="tiny")).text for number in range(12)] == replies
        behind.close()
    assert len(set(replies)) > 6
    assert (backend.slots("small"), backend.context("small")) == (4, CONTEXT)


def test_a_request_for_log_probabilities_gets_their_mean(backend: LlamaBackend) -> None:
    found = backend.complete(ask("how sure are you", logprobs=True)).logprob
    assert found is not None
    assert found < 0
    assert backend.complete(ask("how sure are you")).logprob is None


def test_the_context_of_a_slot_is_num_ctx(file: Path) -> None:
    (server,) = LlamaBackend.open([str(file)], pool_size=3, runner_options={"num_ctx": 512})
    assert server.context("small") == 512
    assert server.complete(ask("word " * 60)).ok
    server.close()


def test_a_prompt_that_does_not_fit_is_refused(backend: LlamaBackend) -> None:
    assert backend.complete(ask("word")).ok
    error = backend.complete(ask("word " * CONTEXT)).error
    assert error is not None
    assert error.kind == "prompt_too_long"
    assert "give a larger --num-ctx" in error.message


def test_close_cancels_calls_in_flight_and_ends_the_process(backend: LlamaBackend, file: Path) -> None:
    assert backend.complete(ask("load it")).ok
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(backend.complete, ask(f"{n} " * 600, max_tokens=1000)) for n in range(16)]
        threading.Timer(0.05, backend.close).start()
        kinds = {call.result().error.kind for call in calls if call.result().error is not None}  # type: ignore[union-attr]
    assert kinds <= {"cancelled"}
    assert_none_left(file)
    assert backend.complete(ask("after the end")).error is not None


def test_only_its_owner_reads_what_a_process_says(backend: LlamaBackend, file: Path) -> None:
    assert backend.complete(ask("load it")).ok
    url, headers = backend.http_url("small").removesuffix("/v1"), dict(backend.http_headers("small"))
    page = {"Origin": "https://evil.example", "Host": "evil.example"}
    for path in ("/slots", "/props", "/metrics", "/lora-adapters"):
        assert requests.get(url + path, headers=page, timeout=20).status_code == 401, path
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    for path in ("/v1/chat/completions", "/completion", "/tokenize"):
        assert requests.post(url + path, json=body, headers=page, timeout=20).status_code == 401, path
    assert requests.get(f"{url}/props", headers=headers, timeout=20).status_code == 200
    [process] = processes(file)
    (secret,) = (value.removeprefix("Bearer ") for value in headers.values())
    assert secret not in " ".join([*process.cmdline(), *process.environ().values()])


def test_a_process_that_crashed_is_started_again(file: Path) -> None:
    stack = build_client([str(file)], backend="llama", batch_size=2)
    stack.require_models(["small"])
    first = stack.retry.complete(ask("one"))
    [process] = processes(file)
    process.kill()
    process.wait(10)
    again = stack.retry.complete(ask("one"))
    assert [one.pid for one in processes(file)] != [process.pid]
    stack.close()
    assert (first.ok, again.text) == (True, first.text)


def test_two_files_are_target_and_mutator(file: Path, tmp_path: Path) -> None:
    other = write_gguf(tmp_path, seed=1)
    choice = resolve_backend(gguf=(str(file), str(other)))
    assert (choice.kind, choice.default_models, choice.urls) == ("llama", ("small", "tiny"), (str(file), str(other)))
    stack = build_client(choice.urls, backend=choice.kind, batch_size=2)
    stack.require_models(["small", "tiny"])
    texts = {name: stack.client.complete(ask("hello", model=name)).text for name in ("small", "tiny")}
    stack.close()
    assert texts["small"] != texts["tiny"]
    assert_none_left(file)
    assert_none_left(other)


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_model_in_several_files_has_the_digest_of_all(file: Path, tmp_path: Path) -> None:
    parts = [tmp_path / f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
    shutil.copy(file, parts[0])
    with pytest.raises(UsageError, match=r"2 files, and big-00002-of-00002\.gguf is not there"):
        digest_of(parts[0])
    parts[1].write_bytes(b"one")
    first = digest_of(parts[0])
    parts[1].write_bytes(b"other")
    assert digest_of(parts[0]) != first


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory"),
        (b"", "not a GGUF file (an empty file)"),
        (b"<html>", "not a GGUF file (it starts with b'<htm')"),
        ("cut", "tensor 'blk.1.ffn_down.weight' data is not within the file bounds, model is corrupted or incomplete"),
        ("head", "no chat template in the file, or the file is cut"),
    ],
)
def test_a_wrong_file_costs_one_line(
    content: bytes | str | None, words: str, file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, wrong = file.read_bytes(), tmp_path / "wrong.gguf"
    made = {"cut": whole[:-5000], "head": whole[:300]}
    if content is not None:
        wrong.write_bytes(made[content] if isinstance(content, str) else content)
    assert qm("doctor", "--gguf", wrong) == 2
    assert qm("plan", "--gguf", wrong, "--encoder", "hash", "--save-dir", tmp_path / "runs") == 2
    said = capfd.readouterr().err.splitlines()
    assert [line for line in said if words in line] == said
    assert len(said) == 2
    assert not list((tmp_path / "runs").glob("*"))


def test_a_chat_template_without_end_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    loop = "{% for i in range(1000000000) %}{% for j in range(1000000000) %}{% endfor %}{% endfor %}"
    endless = write_gguf(tmp_path, template=loop)
    monkeypatch.setattr(llama, "START_S", 3.0)
    assert qm("doctor", "--gguf", endless) == 2
    (said,) = capfd.readouterr().err.splitlines()
    assert f"--gguf {endless}: not loaded after 3 s; its chat template may not end" in said
    assert_none_left(endless)


def test_wrong_flags_cost_one_line(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = write_gguf(tmp_path, template="")
    assert qm("doctor", "--gguf", bare) == 2
    assert "no chat template" in capfd.readouterr().err
    assert qm("doctor", "--backend", "llama") == 2
    assert "give its file with --gguf FILE" in capfd.readouterr().err
    assert qm("doctor", "--gguf", file, bare, tmp_path) == 2
    assert "--gguf takes one file, or two" in capfd.readouterr().err
    assert qm("doctor", "--gguf", file, "--ollama-url", "http://127.0.0.1:1") == 2
    assert "--ollama-url and --gguf name servers of two kinds" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "xllamacpp", None)  # as where it is not installed
    assert qm("doctor", "--gguf", file) == 2
    assert "pip install 'query-mutator[llama]'" in capfd.readouterr().err


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def flags(file: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("short.json").write_text('{"mutator_max_tokens": 16}')
    return [
        *("--gguf", str(file), "--encoder", "hash", "--dataset", str(dataset), "--embedding-dims", "4"),
        *("--operators", "spelling,neutral,filler", "--save-interval", "1", "--num-processes", "4"),
        *EVERY_STEP,
        *("--num-steps", "4", "--batch-size", "4", "--num-mini-batch", "2", "--num-env-steps", "48"),
        *("--target-max-tokens", "16", "--config", "short.json", "--no-evaluate"),
        *("--deterministic", "--cache", "off"),
    ]


def test_a_training_that_is_killed_resumes_to_the_same_weights_and_leaves_no_process(
    flags: list[str],
    file: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    train([*flags, "--save-dir", str(tmp_path / "whole")], tmp_path)
    assert_none_left(file)
    run = tmp_path / "killed" / "latest"
    checkpoint = run / "resume.previous.pt"
    assert kill_when(start([*flags, "--save-dir", str(tmp_path / "killed")], tmp_path), checkpoint.exists)
    assert_none_left(file)
    train(["--resume", str(run), *flags[:2]], tmp_path)
    whole = tmp_path / "whole" / "latest"
    assert transcript(run) == transcript(whole)
    assert all((weights(run)[name] == value).all() for name, value in weights(whole).items())
    assert_none_left(file)

    capfd.readouterr()
    assert qm("eval", run, *flags[:2]) == 0
    assert "answered by small" in capfd.readouterr().out
    check_other_commands(run, file, tmp_path, capfd)
    check_a_changed_file(run, file, capfd, caplog)
    assert_none_left(file)


def check_other_commands(run: Path, file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert qm("rewrite", "how do i sort teh list", "--checkpoint", run) == 2
    assert f"give --gguf {file} " in capfd.readouterr().err
    with Rewriter.load(run, gguf=str(file)) as rewriter:
        assert (rewriter.target_model, rewriter.models.mutator_model) == ("small", "small")
        assert rewriter.rewrite("how do i sort teh list").answer
    questions = tmp_path / "in.jsonl"
    questions.write_text('{"id": "a", "prompt": "how do i sort"}\n')
    assert qm("batch", questions, "--out", tmp_path / "plain.jsonl", "--gguf", file, "--batch-size", "2") == 0
    assert qm("batch", questions, "--out", tmp_path / "rewritten.jsonl", "--checkpoint", run, "--gguf", file) == 0
    assert len((tmp_path / "rewritten.jsonl").read_text().splitlines()) == 1
    capfd.readouterr()
    assert qm("doctor", "--gguf", file, "--batch-size", "3") == 0
    assert "slots:   3, as the server reports" in capfd.readouterr().out


def check_a_changed_file(
    run: Path, file: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with file.open("ab") as content:
        content.write(bytes(32))  # which llama.cpp does not read
    capfd.readouterr()
    (run / "summary.json").unlink()  # stopped after its last step
    assert qm("train", "--resume", run, "--gguf", file) == 2
    assert f"{file} changed since this policy was trained" in capfd.readouterr().err
    assert qm("rewrite", "how do i sort", "--checkpoint", run, "--gguf", file) == 0
    assert "small is another file than in training" in caplog.text


def test_qm_serve_forwards_to_the_file(file: Path, dataset: Path, tmp_path: Path) -> None:
    argv = ["--gguf", file, "--encoder", "hash", "--dataset", dataset, "--operators", "spelling,filler"]
    short = ["--max-calls", "60", "--target-max-tokens", "8", "--batch-size", "2"]
    assert qm("plan", *argv, *short, "--save-dir", tmp_path / "plans") == 0
    texts = []
    with serving(tmp_path / "plans" / "latest", tmp_path, "--gguf", str(file)) as (_, url):
        for model in ("small", "small+qm"):
            messages = [{"role": "user", "content": "how do i sort teh list"}]
            body = {"model": model, "max_tokens": 8, "messages": messages}
            mine = {"Authorization": "Bearer of-the-client"}  # which the file's process does not know
            reply = requests.post(f"{url}/v1/chat/completions", json=body, headers=mine, timeout=30).json()
            texts.append(reply["choices"][0]["message"]["content"])
    assert all(texts)
    assert_none_left(file)
