"""Exercise 11-1: two turns of a conversation, and what the second one reuses."""

from __future__ import annotations

from debugkit.exercises.model import Exercise, Number, Numbers, Place
from debugkit.exercises.model import Question as Q
from debugkit.exercises.model import Text as T
from debugkit.exercises.runs import Laboratory, Prompt, Run

FIRST = "Say hello in one word."
EDITED = "Say goodbye in one word."
SECOND = "What is the capital of France?"
ARGUMENTS = ("--spec", "off", "--max-tokens", "32")
EVENTS = frozenset({"sync", "truncate", "prefill", "decode", "sample"})


def answer(lab: Laboratory, run: Run, prompt: Prompt) -> str:
    """The text of a run's answer."""
    return lab.model.text([i for i in run.samples() if i not in prompt.stop_ids])


def perform(lab: Laboratory) -> dict[str, int | str | tuple[str, ...]]:
    """Turn 1, saved; on its timeline turn 2, turn 2 after an edited turn 1, and turn 1 again."""
    saved = str(lab.directory.resolve() / "turn-1.snapshot")
    prompt = lab.model.prompt(FIRST)
    one = lab.trace(prompt, *ARGUMENTS, "--save", saved, events=EVENTS)
    said = answer(lab, one, prompt)
    later = [*ARGUMENTS, "--restore", saved]
    two = lab.trace(lab.model.prompt(FIRST, said, SECOND), *later, events=EVENTS)
    edited = lab.trace(lab.model.prompt(EDITED, said, SECOND), *later, events=EVENTS)
    again = lab.trace(prompt, *later, events=EVENTS)
    sync, other = two.returns("sync")[0], edited.returns("sync")[0]
    return {
        "n_prompt": one.hits("sync")[0].args["n_tokens"],
        "timeline": two.hits("sync")[0].state.seq_len,
        "n_prompt_2": two.hits("sync")[0].args["n_tokens"],
        "n_kept": sync.result["n_kept"],
        "n_prefilled": two.hits("prefill")[0].args["n_tokens"],
        "prefill_seq_len": two.hits("prefill")[0].state.seq_len,
        "edited_kept": other.result["n_kept"],
        "edited_cached_id": other.result["cached_id"],
        "edited_new_id": other.result["new_id"],
        "again_kept": again.returns("sync")[0].result["n_kept"],
    }


def commands(lab: Laboratory) -> list[str]:
    """What to type. The second turn's ids need the first one's answer: `run` prints them."""
    tail = lab.command(lab.model.prompt(FIRST), *ARGUMENTS, "--save", "turn-1.snapshot")
    target = f" --qemu {lab.qemu}" if lab.qemu is not None else ""
    return [f"debugkit exercise run 11-1{target}", f"debugkit trace {tail}"]


EXERCISE = Exercise(
    id="11-1",
    title=T("Two turns: what is reused", "两轮对话：复用了什么"),
    goal=T(
        "Ask a second question in the same conversation and see that the timeline of the first is "
        "kept: only what is new is prefilled. Then change one word of the first question and see "
        "where the kept prefix ends, and why.",
        "在同一个对话里问第二个问题，看到第一轮的时间线被保留：只有新的部分需要 prefill。"
        "然后改动第一个"
        "问题中的一个词，看被保留的前缀在哪里结束、为什么。",
    ),
    commands=commands,
    see=T(
        "Four runs. Turn 1 keeps 0 tokens and saves its timeline. Turn 2 begins with it: its SYNC "
        "line names how many tokens were kept, at which position the two part and by which ids. "
        "Turn 2 after an edited first question keeps fewer. Turn 1 once more keeps all but one.",
        "共四次运行。第一轮保留 0 个 token，并保存时间线。第二轮从它开始：SYNC "
        "行写明保留了多少个 token、"
        "两者在哪个位置分开、各是哪个 id。改动了第一个问题之后再问，保留得更少。"
        "把第一轮原样再问一次，"
        "除一个以外全部保留。",
    ),
    questions=(
        Q(
            "a1",
            "A",
            T("How long is the prompt of turn 1?", "第一轮的提示有多长？"),
            Number("n_prompt"),
            T('SYNC of the first run, "prompt"', '第一次运行的 SYNC 行，"prompt"'),
        ),
        Q(
            "a2",
            "A",
            T("How long is the timeline that turn 2 finds?", "第二轮看到的时间线有多长？"),
            Number("timeline"),
            T(
                'SYNC of the second run, "cached"; it is the prompt and the answer, '
                "without the id that was never computed",
                '第二次运行的 SYNC 行，"cached"；它是提示加回答，不含从未计算过的那个 id',
            ),
        ),
        Q(
            "a3",
            "A",
            T("How long is the prompt of turn 2?", "第二轮的提示有多长？"),
            Number("n_prompt_2"),
            T('SYNC of the second run, "prompt"', '第二次运行的 SYNC 行，"prompt"'),
        ),
        Q(
            "a4",
            "A",
            T("How many tokens does it keep?", "保留了多少个 token？"),
            Number("n_kept"),
            T('SYNC of the second run, "kept"', '第二次运行的 SYNC 行，"kept"'),
        ),
        Q(
            "a5",
            "A",
            T("How many tokens are prefilled?", "prefill 了多少个 token？"),
            Number("n_prefilled"),
            T(
                "n_tokens of the second run's PF-HIT; with a4 it adds up to a3",
                "第二次运行 PF-HIT 行的 n_tokens；与 a4 之和应为 a3",
            ),
        ),
        Q(
            "a6",
            "A",
            T("seq_len when that prefill is entered?", "进入那次 prefill 时的 seq_len？"),
            Number("prefill_seq_len"),
            T("the second run's PF-HIT", "第二次运行的 PF-HIT 行"),
        ),
        Q(
            "a7",
            "A",
            T(
                "After the edited question: how many tokens are kept?",
                "改动问题之后：保留了多少个 token？",
            ),
            Number("edited_kept"),
            T("SYNC of the third run", "第三次运行的 SYNC 行"),
        ),
        Q(
            "a8",
            "A",
            T(
                "The cached id and the new id where the two part?",
                "两者分开处，缓存中的 id 和新的 id？",
            ),
            Numbers(("edited_cached_id", "edited_new_id")),
            T("SYNC of the third run, its end", "第三次运行的 SYNC 行末尾"),
        ),
        Q(
            "a9",
            "A",
            T(
                "Turn 1 asked once more: how many tokens are kept?",
                "把第一轮原样再问一次：保留了多少个 token？",
            ),
            Number("again_kept"),
            T("SYNC of the fourth run; compare it with a1", "第四次运行的 SYNC 行；与 a1 比较"),
        ),
        Q(
            "b1",
            "B",
            T(
                "Where does n_cached come from: which function sets it?",
                "n_cached 从哪里来：哪个函数设置它？",
            ),
            Place((("completion.c", "keep_prefix"),)),
            T(
                'frame 1 of the SYNC\'s record; part "one request" of that file',
                'SYNC 记录的第 1 帧；该文件的 "one request" 一节',
            ),
        ),
        Q(
            "b2",
            "B",
            T(
                "Which function compares the two rows of ids and leaves one token to compute?",
                "哪个函数比较两串 id，并总是留下一个 token 去计算？",
            ),
            Place((("session.c", "kestrel_sync"),)),
            T("the while loop with n_tokens - 1", "带有 n_tokens - 1 的 while 循环"),
        ),
    ),
    perform=perform,
)
