"""Exercise 13-2: speculation on and off, over text that repeats and text that does not."""

from __future__ import annotations

from debugkit.exercises.model import Choice, Exercise, Facts, Number, Numbers, Place
from debugkit.exercises.model import Question as Q
from debugkit.exercises.model import Text as T
from debugkit.exercises.runs import Laboratory, Run

REPEATED = "Write the word yes ten times."
FREE = "Tell me a short story about a cat."
COUNTER = "Count from 1 to 20."
LENGTH = ("--max-tokens", "48")
OFF = (*LENGTH, "--spec", "off")
EVENTS = frozenset({"sync", "prefill", "decode", "verify", "truncate", "sample"})
YES_NO = {"yes": ("yes", "是"), "no": ("no", "否", "不")}
LETTERS = {letter: (letter,) for letter in "abc"}


def on(k: int) -> tuple[str, ...]:
    """A draft of at most k tokens wherever there is one."""
    return (*LENGTH, "--spec", "on", "--spec-k", str(k))


def counts(name: str, run: Run) -> dict[str, int | str | tuple[str, ...]]:
    """The passes of a run and what became of its drafts."""
    end = run.completion()
    return {
        f"{name}_decodes": end.n_decodes,
        f"{name}_verifies": end.n_verifies or 0,
        f"{name}_drafted": end.n_drafted or 0,
        f"{name}_hits": end.n_hits or 0,
        f"{name}_rolled_back": end.n_rolled_back or 0,
        f"{name}_generated": end.n_generated or 0,
    }


def perform(lab: Laboratory) -> dict[str, int | str | tuple[str, ...]]:
    """Seven runs: two texts, off and on with k 4 and 8, and a text that counts."""
    facts: dict[str, int | str | tuple[str, ...]] = {}
    equal = True
    for name, text in (("repeated", REPEATED), ("free", FREE)):
        prompt = lab.model.prompt(text)
        plain = lab.trace(prompt, *OFF, events=EVENTS)
        facts |= counts(f"{name}_off", plain)
        for k in (4, 8):
            run = lab.trace(prompt, *on(k), events=EVENTS)
            facts |= counts(f"{name}_{k}", run)
            equal = equal and run.samples() == plain.samples()
    counting = lab.trace(lab.model.prompt(COUNTER), *on(8), events=EVENTS)
    facts |= counts("counter", counting)
    facts["equal"] = "yes" if equal else "no"
    return facts


def commands(lab: Laboratory) -> list[str]:
    """What to type; `run` does all seven."""
    target = f" --qemu {lab.qemu}" if lab.qemu is not None else ""
    repeated = lab.model.prompt(REPEATED)
    return [
        f"debugkit exercise run 13-2{target}",
        f"debugkit trace {lab.command(repeated, *OFF)}",
        f"debugkit trace {lab.command(repeated, *on(8))}",
    ]


def _equal(facts: Facts) -> str:
    return str(facts["equal"])


def _b(facts: Facts) -> str:
    return "b"


def _a(facts: Facts) -> str:
    return "a"


EXERCISE = Exercise(
    id="13-2",
    title=T("Speculation on and off", "推测解码：开与关"),
    goal=T(
        "Let the library draft tokens from what it has seen before and verify several in one pass. "
        "See that the answer is the same, how many passes it takes, and which text gains.",
        "让库根据已出现过的内容起草若干 token，并在一遍中验证。看到回答完全相同、"
        "需要多少遍，以及哪种文本受益。",
    ),
    commands=commands,
    see=T(
        "Seven runs: a text that repeats and a free one, each without speculation, with k 4 "
        "and with "
        "k 8; then one that counts. A VER-HIT computes a token and its drafts; a TRUNCATE after it "
        "takes the wrong ones back. Compare the sampled ids and the numbers of passes. "
        "Times under a "
        "debugger say nothing: run the command without it for those.",
        "七次运行：一段重复的文本、一段自由的文本，各有关闭、k 为 4、k 为 8 三种；"
        "最后是一段数数的文本。"
        "VER-HIT 计算一个 token 和它的草稿，其后的 TRUNCATE 收回错的。比较采样到的 id 和遍数。"
        "调试器下的时间没有意义：要看时间，请不带调试器运行。",
    ),
    questions=(
        Q(
            "a1",
            "A",
            T(
                "Are the sampled ids the same with speculation on and off, yes or no?",
                "开与关时采样到的 id 相同吗，是或否？",
            ),
            Choice(YES_NO, _equal, T("yes or no", "是或否")),
            T(
                "compare the SAMPLE lines, or what the programs print",
                "比较 SAMPLE 行，或程序打印的内容",
            ),
        ),
        Q(
            "a2",
            "A",
            T("Repeated text, off: how many decodes?", "重复文本，关闭：几次 decode？"),
            Number("repeated_off_decodes"),
            T("the last line of the first run", "第一次运行的最后一行"),
        ),
        Q(
            "a3",
            "A",
            T(
                "Repeated text, k 8: how many decodes and how many verify passes?",
                "重复文本，k 为 8：几次 decode，几遍验证？",
            ),
            Numbers(("repeated_8_decodes", "repeated_8_verifies")),
            T("the last line of the third run", "第三次运行的最后一行"),
        ),
        Q(
            "a4",
            "A",
            T(
                "Repeated text, k 8: tokens drafted, and of them right?",
                "重复文本，k 为 8：起草了多少 token，其中对的有多少？",
            ),
            Numbers(("repeated_8_drafted", "repeated_8_hits")),
            T("the last line of the third run", "第三次运行的最后一行"),
        ),
        Q(
            "a5",
            "A",
            T("Repeated text, k 8: rows rolled back?", "重复文本，k 为 8：收回了多少行？"),
            Number("repeated_8_rolled_back"),
            T("the sum of the TRUNCATE lines of the third run", "第三次运行中 TRUNCATE 行之和"),
        ),
        Q(
            "a6",
            "A",
            T(
                "Repeated text, k 4: how many decodes and how many verify passes?",
                "重复文本，k 为 4：几次 decode，几遍验证？",
            ),
            Numbers(("repeated_4_decodes", "repeated_4_verifies")),
            T("the last line of the second run", "第二次运行的最后一行"),
        ),
        Q(
            "a7",
            "A",
            T(
                "Free text, k 8: tokens drafted, and of them right?",
                "自由文本，k 为 8：起草了多少 token，其中对的有多少？",
            ),
            Numbers(("free_8_drafted", "free_8_hits")),
            T("the last line of the sixth run", "第六次运行的最后一行"),
        ),
        Q(
            "a8",
            "A",
            T("Counting text, k 8: how many verify passes?", "数数文本，k 为 8：几遍验证？"),
            Number("counter_verifies"),
            T("the last line of the seventh run", "第七次运行的最后一行"),
        ),
        Q(
            "b1",
            "B",
            T(
                "Which function looks for matches of 8 tokens first, then 7, down to 3?",
                "哪个函数先找 8 个 token 的匹配，再找 7 个，一直到 3 个？",
            ),
            Place((("draft.c", "ks_draft_lookup"),)),
            T("draft.c, the loop that counts down", "draft.c 中递减的循环"),
        ),
        Q(
            "b2",
            "B",
            T(
                "Why from 8 down to 3? (a) shorter ones are not in the table (b) a longer match "
                "goes on the same way more often (c) it is faster",
                "为什么从 8 到 3？(a) 更短的不在表里 (b) 更长的匹配更常以同样方式继续 (c) 更快",
            ),
            Choice(LETTERS, _b, T("a, b or c", "a、b 或 c")),
            T(
                "spec.c keeps the acceptance apart by match length: ask why",
                "spec.c 按匹配长度分别记录接受率：想想为什么",
            ),
        ),
        Q(
            "b3",
            "B",
            T(
                "Why does a text that counts hardly hit? (a) no three tokens in a row occur twice "
                "with the same going on (b) drafts are off for digits (c) it is too short",
                "为什么数数的文本几乎不命中？(a) 没有哪三个连续 token 出现两次且后续相同 "
                "(b) 数字不起草 (c) 太短",
            ),
            Choice(LETTERS, _a, T("a, b or c", "a、b 或 c")),
            T(
                "what find_earlier in draft.c demands before it believes a slot",
                "draft.c 的 find_earlier 在相信一个槽之前要求什么",
            ),
        ),
        Q(
            "b4",
            "B",
            T(
                "Which function guards a match that would overlap the tail?",
                "哪个函数防止匹配与尾部重叠而越界？",
            ),
            Place((("draft.c", "find_earlier"), ("draft.c", "copy_following"))),
            T(
                "draft.c: where the end of the match meets the end of the ids",
                "draft.c：匹配的末端碰到 id 末端的地方",
            ),
        ),
        Q(
            "b5",
            "B",
            T("Which function takes back the rows of wrong drafts?", "哪个函数收回错误草稿的行？"),
            Place((("completion.c", "settle"),)),
            T("the backtrace of a TRUNCATE, in the JSON record", "JSON 记录中 TRUNCATE 的回溯"),
        ),
    ),
    perform=perform,
)
