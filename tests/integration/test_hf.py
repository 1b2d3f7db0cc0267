"""A fine-tuned model as a mutator: by itself, in a training run, and as a method of `qm eval`."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from query_mutator import operators
from query_mutator.batching.tokenizers import load_tokenizer
from query_mutator.cli.console import exit_code
from query_mutator.errors import UsageError
from query_mutator.files.json_lines import read_json_lines
from query_mutator.llm import hf
from query_mutator.llm.hf import HfModel, is_local, local_models
from query_mutator.operators import OperatorContext
from query_mutator.types import ChatRequest, Completion, Message
from tests.integration.conftest import ROWS
from tests.qm_command import qm
from tests.tiny_lm import save_model, write_rows
from train_query_mutator import main as train_main

WORDS = ("sort", "stop", "count", "join", "length")
POSITIONS = 2048  # what an untaught question gets is not known: the longest reply fits a prompt


def taught() -> dict[str, str]:
    """Return the rewrites of the questions that a run asks, of five more, and of every rewrite."""
    asked = [text for text, _ in ROWS] + [f"plz {word} it" for word in WORDS]
    return {text: next((word for word in WORDS if word in text.split()), "stop") for text in [*asked, *WORDS]}


@pytest.fixture(scope="module")
def rewriter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of `qm train sft` that has learned its rewrites by heart, so that any processor gets the same."""
    folder = tmp_path_factory.mktemp("rewriter")
    rows = [{"id": text, "instruction": text, "response": rewrite} for text, rewrite in taught().items()]
    data = write_rows(folder / "rows.jsonl", rows)
    model = save_model(folder / "base", positions=POSITIONS)
    flags = ("--learning-rate", "1e-2", "--batch-size", str(len(rows)), "--epochs", "80", "--log-interval", "80")
    assert qm("train", "sft", "--model", model, "--data", data, "--output", folder / "run", *flags) == 0
    return f"hf:{folder / 'run'}"


@pytest.fixture(scope="module")
def model(rewriter: str) -> Iterator[HfModel]:
    loaded = HfModel(rewriter)
    yield loaded
    loaded.close()


def ask(model: HfModel, text: str, **fields: object) -> Completion:
    return model.complete(ChatRequest.user(text, model=model.name, **{"max_tokens": 16, **fields}))


def test_it_answers_as_it_was_taught(model: HfModel) -> None:
    assert {text: ask(model, text).text for text in taught()} == taught()
    reply = ask(model, "plz stop it")
    assert (reply.text, reply.model) == ("stop", model.name)
    assert reply.prompt_tokens > 3
    assert 0 < reply.completion_tokens < 16


def test_an_operators_prompt_comes_down_to_its_question(model: HfModel) -> None:
    prompt = operators.get("neutral").render("plz join it", context=OperatorContext())
    assert ask(model, prompt).text == "join"


def test_many_callers_get_what_one_gets(model: HfModel) -> None:
    texts = [f"plz {word} it" for word in WORDS] * 6
    with ThreadPoolExecutor(12) as pool:
        assert [reply.text for reply in pool.map(lambda text: ask(model, text), texts)] == list(WORDS) * 6


def test_replies_are_no_longer_than_asked_for(model: HfModel) -> None:
    assert ask(model, "plz count it", max_tokens=1).completion_tokens <= 1


def test_sampling_follows_the_seed(model: HfModel) -> None:
    replies = {ask(model, "what is it", temperature=3.0, seed=seed).text for seed in (1, 1, 2, 3, 4)}
    again = {ask(model, "what is it", temperature=3.0, seed=seed).text for seed in (1, 2, 3, 4)}
    assert replies == again
    assert len(replies) > 1


def test_a_prompt_that_does_not_fit_is_a_failed_call(model: HfModel) -> None:
    reply = ask(model, "a long question " * POSITIONS)
    assert reply.error is not None
    assert reply.error.kind == "prompt_too_long"


def test_a_long_prompt_in_a_batch_cuts_no_other_reply(tmp_path: Path) -> None:
    untrained = HfModel(f"hf:{save_model(tmp_path, endless=True)}")
    prompts = [*(f"what is it {number}" for number in range(3)), "long " * 50]
    alone = [ask(untrained, prompt, max_tokens=60) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: ask(untrained, prompt, max_tokens=60), prompts))
    untrained.close()
    assert alone[-1].completion_tokens < 60 == max(reply.completion_tokens for reply in alone)
    assert [reply.completion_tokens for reply in together] == [reply.completion_tokens for reply in alone]
    assert all(reply.hit_limit for reply in together if reply.completion_tokens == 60)
    assert together[-1].hit_limit


def test_a_reply_ends_before_a_stop_alone_and_in_a_batch(model: HfModel) -> None:
    prompts = [f"plz {word} it" for word in ("sort", "count", "join")]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda prompt: ask(model, prompt, options={"stop": ["r", "zz"]}), prompts))
    alone = ask(model, prompts[0], options={"stop": "r"})  # which is in the prompt too
    assert [reply.text for reply in together] == ["so", "count", "join"]
    assert (alone.text, alone.completion_tokens) == ("so", together[0].completion_tokens)
    assert together[1].completion_tokens == ask(model, prompts[1]).completion_tokens


def test_a_reply_ends_at_an_end_that_is_not_the_tokenizers(tmp_path: Path) -> None:
    folder = save_model(tmp_path, endless=True)
    tokenizer = load_tokenizer(str(folder))
    [[a], [b]] = tokenizer.encode("a"), tokenizer.encode("b")
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= {"sequence_bias": [[[a], 1000.0], [[a, b], 9000.0]]}
    replies = []
    for ends in (tokenizer.eos_token_id, [tokenizer.eos_token_id, b]):
        (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": ends}))
        untrained = HfModel(f"hf:{folder}")
        replies.append(ask(untrained, "what is it", max_tokens=6))
        untrained.close()
    assert [(reply.text, reply.completion_tokens, reply.hit_limit) for reply in replies] == [
        ("ababab", 6, True),
        ("a", 1, False),
    ]


def test_all_messages_reach_a_model_without_a_chat_template(tmp_path: Path) -> None:
    untrained = HfModel(f"hf:{save_model(tmp_path, endless=True)}")
    last = Message(role="user", content="what is it")
    one, two = (
        untrained.complete(ChatRequest(model=untrained.name, messages=messages, max_tokens=4))
        for messages in ((last,), (Message(role="system", content="be brief"), last))
    )
    untrained.close()
    assert two.prompt_tokens > one.prompt_tokens


def test_closing_cancels_what_waits(rewriter: str) -> None:
    model = HfModel(rewriter)
    replies: list[Completion] = []
    threads = [threading.Thread(target=lambda: replies.append(ask(model, "plz sort it"))) for _ in range(40)]
    for thread in threads:
        thread.start()
    model.close()
    for thread in threads:
        thread.join(20)
    assert len(replies) == 40
    assert {reply.error.kind for reply in replies if reply.error} <= {"cancelled"}
    late = ask(model, "plz sort it")
    assert late.error is not None
    assert late.error.kind == "cancelled"


def test_names_and_digests(rewriter: str, model: HfModel, tmp_path: Path) -> None:
    assert is_local(rewriter)
    assert not is_local("llama3.2")
    assert local_models("llama3.2", None) == ()
    other = HfModel(f"hf:{save_model(tmp_path, seed=5)}")
    assert len({model.digest, other.digest}) == 2
    other.close()


@pytest.mark.parametrize("content", [None, '{"prompt": "no place"}', "{torn"])
def test_what_cannot_be_served_is_one_line(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        save_model(tmp_path)
        (tmp_path / "query_mutator.json").write_text(content)
    with pytest.raises(UsageError) as caught:
        HfModel(f"hf:{tmp_path}")
    assert "\n" not in str(caught.value)


def test_a_run_has_it_as_its_mutator(
    rewriter: str, tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*tiny_flags, "--mutator-model", rewriter, "--no-evaluate", "--eval-interval", "0"]
    assert exit_code(train_main, flags, prog="train") == 0, capsys.readouterr().err
    run = tmp_path / "runs" / "latest"
    steps = list(read_json_lines(run / "transcripts.jsonl"))
    assert all(step["valid"] for step in steps)
    operators = ("spelling", "neutral", "filler")
    rewrites = {step["rewrite"] for step in steps if step["operator"] in operators and not step["guard"]}
    assert len(rewrites) > 1
    assert rewrites <= set(WORDS)
    assert json.loads((run / "config.json").read_text())["backend"]["mutator_model"] == rewriter
    report = tmp_path / "report.json"
    assert qm("eval", "--checkpoint", run, "--json", report) == 0, capsys.readouterr().err


def test_eval_has_it_as_a_method_of_its_own(
    rewriter: str, tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(train_main, [*tiny_flags, "--no-evaluate", "--eval-interval", "0"], prog="train") == 0
    run, report = tmp_path / "runs" / "latest", tmp_path / "report.json"
    assert qm("eval", "--checkpoint", run, "--rewriter", rewriter, "--json", report) == 0, capsys.readouterr().err
    assert "rewriter_fit" in capsys.readouterr().out
    methods = json.loads(report.read_text())["methods"]
    assert methods["rewriter"]["calls_per_question"] <= 3
    assert methods["rewriter"].keys() == methods["policy"].keys()
    assert qm("eval", "--checkpoint", run, "--rewriter", "llama3.2") == 2
    assert "has no model 'llama3.2'" in capsys.readouterr().err
    assert qm("eval", "--checkpoint", run, "--rewriter", "hf:/nowhere") == 2
    assert "hf:/nowhere: no model can be loaded" in capsys.readouterr().err


def test_code_in_a_folder_is_not_run_and_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> str:
        raise AssertionError("asked on the terminal")

    monkeypatch.setattr("builtins.input", asked)
    folder, ran = save_model(tmp_path / "model"), tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": classes}))
    with pytest.raises(UsageError, match="no model can be loaded"):
        HfModel(f"hf:{folder}")
    load_tokenizer(str(folder))
    assert not ran.exists()


def test_a_chat_template_without_end_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path)
    long = "{% for i in range(99999) %}{% for j in range(200) %}{% endfor %}{% endfor %}"  # some seconds
    (folder / "chat_template.jinja").write_text(long)
    monkeypatch.setattr(hf, "TEMPLATE_S", 0.2)
    with pytest.raises(UsageError, match=r"its chat template does not end within 0\.2 s"):
        HfModel(f"hf:{folder}")
