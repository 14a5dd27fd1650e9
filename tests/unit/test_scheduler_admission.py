from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.engine.protocol import Capacity, Prepared
from service.scheduler.admission import FIRST_GUESS, Admission, Prediction


def capacity(seqs: int = 10, kv: int = 1000) -> Capacity:
    return Capacity(max_model_len=512, max_num_seqs=seqs, kv_tokens=kv, block_size=16, model="m", version="1")


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400), st.integers(1, 4), st.booleans()), max_size=80),
    st.floats(1.0, 1.5),
    st.floats(0.0, 0.3),
)
def test_claims_never_pass_the_limits_unless_the_engine_was_empty(
    jobs: list[tuple[int, int, int, bool]], overfill: float, reserve: float
) -> None:
    admission = Admission(capacity(), overfill, reserve)
    held = []
    for prompt, output, n, release_one in jobs:
        claim = admission.claim(Prepared(prompt, output, n), FIRST_GUESS)
        if admission.fits(claim):
            alone = admission.jobs == 0
            admission.admit(claim)
            held.append(claim)
            assert alone or admission.sequences <= int(10 * overfill)
            assert alone or admission.tokens <= int(1000 * (1 - reserve))
        if release_one and held:
            admission.release(held.pop())
    for claim in held:
        admission.release(claim)
    assert (admission.jobs, admission.sequences, admission.tokens) == (0, 0, 0)


def test_the_largest_job_runs_when_the_engine_is_empty() -> None:
    admission = Admission(capacity(kv=100), 1.15, 0.06)
    huge = admission.claim(Prepared(400, 100, 3), 1000)
    assert admission.fits(huge)
    admission.admit(huge)
    assert admission.full()
    assert not admission.fits(admission.claim(Prepared(1, 1, 1), 1))


def test_expected_output_never_passes_what_the_job_may_produce() -> None:
    assert Admission(capacity(), 1, 0).claim(Prepared(10, 5, 2), 256).tokens == 20


def test_prediction_is_the_upper_quartile_of_what_came() -> None:
    prediction = Prediction()
    assert prediction.expected_output() == FIRST_GUESS
    for n in range(1, 101):
        prediction.learn_output(n)
    assert prediction.expected_output() == 85  # 75th percentile of the last 64: 37..100


def test_characters_per_token_are_learnt() -> None:
    prediction = Prediction()
    for _ in range(100):
        prediction.learn_prompt(200, 100)
    assert abs(prediction.characters_per_token - 2.0) < 0.01
    assert prediction.expected_prompt(400) in (199, 200)
