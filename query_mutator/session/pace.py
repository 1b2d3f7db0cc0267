"""How long calls take: seconds of a run = calls x seconds of a call / calls in flight.

The seconds of a call are those of the newest replies that are kept.
"""

from __future__ import annotations

from query_mutator.llm.backends import BACKENDS
from query_mutator.llm.store import default_cache_path, seconds_seen
from query_mutator.settings.models import AUTO, ModelSettings

MODEL_CALL_S = 2.0  # a model of about 3 B parameters on a desktop GPU


def is_instant(settings: ModelSettings) -> bool:
    """Return whether calls take next to no time, as those to recorded replies do."""
    instant = {name: BACKENDS.get(name).url_flag for name in BACKENDS if BACKENDS.get(name).is_instant}
    if settings.backend == AUTO:
        return any(settings.urls.get(flag) for flag in instant.values())
    return settings.backend in instant


def call_time(settings: ModelSettings) -> tuple[float, str]:
    """Return the seconds of a call, divided by the calls in flight, and the words for where they come from."""
    in_flight = settings.calls_in_flight
    if is_instant(settings):
        simulated = f"{settings.simulated_s:g} s a call, {in_flight} in flight" if settings.simulated_s else "no wait"
        return settings.simulated_s / in_flight, f"{simulated}, as replies are recorded"
    models = {name.removesuffix(":latest") for name in (settings.target_model, settings.mutator_model) if name}
    seen = seconds_seen(settings.cache_path or default_cache_path(), models)
    known = "assumed: no reply of these models is kept" if seen is None else "as the newest replies that are kept"
    call_s = MODEL_CALL_S if seen is None else seen
    return call_s / in_flight, f"{call_s:.3g} s a call, {known}, {in_flight} in flight"
