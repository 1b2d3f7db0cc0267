"""One client of a puzzle gym: lines in, lines out, no socket.

    menu    NAME|NUMBER [easy|medium|hard] [SEED], help, mode NAME, quit
    puzzle  show, hint, stats, check, reset, seed, help, mode NAME, menu, quit - anything else is an action

It speaks the puzzle arcade's protocol, so clients of the one play the other. In JSON mode every reply is one object a
line; results carry `reward`, `terminated` and `truncated` beside `success`, `code` and `message`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from query_mutator.batching.streaming.gym_types import GymOutputMode, PuzzleDifficulty

RULER = "=" * 50
MAX_SEED = 2**31


class StepOutcome(NamedTuple):
    """What an action led to; `valid` False when the environment does not know it, and then nothing has changed."""

    text: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool = False  # the puzzle is solved
    valid: bool = True
    info: Mapping[str, Any] = {}


class TextEnv(Protocol):
    """A puzzle in words. One is made for each connection; its methods run in a thread of the server's pool."""

    def reset(self, *, seed: int, difficulty: str) -> str:
        """Begin and return what there is to see."""
        ...

    def step(self, action: str) -> StepOutcome:
        """Carry out an action in words."""
        ...

    def hint(self) -> str | None:
        """Return an action worth trying, or None."""
        ...

    def help(self) -> str:
        """Return the rules and the actions, for a person."""
        ...

    def close(self) -> None:
        """Give up what it holds."""
        ...


class Game(NamedTuple):
    """A puzzle on the menu."""

    title: str
    description: str
    make: Callable[[], TextEnv]


@dataclass(slots=True, kw_only=True)
class Play:
    """A puzzle being played."""

    title: str
    env: TextEnv
    difficulty: str
    seed: int
    text: str
    moves: int = 0
    invalid_moves: int = 0
    hints_used: int = 0
    total_reward: float = 0.0
    over: bool = False
    solved: bool = False

    def state(self) -> dict[str, Any]:
        """Return the state as JSON clients see it."""
        return {
            "game": self.title,
            "difficulty": self.difficulty,
            "seed": self.seed,
            "moves": self.moves,
            "invalid_moves": self.invalid_moves,
            "hints_used": self.hints_used,
            "total_reward": self.total_reward,
            "is_complete": self.solved,
            "text": self.text,
        }


@dataclass(slots=True)
class Session:
    """One client: the mode it reads, the puzzle it plays. `answer` is all of the protocol, without a socket."""

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

    # --- menu ------------------------------------------------------------------------------------------------------

    def _set_mode(self, name: str) -> None:
        known = name in set(GymOutputMode)
        if known:
            self.mode = GymOutputMode(name)
        if self.mode is GymOutputMode.JSON:
            reply = {"type": "mode", "success": True} if known else {"type": "error", "code": "INVALID_MODE"}
            self._json({**reply, "mode": name})
        elif known:
            self._lines.append(f"Output mode set to: {name}")
        else:
            self._lines.append(f"Invalid mode '{name}'. Choose: {', '.join(GymOutputMode)}")

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
        self.play = Play(title=game.title, env=env, difficulty=difficulty, seed=seed, text=text)
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
        play.text, play.over, play.solved = outcome.text, outcome.terminated or outcome.truncated, outcome.success
        self._result(play, outcome, code="OK")
        self._show(play)
        if play.over:
            self._complete(play)

    def _result(self, play: Play, outcome: StepOutcome, *, code: str) -> None:
        if self.mode is not GymOutputMode.JSON:
            said = f"Reward: {outcome.reward:g}" if outcome.valid else f"Invalid: {outcome.text}"
            self._lines.append(said)
            return
        self._json(
            {
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
        )

    def _show(self, play: Play) -> None:
        if self.mode is GymOutputMode.JSON:
            self._json({"type": "observation", **play.state()})
        elif self.mode is GymOutputMode.AGENT:
            about = [f"GAME: {play.title}", f"DIFFICULTY: {play.difficulty}", f"MOVES: {play.moves}"]
            grid = ["---GRID-START---", *play.text.splitlines(), "---GRID-END---"]
            self._lines += ["---GAME-START---", *about, *grid, "---GAME-END---"]
        else:
            self._lines += [RULER, *play.text.splitlines(), f"Moves: {play.moves} | Seed: {play.seed}", RULER]

    def _hint(self, play: Play) -> None:
        action = play.env.hint()
        play.hints_used += action is not None
        if self.mode is GymOutputMode.JSON:
            if action is None:
                self._json({"type": "result", "success": False, "code": "HINT_NONE", "message": "There is no hint."})
            else:
                self._json({"type": "hint", "success": True, "action": action, "message": f"Try `{action}`"})
        else:
            self._lines.append("There is no hint." if action is None else f"Hint: Try `{action}`")

    def _stats(self, play: Play) -> None:
        state = {name: value for name, value in play.state().items() if name != "text"}
        if self.mode is GymOutputMode.JSON:
            self._json({"type": "stats", **state})
        else:
            self._lines += [f"{name}: {value}" for name, value in state.items()]

    def _check(self, play: Play) -> None:
        if play.over:
            self._complete(play)
        elif self.mode is GymOutputMode.JSON:
            self._json({"type": "result", "success": False, "code": "INCOMPLETE", "message": "It is not solved yet."})
        else:
            self._lines.append("It is not solved yet.")

    def _complete(self, play: Play) -> None:
        if self.mode is GymOutputMode.JSON:
            state = {name: value for name, value in play.state().items() if name != "text"}
            self._json({"type": "complete", "success": play.solved, **state})
        else:
            self._lines.append("CONGRATULATIONS! YOU SOLVED IT!" if play.solved else "GAME OVER!")

    def _reset(self, play: Play) -> None:
        text = play.env.reset(seed=play.seed, difficulty=play.difficulty)
        self.play = Play(title=play.title, env=play.env, difficulty=play.difficulty, seed=play.seed, text=text)
        self._show(self.play)

    def _seed(self, play: Play) -> None:
        self._lines.append(f"Current puzzle seed: {play.seed}")

    def _help(self, play: Play) -> None:
        self._lines += [*play.env.help().splitlines(), "and: show, hint, stats, check, reset, seed, menu, quit"]

    def _menu(self, play: Play) -> None:
        self.close()
        self._lines += self.greeting()

    def _json(self, value: Mapping[str, Any]) -> None:
        self._lines.append(json.dumps(value, separators=(",", ":"), ensure_ascii=False))
