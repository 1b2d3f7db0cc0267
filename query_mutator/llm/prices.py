"""What a reply costs: a price for each call to a model, or prices of its tokens; none are bundled.

    small=1,large=8                     in the text of --price
    [large]                             in its .toml or .json file: per token, and per call
    prompt = 3e-6
    output = 15e-6                      `cached` and `reasoning` tokens, if given, have prices of their own

One unit for all models; a budget is in the same.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from query_mutator.errors import UsageError
from query_mutator.files import encode, parse_json
from query_mutator.registry import check_known
from query_mutator.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Prices of a model."""

    call: float = 0.0
    prompt: float = 0.0  # of a token, as the others
    cached: float | None = None  # of the prompt, from the server's cache; None: as the prompt
    output: float = 0.0
    reasoning: float | None = None  # of a thought; None: as the output

    @property
    def is_per_call(self) -> bool:
        """Return whether every call costs the same."""
        return self == Price(call=self.call)

    @property
    def typical(self) -> float:
        """Return the price of a call of a hundred tokens each way."""
        return self.of(Completion(prompt_tokens=100, completion_tokens=100))

    def of(self, reply: Completion) -> float:
        """Return what a reply costs."""
        cached = self.prompt if self.cached is None else self.cached
        reasoning = self.output if self.reasoning is None else self.reasoning
        return (
            self.call
            + self.prompt * (reply.prompt_tokens - reply.cached_tokens)
            + cached * reply.cached_tokens
            + self.output * (reply.completion_tokens - reply.reasoning_tokens)
            + reasoning * reply.reasoning_tokens
        )


Prices = Mapping[str, Price]  # by model


def read_prices(spec: str, models: Sequence[str]) -> Prices:
    """Return the prices in the value of --price, 1 a call where it is empty; UsageError unless it has all `models`."""
    if not spec:
        return dict.fromkeys(models, Price(call=1.0))
    if spec.startswith("{"):
        found = _of_tables(parse_json(spec), "--price")
    else:
        found = _in_text(spec) if "=" in spec else _in_file(Path(spec))
    for name in models:
        if name not in found:
            raise UsageError(f"--price {spec[:100]} has no price of {name}; give one for each model, as {name}=1")
    if not all(price.call or price.prompt or price.output for price in found.values()):
        raise UsageError(f"--price {spec[:100]}: a model that costs nothing has no best use; give it a small price")
    return found


def in_words(prices: Prices) -> str:
    """Return the text of --price that stands for prices, wherever they were read; "" for none."""
    if all(price.is_per_call for price in prices.values()):
        return ",".join(f"{name}={price.call:g}" for name, price in prices.items())
    rows = {name: {key: value for key, value in asdict(price).items() if value} for name, price in prices.items()}
    return encode(rows).decode()


def _in_text(spec: str) -> dict[str, Price]:
    pairs = [part.strip().rpartition("=") for part in spec.split(",") if part.strip()]
    return {name: Price(call=_number(value, f"--price {name}")) for name, _, value in pairs}


def _in_file(path: Path) -> dict[str, Price]:
    try:
        read = tomllib.loads if path.suffix == ".toml" else parse_json
        return _of_tables(read(path.read_text(encoding="utf-8")), f"--price {path}")
    except OSError as error:
        raise UsageError(f"--price {path}: {error.strerror}; give NAME=NUMBER, or a .toml or .json file") from None
    except ValueError as error:
        raise UsageError(f"--price {path}: not a table of prices for each model ({error})") from None


def _of_tables(rows: object, where: str) -> dict[str, Price]:
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise UsageError(f"{where} has a table of prices for each model; see docs/how-to/find-a-plan.md")
    known = [one.name for one in fields(Price)]
    for name, row in rows.items():
        for key in row:
            check_known(f"price of {name}", key, known)
    return {
        name: Price(**{key: _number(value, f"{where}: {key} of {name}") for key, value in row.items()})
        for name, row in rows.items()
    }


def _number(value: object, where: str) -> float:
    try:
        found = float(str(value))
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1e9:
        raise UsageError(f"{where} is {str(value)[:40]!r}; give a number from 0")
    return found
