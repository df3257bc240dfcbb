# SPDX-License-Identifier: Apache-2.0
"""A tenant's limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.access.limits import Allowance, LimitExceededError, TenantLimits
from app.access.tenants import Tenant, hash_of
from tests.cache.helpers import Clock


@pytest.fixture
def clock():
    return Clock()


def limits(clock, **given):
    return TenantLimits(Tenant(name="acme", keys=(hash_of("key"),), **given), clock)


def use(limits, tokens=0):
    with limits.request() as spending:
        spending.begin(0, 1)
        spending.charge(tokens)
        spending.end(1)


def test_each_prompt_and_each_answer_is_a_request_of_the_minute(clock):
    unlimited = limits(clock)
    for _ in range(10_000):
        use(unlimited, 1_000_000)
    some = limits(clock, requests_per_minute=10)
    with some.request() as listed:
        for _ in range(3):  # prompts
            listed.begin(1, 2)
        listed.end(6)
    use(some)
    with some.request() as last:
        last.begin(1, 6)  # more than are left, which those after it wait for
        last.end(6)
    with pytest.raises(LimitExceededError, match="requests per minute are used up") as caught:
        use(some)
    assert caught.value.retry_after_s == 24
    clock.now += 24
    use(some)


def test_the_beams_of_an_answer_are_counted_once(clock):
    """The engine is asked for each beam's next token."""
    some = limits(clock, requests_per_minute=4)
    with some.request() as searching:
        for number in (1, 3, 3, 3):
            for _ in range(number):
                searching.begin(1, 1)
            searching.end(number)
    use(some)
    with pytest.raises(LimitExceededError):
        use(some)


def test_a_debt_of_tokens_is_paid_before_anything_else_starts_and_refused_requests_cost_nothing(clock):
    """An answer's cost is unknown at its start."""
    both = limits(clock, requests_per_minute=2, tokens_per_minute=1000)
    use(both, 3000)
    for _ in range(100):
        with pytest.raises(LimitExceededError, match="tokens per minute are used up") as caught:
            use(both)
    assert caught.value.retry_after_s == 171  # until one token is left
    clock.now += 171
    use(both)


def test_of_many_requests_at_once_no_other_runs_once_one_has_taken_all_tokens(clock):
    some = limits(clock, tokens_per_minute=1000)
    with some.request() as first, some.request() as second, some.request() as third:
        first.begin(100, 1)
        second.begin(900, 1)
        with pytest.raises(LimitExceededError, match="tokens per minute are used up"):
            third.begin(1, 1)
        first.begin(50, 1)  # another of its prompts
        second.charge(50)


def test_answers_count_as_requests_at_once(clock):
    some = limits(clock, concurrent_requests=8)
    with some.request() as first:
        first.begin(1, 4)
        first.begin(1, 4)
        with pytest.raises(LimitExceededError, match=r"9 requests or answers .* would run at once; its limit is 8"):
            first.begin(1, 1)
        with pytest.raises(LimitExceededError), some.request():
            pass
        first.end(4)
        with some.request() as second, pytest.raises(LimitExceededError, match=r"9 requests or answers"):
            second.begin(1, 5)
    with some.request() as third:
        third.begin(1, 8)
        third.end(8)
        third.begin(1, 8)


def test_ten_seconds_worth_of_tokens_may_be_used_at_once(clock):
    some = limits(clock, tokens_per_minute=6000)
    clock.now += 600
    for _ in range(10):
        use(some, 100)
    with pytest.raises(LimitExceededError):
        use(some)
    clock.now += 10
    for _ in range(10):
        use(some, 100)


def test_requests_at_once_end_with_an_error_too(clock):
    two = limits(clock, concurrent_requests=2)
    with two.request(), two.request(), pytest.raises(LimitExceededError, match=r"3 requests or answers .* limit is 2"):
        use(two)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), two.request():
            raise ZeroDivisionError
    with two.request() as late:
        late.begin(1, 2)
    late.end(2)  # a stream that nobody reads ends when it is collected, and gives nothing back twice
    with two.request(), two.request(), pytest.raises(LimitExceededError), two.request():
        pass


steps = st.lists(st.tuples(st.floats(0, 90), st.integers(1, 100)), max_size=40)


@given(st.integers(1, 600), st.sampled_from([10, 60]), steps)
def test_no_minute_has_more_than_what_may_be_used_at_once_another_minutes_worth_and_the_last_request(
    per_minute, at_once_s, steps
):
    clock = Clock()
    allowance = Allowance(per_minute, at_once_s, clock)
    taken = []
    for seconds, amount in steps:
        clock.now += seconds
        if allowance.wait_s(1) == 0:
            allowance.take(amount)
            taken.append((clock.now, amount))
    for start, _ in taken:
        within = [amount for at, amount in taken if start <= at < start + 60]
        assert sum(within[:-1]) <= per_minute + max(1, per_minute * at_once_s / 60)
