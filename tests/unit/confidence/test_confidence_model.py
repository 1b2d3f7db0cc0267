"""The model: calibrated out of fold, stored as arrays, explained, and blind to gold and to a held-out target."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from query_mutator.confidence import Attempt, ConfidenceModel, LoggedAnswer, crossfit, submission, training_table
from query_mutator.confidence.crossfit import Platt, form_rates
from query_mutator.confidence.features import FEATURES, LOGPROB, feature_row
from query_mutator.confidence.scorers import conditional_fit, logistic_fit
from query_mutator.encoder import HashEncoder
from query_mutator.env.episode import Projection
from query_mutator.errors import CheckpointError, UsageError
from query_mutator.files import write_checked_json
from query_mutator.stats import auroc, expected_calibration_error
from query_mutator.training.run_folder import Checkpoint, read_checkpoint
from tests.unit.confidence.arithmetic_world import graded_sums

QUESTION = "Ann has 20 pens in box 1 and buys 30 more. How many pens does she have?"
GOOD = Attempt(text="She has 20 + 30 = 50 pens. So Ann has 50 pens.", form="plain")
BAD = Attempt(text="She has 20 + 30 = 54 pens. So Ann has 54 pens.", form="plain")


@pytest.fixture(scope="module")
def rows() -> list[LoggedAnswer]:
    return graded_sums(200, prompts=2)


@pytest.fixture(scope="module")
def model(rows: list[LoggedAnswer]) -> ConfidenceModel:
    return ConfidenceModel.fit(rows)


def test_probabilities_are_calibrated_out_of_fold(model: ConfidenceModel, rows: list[LoggedAnswer]) -> None:
    right = np.array([row.right for row in rows], dtype=float)
    assert auroc(model.out_of_fold, right) > 0.9
    assert expected_calibration_error(model.out_of_fold, right) < 0.08
    assert model.report.calibration_error < 0.08
    assert model.report.base_rate == right.mean()
    assert (model.report.answers, model.report.targets) == (400, 200)


def test_right_arithmetic_is_likelier_and_said_so(model: ConfidenceModel) -> None:
    good, bad = model.p_alone(QUESTION, [GOOD, BAD])
    assert 0 <= bad < 0.3 < 0.7 < good <= 1
    texts = {reason.text: reason.log_odds for reason in model.explain(QUESTION, [GOOD, BAD], 1)}
    assert texts["1 of 1 equations are wrong"] < 0
    assert "0 of 1 other answers agree" in texts


def test_submission_is_the_likeliest_answer_and_agreement_counts(model: ConfidenceModel) -> None:
    found = model.submit(QUESTION, [BAD, GOOD])
    assert found.index == 1
    assert found.p_right == max(found.of_all) == max(model.p_right(QUESTION, [BAD, GOOD]))
    alone, both = model.p_right(QUESTION, [GOOD])[0], model.p_right(QUESTION, [GOOD, GOOD])[0]
    assert both > alone
    assert model.p_right(QUESTION, []).shape == (0,)
    with pytest.raises(ValueError, match="no attempt"):
        model.submit(QUESTION, [])


def test_each_answer_lowers_the_p_right_to_stop_at() -> None:
    assert submission.eased(np.array([0.6, 0.5, 1]), np.arange(3)).tolist() == pytest.approx([0.6, 4 / 7, 1])


def test_answers_are_read_as_gold_says(rows: list[LoggedAnswer]) -> None:
    spoken = [replace(row, gold="yes", right=False) for row in rows[:50]]
    spoken += [replace(row, attempt=Attempt(text="12? Yes."), gold="yes", right=True) for row in rows[:50]]
    assert training_table(spoken).kind == "yes_no"


def test_what_only_a_target_tells_is_worth_nothing_out_of_fold() -> None:
    rows = [
        LoggedAnswer(
            question=f"Thing {number}? " + "w " * (7 * number % 400),
            attempt=Attempt(text="It is so.", form=f"{number} {right}"),  # of this target alone: right, or wrong
            right=right,
        )
        for number in range(20)
        for right in [True] * 20 + [False] * 20
    ]
    p = ConfidenceModel.fit(rows).out_of_fold
    assert auroc(p, np.array([row.right for row in rows], dtype=float)) < 0.6


def test_weights_count_answers_again_or_not_at_all(rows: list[LoggedAnswer]) -> None:
    rows = rows[:240]
    table = training_table(rows)
    half = (table.questions % 2).astype(float)
    weighted = ConfidenceModel.fit(table, weights=half)
    kept = [row for row, weight in zip(rows, half, strict=True) if weight]
    assert weighted.report.answers == len(kept)
    alone = ConfidenceModel.fit(kept)
    assert weighted.scorer.log_odds(table.columns[:5]) == pytest.approx(
        alone.scorer.log_odds(table.columns[:5]), abs=1e-3
    )


def test_an_encoder_adds_closeness_and_must_be_the_same_later(rows: list[LoggedAnswer]) -> None:
    encoder = HashEncoder()
    model = ConfidenceModel.fit(rows[:200], folds=2, encoder=encoder)
    assert model.p_right(QUESTION, [GOOD, BAD], encoder=encoder).shape == (2,)
    with pytest.raises(UsageError, match="was fitted with encoder"):
        model.p_right(QUESTION, [GOOD])


def test_arrays_come_back_as_the_same_model(model: ConfidenceModel) -> None:
    arrays = model.to_arrays()
    assert all(array.dtype.kind in "iufb" for array in arrays.values())
    again = ConfidenceModel.from_arrays(arrays)
    attempts = [GOOD, BAD, Attempt(text="no idea", form="other", logprob=-0.2, cut=False)]
    assert (again.p_right(QUESTION, attempts) == model.p_right(QUESTION, attempts)).all()
    assert again.explain(QUESTION, attempts, 2) == model.explain(QUESTION, attempts, 2)
    assert again.report == model.report


def about(arrays: dict[str, np.ndarray], **changes: Any) -> dict[str, np.ndarray]:
    text = json.dumps({**json.loads(arrays["about"].tobytes()), **changes})
    return {**arrays, "about": np.frombuffer(text.encode(), dtype=np.uint8)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("about", None), ("about", np.frombuffer(b"[1]", dtype=np.uint8)), ("about", np.zeros(9)),
        ("about", np.frombuffer(b"[" * 100_000, dtype=np.uint8)), ("calibration", np.array([np.nan, 0])),
        ("calibration", np.array([-1.0, 0])), ("calibration", np.zeros(3)), ("agreement", np.array([np.inf])),
        ("agreement", np.array(["a"])), ("agreement", np.array([{}], dtype=object)), ("reference", np.zeros(5)),
        ("weights", np.zeros(5)), ("weights", np.zeros((3, 5))), ("weights", "huge"), ("weights", "nan"),
        ("weights", np.zeros(300_000)), ("means", None), ("scales", "nothing"), ("intercept", np.zeros((1, 1))),
    ],
)  # fmt: skip
def test_hostile_arrays_are_refused_in_one_line(model: ConfidenceModel, name: str, value: Any) -> None:
    arrays = model.to_arrays()
    if isinstance(value, str):
        changed = arrays[name].astype(np.float64)
        changed[:] = {"nothing": 0.0, "huge": 1e300, "nan": np.nan}[value]
        value = changed
    arrays[name] = value
    with pytest.raises(CheckpointError) as caught:
        ConfidenceModel.from_arrays({key: array for key, array in arrays.items() if array is not None})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [{"version": 1}, {"features": []}, {"kind": "magic"}, {"rates": {"a": "b"}}, {"rates": {"a" * 400: 0.0}},
     {"rates": {"a": 1e9}}, {"rates": []}, {"encoder": 3}, {"report": {}}, {"report": None}],
)  # fmt: skip
def test_hostile_json_is_refused_in_one_line(model: ConfidenceModel, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        ConfidenceModel.from_arrays(about(model.to_arrays(), **changes))


@pytest.mark.parametrize(
    ("rows", "message"),
    [([], "no graded answers"), (graded_sums(9), "too few"),
     ([replace(row, target="one") for row in graded_sums(90)], "folds need")],
)  # fmt: skip
def test_too_little_to_learn_from_is_an_error(rows: list[LoggedAnswer], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ConfidenceModel.fit(rows)


def test_a_target_is_judged_by_the_model_of_its_fold(model: ConfidenceModel, rows: list[LoggedAnswer]) -> None:
    row = rows[7]
    own = model.for_target(row.group)
    [p] = own.p_alone(row.question, [row.attempt])
    assert p == pytest.approx(model.out_of_fold[7])
    assert p != model.p_alone(row.question, [row.attempt])[0]
    assert model.for_target("a target that is not there") is model
    assert {*model.fold_of.values()} == {*range(len(model.fold_models))}


def test_folds_are_read_again_from_the_checkpoint_of_a_run(
    model: ConfidenceModel, rows: list[LoggedAnswer], tmp_path: Path
) -> None:
    write_checked_json(tmp_path / "config.json", {"flags": {}})
    projection = Projection(mean=np.zeros(1, np.float32), components=np.zeros((1, 1), np.float32))
    Checkpoint(learner={}, projection=projection, confidence=model).save(tmp_path)
    again = read_checkpoint(tmp_path).confidence
    assert again is not None
    for row in (rows[3], rows[90]):
        kept, read = (one.for_target(row.group).p_alone(row.question, [row.attempt]) for one in (model, again))
        assert kept == pytest.approx(read, abs=1e-12)


def test_an_answer_is_read_next_to_the_wording_that_was_asked(model: ConfidenceModel) -> None:
    cleaned = replace(GOOD, asked=QUESTION)
    assert model.p_alone("hw many pens lol", [cleaned]) == model.p_alone(QUESTION, [GOOD])


def test_the_rate_of_a_form_tells_nothing_of_answers_that_are_scored() -> None:
    def told(forms: int) -> float:
        """Return the AUROC of answers that differ in their form alone, which says whether they are right."""
        rows = [
            LoggedAnswer(question=f"Q{at}?", attempt=Attempt(text="It is 7.", form=f"{at % forms}"), right=at % 2 == 0)
            for at in range(300)
        ]
        right = np.array([row.right for row in rows], dtype=float)
        return auroc(ConfidenceModel.fit(rows).out_of_fold, right)

    assert told(10) == 1.0  # thirty answers in each
    assert told(300) <= 0.5
    assert not form_rates(training_table(graded_sums(9)), np.ones(9))  # too few in a form


def test_a_log_probability_that_is_no_number_is_unknown() -> None:
    rows = feature_row(QUESTION, Attempt(text="50", logprob=float("nan")), kind="number")
    assert np.isnan(rows[FEATURES.index(LOGPROB)])


def test_p_right_of_few_questions_is_shrunk_towards_the_rate_of_right_answers(rows: list[LoggedAnswer]) -> None:
    odds, right, equal = np.array([1.0, 2, 0, -1, 3]), np.array([1.0, 1, 0, 0, 1]), np.ones(5)
    few, enough = (Platt.fit(odds, right, equal, questions=n) for n in (40, 100))
    kept = 40 / 58 * enough.slope, 40 / 58 * enough.intercept + 18 / 58 * np.log(3 / 2)
    assert (few.slope, few.intercept) == pytest.approx(kept)
    names = list(dict.fromkeys(row.question for row in rows))[:40]
    assert "40 q" in ConfidenceModel.fit([row for row in rows if row.question in names]).report.in_words


def test_a_conditional_logit_sees_what_differs_within_questions_alone() -> None:
    rng = np.random.default_rng(0)
    questions, hard = np.repeat(np.arange(200), 2), np.repeat(rng.random(200) < 0.5, 2)
    right = np.tile([1.0, 0.0], 200) * (~hard | (rng.random(400) < 0.3))
    length = np.tile([1.0, 0.0], 200) + 5.0 * hard + rng.normal(size=400)  # right answers are longer, hard ones too
    both, equal, penalty = np.isin(questions, questions[right > 0]), np.ones(400), np.ones(1)
    within = conditional_fit(length[both, None], right[both], equal[both], questions[both])
    assert within[0] > 0 > logistic_fit(length[:, None], right, equal, start=np.zeros(1), penalty=penalty)[0]


def test_agreement_weighs_more_only_where_that_is_better_by_a_standard_error(
    rows: list[LoggedAnswer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for worse, chosen in ((0.98, crossfit.AGREEMENT), (0.2, 1.0)):
        gains = np.resize([1.0, -worse], 10_000)  # of questions, in turn
        right = partial(lambda gains, *of, agreement: (agreement == 1.0) * gains[: len(of[-1])], gains)
        monkeypatch.setattr(crossfit, "right_submissions", right)
        assert ConfidenceModel.fit(rows).agreement == chosen


def test_answers_are_known_by_their_arms_where_a_vote_is_right_more_often(
    rows: list[LoggedAnswer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def prefer(wanted: Callable[[Any, float], bool]) -> None:
        monkeypatch.setattr(
            crossfit, "right_submissions", lambda table, p, places, counts, *, agreement: counts * wanted(p, agreement)
        )

    prefer(lambda p, agreement: agreement == 1.0 and len(np.unique(p.round(9))) < 50)
    model = ConfidenceModel.fit(rows)
    assert (model.report.scorer, model.agreement, "not read" in model.report.in_words) == ("arms", 1.0, True)
    twice = [replace(one, form="plain") for one in (GOOD, BAD, BAD)]
    assert model.submit(QUESTION, twice).index == 1
    prefer(lambda _, agreement: agreement == 0.0)
    best = max(model.rates, key=lambda form: model.rates[form])
    attempts = [*twice, replace(GOOD, form=best)]
    assert attempts[ConfidenceModel.fit(rows).submit(QUESTION, attempts).index].form == best
