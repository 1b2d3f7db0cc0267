"""Settings of the models that rewrite, answer and embed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

from cyclopts import Parameter

from ppo.config import ComputeConfig
from ppo.fields import Ge, Le
from query_mutator.bounds import Group, Prose, Sigma, Tokens, Wait, text_of
from query_mutator.settings.calls import Calls, Context
from query_mutator.types import Think

AUTO = "auto"  # what `backend` is unless one is named
RUNNING_SPEED_S = 16.0  # of a call at --running-speed 1
ADDRESS_FLAGS = ("ollama_url", "openai_url", "gguf", "recording")  # the settings that say where a model is
#: Settings that may reach beyond this process, or run code: those of a run or a policy are named again to be used.
PLACES = (
    *ADDRESS_FLAGS, "encoder", "cache_path", "judge_model", "judge_rubric", "local_server_url", "ray_address",
    "dataset", "save_dir", "plugin", "system",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Address(Context):
    """The servers, and the model that answers."""

    backend: str = AUTO
    """Server: auto, ollama, openai, llama, recorded, a plugin's; auto: Ollama if there, else the bundled recording."""
    ollama_url: tuple[str, ...] = ()
    """Address of the Ollama server, or of several that share the calls; else OLLAMA_HOST, else http://127.0.0.1:11434."""
    openai_url: str | None = None
    """Address of an OpenAI-compatible server (vLLM, llama-server, ...); the key is read from OPENAI_API_KEY."""
    gguf: tuple[str, ...] = ()
    """GGUF file of the model, or two: target, then mutator; or smollm2, the bundled test model; runs with llama.cpp."""
    recording: str | None = None
    """Recorded replies that stand for a model: the name of a bundled recording, or a file."""
    target_model: tuple[str, ...] = ()
    """The model that answers, or several to choose from: each NAME, or NAME@URL; see docs/how-to/find-a-plan.md."""

    def __post_init__(self) -> None:
        for name in ("ollama_url", "gguf", "target_model"):  # a program may give one, or none
            if not isinstance(given := getattr(self, name), tuple):
                object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given or ()))
        for name in ("openai_url", "recording"):  # a choice of servers has a tuple of one
            if isinstance(given := getattr(self, name), tuple):
                object.__setattr__(self, name, next(iter(given), None))
        object.__setattr__(self, "target_model", tuple(dict.fromkeys(self.target_model)))
        names = [name for name, _ in map(split_target, self.target_model)]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"--target-model {repeated} has two addresses; give models of two names")
        for flag, url in first_address(self.target_model).items():
            if any(other for name, other in self.urls.items() if other and (name, other) != (flag, url)):
                raise ValueError(f"--target-model {self.target_model[0]} has an address, and so has another flag")
            object.__setattr__(self, flag, url)
            object.__setattr__(self, "target_model", (names[0], *self.target_model[1:]))
        super().__post_init__()

    @property
    def first_model(self) -> str | None:
        """Return the first model that answers, None where none is named."""
        return next(iter(self.targets), None)

    @property
    def targets(self) -> dict[str, str]:
        """Return the address of each model that answers, by its name; "" is that of the other flags."""
        return dict(map(split_target, self.target_model))

    @property
    def urls(self) -> dict[str, str | Sequence[str] | None]:
        """Return the addresses by the name of their flag, as `resolve_backend` and `choose_backend` take them."""
        return {name: getattr(self, name) for name in ADDRESS_FLAGS}


def split_target(text: str) -> tuple[str, str]:
    """Return name and address of a target model, NAME or NAME@URL."""
    name, at, url = text.rpartition("@")
    return (name, url) if at and "://" in url else (text, "")


def flag_of(url: str) -> str:
    """Return the flag for the address of a server: one that has a path, as /v1, is OpenAI-compatible."""
    return "openai_url" if urlsplit(url).path.strip("/") else "ollama_url"


def first_address(target_model: Sequence[str]) -> dict[str, Any]:
    """Return the setting that the address of the first target model stands for, {} without one."""
    url = split_target(target_model[0])[1] if target_model else ""
    flag = flag_of(url)
    return {flag: (url,) if flag == "ollama_url" else url} if url else {}


@dataclass(frozen=True, kw_only=True)
class Models(Address):
    """The models that rewrite and answer, and the servers that run them."""

    mutator_model: str | None = None
    """The model that rewrites; by default the target model."""
    price: str = ""
    """Price of a call to each model, as small=1,large=8, or a .toml or .json file of prices of tokens; else 1."""


@dataclass(frozen=True, kw_only=True)
class Sampling(Group):
    """Settings of sampling."""

    mutator_max_tokens: Tokens = 128
    """Maximum tokens of a rewrite."""
    target_max_tokens: Annotated[Tokens, Parameter(alias="--max-tokens")] = 256
    """Maximum tokens of an answer."""
    temperature: Annotated[float, Ge(0), Le(100)] = 0.0
    """Sampling temperature of both models."""
    system: Prose = ""
    """File with the system prompt of the target, kept in the run's settings; a row's own replaces it."""
    think: Think = "auto"
    """Whether the target thinks before it answers, where it can; auto: not on Ollama, else as the server has it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "system", text_of(self.system, "--system"))
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class Simulation(Group):
    """Simulated times of recorded replies."""

    latency_ms: Wait = 0.0
    """Simulated: mean time of a recorded reply; 0 adds none."""
    latency_sigma: Sigma = 0.0
    """Simulated: sigma of the log-normal spread of that time, the same for the same prompt."""
    running_speed: Wait = 0.0
    """Simulated: 16 s divided by this number in place of --latency-ms; 0 adds no time."""

    @property
    def simulated_s(self) -> float:
        """Return the mean simulated seconds of a call."""
        return RUNNING_SPEED_S / self.running_speed if self.running_speed else self.latency_ms / 1000


@dataclass(frozen=True, kw_only=True)
class Encoding(Group):
    """The sentence encoder."""

    encoder: str = "all-MiniLM-L6-v2"
    """Sentence encoder: a folder, a hub name, or hash (instant, for benchmarks)."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Models, Calls, Encoding, Simulation, ComputeConfig):
    """Models and settings of calls: what `open_models` takes."""
