from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from service.engine import bounds, build
from service.engine.protocol import Capacity, Prepared
from service.engine.vllm import arguments
from service.frames import Usage
from service.scheduler.admission import Admission
from service.scheduler.prediction import FIRST_GUESS, Prediction, Price
from service.settings import EngineSettings, Settings


def capacity(seqs: int = 10, kv: int = 1000, block: int = 1) -> Capacity:
    return Capacity(max_model_len=512, max_num_seqs=seqs, kv_tokens=kv, block_size=block, model="m", version="1")


@given(
    st.lists(
        st.tuples(
            st.integers(1, 400), st.integers(1, 400), st.integers(1, 4), st.booleans(), st.sampled_from([0.0, 0.5, 1.0])
        ),
        max_size=80,
    ),
    st.integers(0, 5),
    st.floats(0.0, 0.3),
    st.sampled_from([1, 16]),
)
def test_claims_never_pass_the_limits_unless_the_engine_was_empty(
    jobs: list[tuple[int, int, int, bool, float]], reserved: int, reserve: float, block: int
) -> None:
    admission = Admission(capacity(block=block), reserved, reserve)
    held = []
    for prompt, output, n, release_one, lift in jobs:
        claim = admission.claim(Prepared(prompt, output, n), FIRST_GUESS)
        assert claim.tokens >= prompt + n * min(output, FIRST_GUESS), "whole blocks"
        if admission.fits(claim, lift):
            alone = admission.jobs == 0
            admission.admit(claim)
            held.append(claim)
            most = int(1000 * (1 - reserve))
            assert alone or admission.sequences <= 10 - reserved + int(reserved * lift)
            assert alone or admission.tokens <= most + int((1000 - most) * lift)
        if release_one and held:
            admission.release(held.pop())
    for claim in held:
        admission.release(claim)
    assert (admission.jobs, admission.sequences, admission.tokens, admission._growth) == (0, 0, 0, 0)


def test_the_largest_job_runs_when_the_engine_is_empty() -> None:
    admission = Admission(capacity(kv=100), 1, 0.06)
    huge = admission.claim(Prepared(400, 100, 30), 1000)
    assert admission.fits(huge)
    admission.admit(huge)
    assert not admission.fits(admission.claim(Prepared(1, 1, 1), 1), lift=1.0)


def test_expected_output_never_passes_what_the_job_may_produce() -> None:
    assert Admission(capacity()).claim(Prepared(10, 5, 2), 256).tokens == 20


def test_a_job_that_produces_more_than_was_expected_takes_more_room() -> None:
    """Else the cache would be promised twice, and running sequences put back for want of blocks."""
    admission = Admission(capacity(kv=1000))
    long = admission.claim(Prepared(100, 800, 1), 100)
    admission.admit(long)
    assert admission.fits(admission.claim(Prepared(100, 300, 1), 300))
    assert admission.grow(long, 700) == 600
    assert not admission.fits(admission.claim(Prepared(100, 300, 1), 300))
    assert admission.grow(long, 500) == 0, "it never shrinks"
    admission.release(long)
    assert admission.tokens == 0


def test_prompts_that_running_jobs_share_leave_room_for_more() -> None:
    """Ten jobs claim a prompt of 80 tokens each, and it is in the cache once."""
    admission = Admission(capacity(seqs=100, kv=1000))
    claims = [admission.claim(Prepared(80, 20, 1), 20, cached=0.9) for _ in range(11)]
    for claim in claims[:10]:
        admission.admit(claim)
        admission.produced(claim, 10)
    assert not admission.fits(claims[10])
    admission.measure((80 + 10 * 10) / 1000)  # in use: the prompt, and ten tokens of each
    assert admission.fits(claims[10])
    admission.measure(0.95)
    assert not admission.fits(claims[10])


def test_what_was_admitted_after_the_measuring_counts_whole() -> None:
    admission = Admission(capacity(seqs=100, kv=1000))
    admission.admit(admission.claim(Prepared(1, 1, 1), 1))
    admission.measure(0.0)
    count = 0
    while admission.fits(claim := admission.claim(Prepared(90, 10, 1), 10)):
        admission.admit(claim)
        count += 1
    assert count == 9


def test_an_engine_has_slots_for_the_ordinary_and_the_reserve() -> None:
    settings = EngineSettings(max_num_seqs=64, overfill=1.15, reserve=0.06)
    assert (bounds.ordinary(settings), bounds.reserved(settings), bounds.slots(settings)) == (73, 3, 76)
    small = EngineSettings(max_num_seqs=1, overfill=1.0, reserve=0.06)
    assert (bounds.ordinary(small), bounds.reserved(small)) == (1, 1), "at least one"
    assert bounds.reserved(EngineSettings(reserve=0.0)) == 0


def test_the_engine_that_is_built_has_them_all_and_its_graphs_cover_them() -> None:
    wanted = EngineSettings(kind="simulated", max_num_seqs=512, overfill=1.0, reserve=0.06, sim_start_s=0.0)
    engine = build(Settings(engine=wanted), str)
    assert asyncio.run(engine.start()).max_num_seqs == bounds.slots(wanted) == 542
    assert arguments.arguments(wanted, True, frozenset()).get("max_cudagraph_capture_size") is None, "eager on a CPU"
    assert arguments.graphs(542, False) == {"max_cudagraph_capture_size": 544}
    assert arguments.graphs(512, False) == {}


def test_prediction_is_the_upper_quartile_of_what_came() -> None:
    prediction = Prediction()
    assert prediction.expected_output() == FIRST_GUESS
    for n in range(1, 101):
        prediction.learn_output(n)
    assert prediction.expected_output() == 85  # 75th percentile of the last 64: 37..100


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=200))
def test_the_ranked_outputs_are_the_last_ones(outputs: list[int]) -> None:
    prediction = Prediction()
    for tokens in outputs:
        prediction.learn_output(tokens)
    assert prediction.ranked == sorted(outputs[-64:])


def test_characters_per_token_are_learnt() -> None:
    prediction = Prediction()
    for _ in range(100):
        prediction.learn_prompt(200, 100)
    assert abs(prediction.characters_per_token - 2.0) < 0.01
    assert prediction.expected_prompt(400) in (199, 200)


def test_cached_prompts_cost_nothing_and_that_is_learnt() -> None:
    assert Price(1, 8).of(Usage(prompt=100, completion=10, cached=96)) == 4 + 80
    prediction = Prediction()
    for _ in range(100):
        prediction.learn_cached(Usage(prompt=100, completion=1, cached=75))
    assert abs(prediction.cached - 0.75) < 0.01
