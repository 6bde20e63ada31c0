"""SamplingParams: ranges, messages, and the C form."""

from __future__ import annotations

import math

import pytest

from pykestrel import InvalidArgument, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "0.5"),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("repetition_penalty", -1),
        ("presence_penalty", math.nan),
        ("penalty_window", 2**31),
        ("seed", -1),
        ("seed", 2**64),
        ("n_vocab_sampled", -1),
        ("never_ids", (-1,)),
        ("never_ids", ("a",)),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: "x"}),
    ],
)
def test_out_of_range_names_the_field(field, value):
    with pytest.raises(InvalidArgument, match=field):
        SamplingParams(**{field: value})


def test_c_form():
    struct, _keep = SamplingParams(
        temperature=0.5,
        top_k=7,
        seed=2**64 - 1,
        logit_bias={3: -math.inf, 9: 2.5},
        never_ids=(4, 5),
    ).to_c()
    assert struct.temperature == 0.5
    assert struct.top_k == 7
    assert struct.seed == 2**64 - 1
    biases = [(b.token_id, b.bias) for b in struct.logit_bias[: struct.n_logit_bias]]
    assert biases == [(3, -math.inf), (9, 2.5)]
    assert struct.never_ids[: struct.n_never_ids] == [4, 5]


def test_repr_shows_what_differs():
    assert repr(SamplingParams(top_k=3)) == "SamplingParams(top_k=3)"
