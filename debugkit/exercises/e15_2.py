"""Exercise 15-2: the two backtraces of a request, and how many decodes it takes."""

from __future__ import annotations

from debugkit.exercises.model import Chain, Choice, Exercise, Facts, Number, Numbers, Place
from debugkit.exercises.model import Question as Q
from debugkit.exercises.model import Text as T
from debugkit.exercises.runs import Laboratory, Run, functions

QUESTION = "Say hello in one word."
ARGUMENTS = ("--spec", "off", "--max-tokens", "32")
ENDS = {"stop": ("eos", "stop", "stop id"), "length": ("max_tokens", "length")}


def measure(run: Run) -> dict[str, int | str | tuple[str, ...]]:
    """The facts of one request with its samples."""
    prefills, decodes, completion = run.hits("prefill"), run.hits("decode"), run.completion()
    first = decodes[0] if decodes else prefills[-1]
    return {
        "n_prefills": len(prefills),
        "n_tokens": prefills[0].args["n_tokens"],
        "prefill_seq_len": prefills[0].state.seq_len,
        "prefill_cache_len": prefills[0].state.cache_len[0],
        "prefill_frames": functions(prefills[0], 2),
        "decode_frames": functions(first, 3),
        "decode_seq_len": first.state.seq_len,
        "n_decodes": len(decodes),
        "n_sampled": len(run.samples()),
        "last_id": run.samples()[-1],
        "max_tokens": completion.max_tokens or 0,
        "finish": completion.finish or "none",
    }


def perform(lab: Laboratory) -> dict[str, int | str | tuple[str, ...]]:
    """One request, speculation off, so that each further token is a decode."""
    return measure(lab.trace(lab.model.prompt(QUESTION), *ARGUMENTS))


def commands(lab: Laboratory) -> list[str]:
    """What to type."""
    tail = lab.command(lab.model.prompt(QUESTION), *ARGUMENTS)
    return [
        f"debugkit trace --json 15-2.jsonl {tail}",
        f"debugkit trace --only prefill,decode {tail}",
    ]


def _finish(facts: Facts) -> str:
    return str(facts["finish"])


EXERCISE = Exercise(
    id="15-2",
    title=T("One prefill and N decodes", "一次 prefill 与 N 次 decode"),
    goal=T(
        "Stop at the two doors of the library while it answers one question. See that the prompt "
        "goes through kestrel_prefill at once, every further token through kestrel_decode alone, "
        "and why there are fewer decodes than max_tokens allows.",
        "在库回答一个问题时，停在它的两扇门前：整个提示一次经过 kestrel_prefill，之后每个 "
        "token 单独经过 "
        "kestrel_decode；并弄清为什么 decode 的次数少于 max_tokens 允许的次数。",
    ),
    commands=commands,
    see=T(
        "One PF-HIT with an empty cache, called by run_completion. Then SAMPLE and DEC-HIT "
        "in turn: "
        "kestrel_decode called by decode_loop called by run_completion, seq_len one more "
        "each time. "
        "After the last SAMPLE no DEC-HIT follows. The last line counts both.",
        "一次 PF-HIT，此时缓存为空，调用者是 run_completion。之后 SAMPLE 与 DEC-HIT "
        "交替出现：kestrel_decode "
        "由 decode_loop 调用，后者由 run_completion 调用，seq_len 每次加一。最后一个 SAMPLE "
        "之后不再有 "
        "DEC-HIT。最后一行给出两者的次数。",
    ),
    questions=(
        Q(
            "a1",
            "A",
            T("How often is kestrel_prefill entered?", "kestrel_prefill 被进入几次？"),
            Number("n_prefills"),
            T("count the PF-HIT lines", "数一数 PF-HIT 行"),
        ),
        Q(
            "a2",
            "A",
            T("How many tokens does it get?", "它得到多少个 token？"),
            Number("n_tokens"),
            T("n_tokens in the PF-HIT line", "PF-HIT 行里的 n_tokens"),
        ),
        Q(
            "a3",
            "A",
            T("seq_len and cache_len[0] at that moment?", "那一刻的 seq_len 和 cache_len[0]？"),
            Numbers(("prefill_seq_len", "prefill_cache_len")),
            T(
                "the PF-HIT line; the stop is at the entry, before anything is computed",
                "看 PF-HIT 行；停在入口处，此时什么都还没有计算",
            ),
        ),
        Q(
            "a4",
            "A",
            T("Frames 0 and 1 of the prefill?", "prefill 的第 0、1 帧？"),
            Chain("prefill_frames"),
            T("#0 and #1 under PF-HIT", "PF-HIT 下面的 #0 和 #1"),
        ),
        Q(
            "a5",
            "A",
            T("Frames 0, 1 and 2 of the first decode?", "第一次 decode 的第 0、1、2 帧？"),
            Chain("decode_frames"),
            T("#0, #1 and #2 under DEC-HIT 1", "DEC-HIT 1 下面的 #0、#1、#2"),
        ),
        Q(
            "a6",
            "A",
            T("seq_len at the first decode?", "第一次 decode 时的 seq_len？"),
            Number("decode_seq_len"),
            T("the line DEC-HIT 1; compare it with a2", "DEC-HIT 1 那一行；与 a2 比较"),
        ),
        Q(
            "a7",
            "A",
            T("How many decodes are there?", "一共有几次 decode？"),
            Number("n_decodes"),
            T("the last line of the trace", "trace 的最后一行"),
        ),
        Q(
            "a8",
            "A",
            T("How many ids are sampled?", "一共采样了几个 id？"),
            Number("n_sampled"),
            T("count the SAMPLE lines, the last one too", "数一数 SAMPLE 行，最后一行也算"),
        ),
        Q(
            "a9",
            "A",
            T("Which id is sampled last?", "最后采样到的 id 是哪个？"),
            Number("last_id"),
            T("the last SAMPLE line", "最后一行 SAMPLE"),
        ),
        Q(
            "a10",
            "A",
            T("What ends the answer: EOS or max_tokens?", "回答因何结束：EOS 还是 max_tokens？"),
            Choice(ENDS, _finish, T("EOS or max_tokens", "EOS 或 max_tokens")),
            T(
                "the last line of the trace; compare a8 with max_tokens",
                "trace 的最后一行；把 a8 与 max_tokens 比较",
            ),
        ),
        Q(
            "b1",
            "B",
            T(
                "Which function compares a sampled id with the stop ids?",
                "哪个函数把采样到的 id 与停止 id 比较？",
            ),
            Place((("completion.c", "is_stop_id"),)),
            T(
                'completion.c, part "the loop", from the top',
                'completion.c 中 "the loop" 一节，从头看起',
            ),
        ),
        Q(
            "b2",
            "B",
            T(
                "In which function stands the loop sample, report, decode?",
                "采样、报告、decode 的循环在哪个函数里？",
            ),
            Place((("completion.c", "decode_loop"),)),
            T(
                "frame 1 of the decode's backtrace gives file and line",
                "decode 的回溯中第 1 帧给出文件和行号",
            ),
        ),
        Q(
            "b3",
            "B",
            T(
                "Which function decides why a token is the last one (stop id, max_tokens, full "
                "context)?",
                "哪个函数判断一个 token 为什么是最后一个（停止 id、max_tokens、上下文已满）？",
            ),
            Place((("completion.c", "finish_after"),)),
            T(
                "follow what decode_loop calls between sampling and decoding",
                "看 decode_loop 在采样与 decode 之间调用了什么",
            ),
        ),
    ),
    perform=perform,
)
