"""One client of a puzzle gym: lines in, lines out, without a socket.

    menu    NAME|NUMBER [easy|medium|hard] [SEED], help, mode NAME, quit
    puzzle  show, hint, stats, check, reset, seed, help, mode NAME, menu, quit - anything else is an action

It speaks the puzzle arcade's protocol, so clients of one can play the other. In JSON mode every reply is one object
per line; results have `reward`, `terminated` and `truncated` in addition to `success`, `code` and `message`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from query_mutator.batching.streaming.gym_types import GymOutputMode, PuzzleDifficulty

__all__ = ["Game", "Play", "Session", "StepOutcome", "TextEnv"]

RULER = "=" * 50
MAX_SEED = 2**31


class StepOutcome(NamedTuple):
    """The result of an action; `valid` is False if the environment does not know it, and then nothing has changed."""

    text: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool = False  # the puzzle is solved
    valid: bool = True
    info: Mapping[str, Any] = {}


class TextEnv(Protocol):
    """A puzzle in words. Each connection has its own; its methods run in a thread of the server's pool."""

    def reset(self, *, seed: int, difficulty: str) -> str:
        """Start an episode and return the observation."""
        ...

    def step(self, action: str) -> StepOutcome:
        """Take an action in words."""
        ...

    def hint(self) -> str | None:
        """Return an action worth trying, or None."""
        ...

    def help(self) -> str:
        """Return the rules and the actions, for a person."""
        ...

    def close(self) -> None:
        """Release resources."""
        ...


class Game(NamedTuple):
    """A puzzle on the menu."""

    title: str
    description: str
    make: Callable[[], TextEnv]


@dataclass(slots=True, kw_only=True)
class Play:
    """A puzzle being played."""

    env: TextEnv
    over: bool = False
    # what JSON clients see
    game: str
    difficulty: str
    seed: int
    moves: int = 0
    invalid_moves: int = 0
    hints_used: int = 0
    total_reward: float = 0.0
    is_complete: bool = False
    text: str

    def counts(self) -> dict[str, Any]:
        """Return the state without its text, as JSON clients see it."""
        return {name: getattr(self, name) for name in self.__slots__ if name not in ("env", "over", "text")}

    def state(self) -> dict[str, Any]:
        """Return the state as JSON clients see it."""
        return {**self.counts(), "text": self.text}


@dataclass(slots=True)
class Session:
    """One client: its output mode and the puzzle it plays. `answer` is the whole protocol."""

    games: Sequence[Game]
    rng: np.random.Generator
    mode: GymOutputMode = GymOutputMode.NORMAL
    play: Play | None = None
    ended: bool = False
    _lines: list[str] = field(default_factory=list)

    def greeting(self) -> list[str]:
        """Return the menu."""
        rows = [f"  {number}) {game.title} - {game.description}" for number, game in enumerate(self.games, start=1)]
        commands = "Commands: NUMBER|NAME [easy|medium|hard] [SEED], mode NAME, help, quit"
        return [RULER, "Puzzles", RULER, *rows, "", commands, RULER]

    def answer(self, line: str) -> list[str]:
        """Carry out one line and return the lines that answer it."""
        self._lines = []
        words = line.strip().split()
        if words:
            verb = words[0].lower()
            if verb in ("quit", "exit", "q"):
                self._lines.append("Goodbye!")
                self.ended = True
            elif verb == "mode":
                self._set_mode(words[1].lower() if len(words) == 2 else "")
            elif self.play is None:
                self._in_menu(verb, words[1:])
            else:
                self._in_puzzle(self.play, verb, line.strip())
        return self._lines

    def close(self) -> None:
        """Leave the puzzle."""
        play, self.play = self.play, None
        if play is not None:
            play.env.close()

    def _say(self, value: Mapping[str, Any], *lines: str) -> None:
        """Reply with `value` in JSON mode, otherwise with `lines`."""
        if self.mode is GymOutputMode.JSON:
            lines = (json.dumps(value, separators=(",", ":"), ensure_ascii=False),)
        self._lines += lines

    # --- menu ------------------------------------------------------------------------------------------------------

    def _set_mode(self, name: str) -> None:
        if name in set(GymOutputMode):
            self.mode = GymOutputMode(name)
            self._say({"type": "mode", "success": True, "mode": name}, f"Output mode set to: {name}")
        else:
            reply = {"type": "error", "code": "INVALID_MODE", "mode": name}
            self._say(reply, f"Invalid mode '{name}'. Choose: {', '.join(GymOutputMode)}")

    def _in_menu(self, verb: str, rest: Sequence[str]) -> None:
        if verb in ("help", "h", "menu"):
            self._lines += self.greeting()
            return
        titles = [game.title.lower().replace(" ", "_") for game in self.games]
        number = int(verb) - 1 if verb.isdecimal() else titles.index(verb) if verb in titles else -1
        if not 0 <= number < len(self.games):
            self._lines.append("Unknown command. Type 'help' to see available options.")
            return
        difficulty = rest[0].lower() if rest else PuzzleDifficulty.EASY.value
        seed = rest[1] if len(rest) > 1 else ""
        if difficulty not in set(PuzzleDifficulty) or (seed and not seed.isdecimal()):
            self._lines.append(f"Invalid start. Difficulty is one of {', '.join(PuzzleDifficulty)}, SEED a number.")
            return
        self._start(self.games[number], difficulty, int(seed) if seed else int(self.rng.integers(MAX_SEED)))

    def _start(self, game: Game, difficulty: str, seed: int) -> None:
        env = game.make()
        try:
            text = env.reset(seed=seed, difficulty=difficulty)
        except BaseException:
            env.close()
            raise
        self.play = Play(env=env, game=game.title, difficulty=difficulty, seed=seed, text=text)
        self._show(self.play)

    # --- puzzle ----------------------------------------------------------------------------------------------------

    def _in_puzzle(self, play: Play, verb: str, line: str) -> None:
        commands: dict[str, Callable[[Play], None]] = {
            "show": self._show,
            "observe": self._show,
            "hint": self._hint,
            "stats": self._stats,
            "check": self._check,
            "reset": self._reset,
            "seed": self._seed,
            "help": self._help,
            "menu": self._menu,
        }
        if verb == line.lower() and verb in commands:
            commands[verb](play)
        else:
            self._act(play, line)

    def _act(self, play: Play, action: str) -> None:
        if play.over:
            self._result(play, StepOutcome("The puzzle is over. Type 'menu' or 'reset'.", valid=False), code="OVER")
            return
        outcome = play.env.step(action)
        if not outcome.valid:
            play.invalid_moves += 1
            self._result(play, outcome, code="INVALID")
            return
        play.moves += 1
        play.total_reward += outcome.reward
        play.text, play.over, play.is_complete = outcome.text, outcome.terminated or outcome.truncated, outcome.success
        self._result(play, outcome, code="OK")
        self._show(play)
        if play.over:
            self._complete(play)

    def _result(self, play: Play, outcome: StepOutcome, *, code: str) -> None:
        reply = {
            "type": "result",
            "success": outcome.valid,
            "code": code,
            "message": "" if outcome.valid else outcome.text,
            "reward": outcome.reward,
            "terminated": outcome.terminated,
            "truncated": outcome.truncated,
            "state": play.state(),
            **({"info": dict(outcome.info)} if outcome.info else {}),
        }
        self._say(reply, f"Reward: {outcome.reward:g}" if outcome.valid else f"Invalid: {outcome.text}")

    def _show(self, play: Play) -> None:
        grid = play.text.splitlines()
        lines = [RULER, *grid, f"Moves: {play.moves} | Seed: {play.seed}", RULER]
        if self.mode is GymOutputMode.AGENT:
            about = [f"GAME: {play.game}", f"DIFFICULTY: {play.difficulty}", f"MOVES: {play.moves}"]
            lines = ["---GAME-START---", *about, "---GRID-START---", *grid, "---GRID-END---", "---GAME-END---"]
        self._say({"type": "observation", **play.state()}, *lines)

    def _hint(self, play: Play) -> None:
        action = play.env.hint()
        if action is None:
            self._fail("HINT_NONE", "There is no hint.")
        else:
            play.hints_used += 1
            hint = f"Try `{action}`"
            self._say({"type": "hint", "success": True, "action": action, "message": hint}, f"Hint: {hint}")

    def _fail(self, code: str, message: str) -> None:
        self._say({"type": "result", "success": False, "code": code, "message": message}, message)

    def _stats(self, play: Play) -> None:
        counts = play.counts()
        self._say({"type": "stats", **counts}, *(f"{name}: {value}" for name, value in counts.items()))

    def _check(self, play: Play) -> None:
        if play.over:
            self._complete(play)
        else:
            self._fail("INCOMPLETE", "It is not solved yet.")

    def _complete(self, play: Play) -> None:
        message = "CONGRATULATIONS! YOU SOLVED IT!" if play.is_complete else "GAME OVER!"
        self._say({"type": "complete", "success": play.is_complete, **play.counts()}, message)

    def _reset(self, play: Play) -> None:
        text = play.env.reset(seed=play.seed, difficulty=play.difficulty)
        self.play = Play(env=play.env, game=play.game, difficulty=play.difficulty, seed=play.seed, text=text)
        self._show(self.play)

    def _seed(self, play: Play) -> None:
        self._lines.append(f"Current puzzle seed: {play.seed}")

    def _help(self, play: Play) -> None:
        self._lines += [*play.env.help().splitlines(), "and: show, hint, stats, check, reset, seed, menu, quit"]

    def _menu(self, play: Play) -> None:
        self.close()
        self._lines += self.greeting()
