"""Settings of the models that rewrite, answer and embed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from ppo.config import ComputeConfig
from ppo.fields import Ge, Le
from query_mutator.bounds import Group, Sigma, Tokens, Wait
from query_mutator.settings.calls import Calls, Context
from query_mutator.types import Think

AUTO = "auto"  # what `backend` is unless one is named
RUNNING_SPEED_S = 16.0  # of a call at --running-speed 1
ADDRESS_FLAGS = ("ollama_url", "openai_url", "gguf", "recording")  # the settings that say where a model is
#: Settings that may reach beyond this process, or run code: those of a run or a policy are named again to be used.
PLACES = (
    *ADDRESS_FLAGS, "encoder", "cache_path", "judge_model", "judge_rubric", "local_server_url", "ray_address",
    "dataset", "save_dir", "plugin",
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
    target_model: str | None = None
    """The model that answers."""

    def __post_init__(self) -> None:
        for name in ("ollama_url", "gguf"):  # a program may give one, or none
            if not isinstance(given := getattr(self, name), tuple):
                object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given or ()))
        for name in ("openai_url", "recording"):  # a choice of servers has a tuple of one
            if isinstance(given := getattr(self, name), tuple):
                object.__setattr__(self, name, next(iter(given), None))
        super().__post_init__()

    @property
    def urls(self) -> dict[str, str | Sequence[str] | None]:
        """Return the addresses by the name of their flag, as `resolve_backend` and `choose_backend` take them."""
        return {name: getattr(self, name) for name in ADDRESS_FLAGS}


@dataclass(frozen=True, kw_only=True)
class Models(Address):
    """The models that rewrite and answer, and the servers that run them."""

    mutator_model: str | None = None
    """The model that rewrites; by default the target model."""


@dataclass(frozen=True, kw_only=True)
class Sampling(Group):
    """Settings of sampling."""

    mutator_max_tokens: Tokens = 128
    """Maximum tokens of a rewrite."""
    target_max_tokens: Annotated[Tokens, Parameter(alias="--max-tokens")] = 256
    """Maximum tokens of an answer."""
    temperature: Annotated[float, Ge(0), Le(100)] = 0.0
    """Sampling temperature of both models."""
    think: Think = "auto"
    """Whether the target thinks before it answers, where it can; auto: not on Ollama, else as the server has it."""


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
