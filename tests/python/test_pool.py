"""SessionPool: which session a request gets, what is evicted, who waits."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pykestrel import Busy, Closed, InvalidArgument
from pykestrel.pool import SessionPool

CONTEXT = 256
WAIT = 120.0


def prompt(seed: int, n: int = 40) -> list[int]:
    return [int(i) for i in np.random.RandomState(seed).randint(0, 200, n)]


def serve(pool, ids, n=4):
    """One request; its session's identity, what matched, and the answer."""
    lease = pool.acquire(ids, max_tokens=n)
    with lease as session:
        generated = session.generate(ids, max_tokens=n, spec="off")
    return session, lease.n_matched, generated


def test_the_longest_prefix_wins_and_is_reused(model):
    with SessionPool(model, 3, context_length=CONTEXT) as pool:
        first, n, answer = serve(pool, prompt(1))
        assert n == 0
        second, n, _ = serve(pool, prompt(2))
        assert n == 0
        assert second is not first
        follow_up = prompt(1) + list(answer.token_ids) + prompt(9, 5)
        third, n, generated = serve(pool, follow_up)
        assert third is first
        assert n == generated.stats.n_cached == 40 + 3  # the last sampled id was never decoded
        with model.session(context_length=CONTEXT) as alone:
            assert alone.generate(follow_up, max_tokens=4).token_ids == generated.token_ids
        stats = pool.stats
        assert (stats.n_sessions, stats.n_in_use, stats.n_acquired) == (2, 0, 3)
        assert (stats.n_matched, stats.n_tokens_matched) == (1, 43)
        assert stats.n_tokens == 40 + 40 + len(follow_up)


def test_of_two_matches_the_longer_one(model):
    with SessionPool(model, 2, context_length=CONTEXT) as pool:
        with pool.acquire(prompt(1)) as a, pool.acquire(prompt(1)) as b:
            a.prefill(prompt(1)[:20])
            b.prefill(prompt(1)[:30])
        lease = pool.acquire(prompt(1))
        assert (lease.session, lease.n_matched) == (b, 30)


def test_without_a_match_the_least_recently_used(model):
    with SessionPool(model, 2, context_length=CONTEXT) as pool:
        first, _, _ = serve(pool, prompt(1))
        second, _, _ = serve(pool, prompt(2))
        assert serve(pool, prompt(1))[0] is first  # used again: now the second is older
        assert serve(pool, prompt(3))[0] is second
        assert serve(pool, prompt(1))[1] == 40


def test_a_small_match_does_not_destroy_a_long_timeline(model):
    """Two conversations with the same opening do not push each other out."""
    opening = prompt(5, 10)
    with SessionPool(model, 2, context_length=CONTEXT) as pool:
        one, _, _ = serve(pool, opening + prompt(1, 60))
        other, n, _ = serve(pool, opening + prompt(2, 60))
        assert other is not one
        assert n == 0
        assert serve(pool, opening + prompt(1, 60) + [7])[:2] == (one, 70)
        assert serve(pool, opening + prompt(2, 60) + [7])[:2] == (other, 70)
    with SessionPool(model, 1, context_length=CONTEXT) as pool:
        serve(pool, opening + prompt(1, 60))
        assert serve(pool, opening + prompt(2, 60))[1] == 10  # there is no other


def test_the_budget_evicts_the_oldest_and_never_the_match(model):
    with SessionPool(model, 4, context_length=CONTEXT) as probe:
        per_token = probe.bytes_per_token
        assert per_token == model.session(context_length=16).kv_bytes_per_token
    # Room for three prompts of 40 with their answers (60 rows are charged for each), no more.
    budget = 3 * 60 * per_token
    with SessionPool(model, 4, max_bytes=budget, context_length=CONTEXT) as pool:
        sessions = [serve(pool, prompt(seed))[0] for seed in (1, 2, 3)]
        assert pool.stats.n_bytes <= budget
        assert pool.stats.n_evicted == 0
        # The oldest session is the match: the second oldest makes room.
        longer = prompt(1) + prompt(7, 30)
        session, n, _ = serve(pool, longer)
        assert session is sessions[0]
        assert n == 40
        assert [s.closed for s in sessions] == [False, True, False]
        stats = pool.stats
        assert (stats.n_evicted, stats.n_sessions) == (1, 2)
        assert stats.n_bytes <= budget


def test_the_budget_holds_whatever_comes(model):
    random = np.random.RandomState(3)
    per_token = model.session(context_length=16).kv_bytes_per_token
    budget = 300 * per_token
    with SessionPool(model, 4, max_bytes=budget, context_length=CONTEXT) as pool:
        for _ in range(40):
            ids = prompt(int(random.randint(6)), int(random.randint(1, 120)))
            with pool.acquire(ids, max_tokens=3) as session:
                assert pool.stats.n_bytes <= budget
                session.generate(ids, max_tokens=3)
            assert pool.stats.n_bytes <= budget
        assert pool.stats.n_evicted > 0
        assert pool.stats.n_matched > 0


def test_a_request_over_the_budget_is_refused_at_once(model):
    per_token = model.session(context_length=16).kv_bytes_per_token
    with SessionPool(model, 2, max_bytes=100 * per_token, context_length=CONTEXT) as pool:
        with pytest.raises(InvalidArgument, match="budget"):
            pool.acquire(prompt(1), max_tokens=100)
        with pytest.raises(InvalidArgument, match=str(CONTEXT)):
            pool.acquire(prompt(1))  # may fill the whole context
        assert serve(pool, prompt(1))[1] == 0  # and nothing is broken


def test_waiting_for_a_session(model):
    with SessionPool(model, 1, context_length=CONTEXT) as pool:
        lease = pool.acquire(prompt(1))
        with pytest.raises(Busy):
            pool.acquire(prompt(2), timeout=0.01)
        got = []
        threads = [
            threading.Thread(target=lambda seed=seed: got.append(serve(pool, prompt(seed))[2]))
            for seed in (1, 2, 3)
        ]
        for thread in threads:
            thread.start()
        assert not got
        lease.release()
        lease.release()
        for thread in threads:
            thread.join(WAIT)
        assert len(got) == 3
        assert pool.stats.n_in_use == 0


def test_many_threads_get_the_answers_of_one(model):
    prompts = [prompt(seed % 5, 20 + seed) for seed in range(24)]
    with model.session(context_length=CONTEXT) as alone:
        expected = [
            alone.generate(ids, max_tokens=4, reuse_prefix=False).token_ids for ids in prompts
        ]
    answers: dict[int, tuple[int, ...]] = {}
    with SessionPool(model, 3, context_length=CONTEXT) as pool:

        def work(start: int) -> None:
            for i in range(start, len(prompts), 4):
                answers[i] = serve(pool, prompts[i])[2].token_ids

        threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert pool.stats.n_acquired == len(prompts)
        assert pool.stats.n_sessions <= 3
    assert [answers[i] for i in range(len(prompts))] == expected


def test_an_abandoned_completion_costs_its_session_only(model):
    with SessionPool(model, 1, context_length=CONTEXT) as pool:
        lease = pool.acquire(prompt(1))
        tokens = iter(lease.session.stream(prompt(1), max_tokens=0))
        next(tokens)
        lease.release()  # while it runs
        assert lease.session.closed
        assert serve(pool, prompt(2))[0] is not lease.session
        assert pool.stats.n_sessions == 1


def test_a_session_closed_by_its_user_is_replaced(model):
    with SessionPool(model, 1, context_length=CONTEXT) as pool:
        with pool.acquire(prompt(1)) as session:
            session.close()
        assert pool.stats.n_sessions == 0
        assert serve(pool, prompt(1))[0] is not session


def test_close_ends_everything(model):
    pool = SessionPool(model, 1, context_length=CONTEXT)
    lease = pool.acquire(prompt(1))
    failed = threading.Event()

    def wait() -> None:
        try:
            pool.acquire(prompt(2))
        except Closed:
            failed.set()

    thread = threading.Thread(target=wait)
    thread.start()
    pool.close()
    pool.close()
    assert failed.wait(WAIT)
    thread.join(WAIT)
    assert lease.session.closed
    lease.release()
    with pytest.raises(Closed):
        pool.acquire(prompt(1))


@pytest.mark.parametrize("options", [{"n_sessions": 0}, {"max_bytes": -1}, {"kv_type": "f64"}])
def test_options_out_of_range(model, options):
    with pytest.raises(InvalidArgument):
        SessionPool(model, **options)
