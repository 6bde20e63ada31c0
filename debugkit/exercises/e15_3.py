"""Exercise 15-3: from the prefill into the decode loop, step by step, until EOS."""

from __future__ import annotations

from debugkit.exercises.e15_2 import ARGUMENTS, QUESTION, measure
from debugkit.exercises.model import Choice, Exercise, Facts, Number, Numbers, Place
from debugkit.exercises.model import Question as Q
from debugkit.exercises.model import Text as T
from debugkit.exercises.runs import Laboratory, Run
from debugkit.records import Return

EVENTS = frozenset({"prefill", "decode", "sync", "sample", "layer"})
SCRIPT = "layer finish token layer finish token continue"
YES_NO = {"yes": ("yes", "是"), "no": ("no", "否", "不")}
DOORS = {"prefill": ("prefill", "kestrel_prefill"), "decode": ("decode", "kestrel_decode")}


def after_layer(run: Run, index: int) -> Return:
    """The state when a layer has come back, counted over the whole run."""
    return run.returns("layer")[index]


def perform(lab: Laboratory) -> dict[str, int | str | tuple[str, ...]]:
    """The request of 15-2, with the layers of each pass."""
    run = lab.trace(lab.model.prompt(QUESTION), *ARGUMENTS, events=EVENTS)
    facts = measure(run)
    n_layers = len(run.hits("prefill")[0].state.cache_len)
    first, decoding = after_layer(run, 0).state, after_layer(run, n_layers).state
    fed = [hit.args["token_id"] for hit in run.hits("decode")]
    facts |= {
        "n_layers": n_layers,
        "layer_0": first.cache_len[0],
        "layer_1": first.cache_len[1] if n_layers > 1 else 0,
        "inside_seq_len": first.seq_len,
        "prefilled_seq_len": run.returns("prefill")[0].state.seq_len,
        "first_id": run.samples()[0],
        "decoding_0": decoding.cache_len[0],
        "decoding_1": decoding.cache_len[1] if n_layers > 1 else 0,
        "last_decoded": "yes" if facts["n_sampled"] == len(fed) else "no",
    }
    return facts


def commands(lab: Laboratory) -> list[str]:
    """What to type: by hand, and the same walk as a script."""
    tail = lab.command(lab.model.prompt(QUESTION), *ARGUMENTS)
    return [
        f"debugkit step {tail}",
        f'debugkit step --script "{SCRIPT}" {tail}',
        f"debugkit watch 'seq_len,cache_len[0]' {tail}",
    ]


def _last_decoded(facts: Facts) -> str:
    return str(facts["last_decoded"])


def _leaves_logits(facts: Facts) -> str:
    return "prefill" if facts["n_prefills"] else "decode"


EXERCISE = Exercise(
    id="15-3",
    title=T("From the prefill into the loop", "从 prefill 走进循环"),
    goal=T(
        "Walk through one request: layer by layer in the prefill, then token by token to the end. "
        "See when a layer's cache grows, when seq_len follows, and that sampling comes before "
        "decoding.",
        "一步一步走完一个请求：prefill 中逐层走，之后逐 token 走到结束。"
        "看清各层的缓存何时增长，seq_len "
        "何时跟上，以及为什么先采样、后 decode。",
    ),
    commands=commands,
    see=T(
        "In the prefill the bars of cache_len fill one layer after the other while seq_len stands "
        "still; after the pass seq_len has caught up. Then each token repeats this with one "
        "row. The "
        "last sampled id ends the request and is computed no more.",
        "prefill 中 cache_len 的条一层接一层变满，而 seq_len 不动；这一遍结束后 seq_len "
        "跟上。之后每个 "
        "token 用一行重复同样的过程。最后采样到的 id 结束请求，不再参与计算。",
    ),
    questions=(
        Q(
            "a1",
            "A",
            T(
                "cache_len of layers 0 and 1 after the first `layer`?",
                "第一次 `layer` 之后，第 0、1 层的 cache_len？",
            ),
            Numbers(("layer_0", "layer_1")),
            T("the bars after the first `layer`", "第一次 `layer` 之后的条"),
        ),
        Q(
            "a2",
            "A",
            T("seq_len at the same moment?", "同一时刻的 seq_len？"),
            Number("inside_seq_len"),
            T("the line seq_len; it moves last", "seq_len 行；它最后才变"),
        ),
        Q(
            "a3",
            "A",
            T("seq_len after `finish`?", "`finish` 之后的 seq_len？"),
            Number("prefilled_seq_len"),
            T('the panel "after the pass"', '标着 "after the pass" 的面板'),
        ),
        Q(
            "a4",
            "A",
            T(
                "Which id is sampled from the prefill's logits?",
                "从 prefill 的 logits 采样到哪个 id？",
            ),
            Number("first_id"),
            T('the line "sampled" at decode 1', 'decode 1 处的 "sampled" 行'),
        ),
        Q(
            "a5",
            "A",
            T(
                "cache_len of layers 0 and 1 after one `layer` in decode 1?",
                "在 decode 1 中 `layer` 一次之后，第 0、1 层的 cache_len？",
            ),
            Numbers(("decoding_0", "decoding_1")),
            T("the bars after that `layer`", "那次 `layer` 之后的条"),
        ),
        Q(
            "a6",
            "A",
            T("How many layers does each pass go through?", "每一遍经过多少层？"),
            Number("n_layers"),
            T("the highest layer of the bars, plus one", "条上最大的层号加一"),
        ),
        Q(
            "a7",
            "A",
            T("How many decodes until the end?", "到结束共有几次 decode？"),
            Number("n_decodes"),
            T('the line "request 1 ends"', '"request 1 ends" 那一行'),
        ),
        Q(
            "a8",
            "A",
            T(
                "Is the last sampled id decoded, yes or no?",
                "最后采样到的 id 会被 decode 吗，是或否？",
            ),
            Choice(YES_NO, _last_decoded, T("yes or no", "是或否")),
            T("what comes after the last sampled id", "最后采样到的 id 之后发生了什么"),
        ),
        Q(
            "b1",
            "B",
            T(
                "Why sample, then decode, and not the reverse: which door leaves the logits that "
                "the first sample needs, prefill or decode?",
                "为什么是先采样后 decode 而不是相反：第一次采样所需的 logits 由哪扇门留下，"
                "prefill 还是 decode？",
            ),
            Choice(DOORS, _leaves_logits, T("prefill or decode", "prefill 或 decode")),
            T(
                "decode_loop in completion.c: what it reads before its first pass",
                "completion.c 的 decode_loop：它在第一遍之前读了什么",
            ),
        ),
        Q(
            "b2",
            "B",
            T("Where does cache_len[l] move?", "cache_len[l] 在哪里改变？"),
            Place((("layer.c", "store_heads"),)),
            T(
                "debugkit watch 'cache_len[0]' shows who writes",
                "debugkit watch 'cache_len[0]' 显示是谁写的",
            ),
        ),
        Q(
            "b3",
            "B",
            T("Where does seq_len move in a pass?", "一遍中 seq_len 在哪里改变？"),
            Place((("forward.c", "ks_forward"),)),
            T("debugkit watch seq_len shows who writes", "debugkit watch seq_len 显示是谁写的"),
        ),
    ),
    perform=perform,
)
