"""Exercises: what to do at the debugger, what to see, and questions whose answers are checked
against a fresh run. `EXERCISES` lists them by number."""

from __future__ import annotations

from debugkit.exercises import e11_1, e13_2, e15_2, e15_3
from debugkit.exercises.model import Exercise

EXERCISES: dict[str, Exercise] = {
    exercise.id: exercise
    for exercise in (e11_1.EXERCISE, e13_2.EXERCISE, e15_2.EXERCISE, e15_3.EXERCISE)
}
