"""Which runs are meant: the filters that lists and bulk verbs share."""

from __future__ import annotations

from stellwerk.core.errors import Refused
from stellwerk.core.names import LABEL_CHARS_MAX, check_name, check_path
from stellwerk.core.queries import RunQuery
from stellwerk.core.run import State
from stellwerk.web.params import Query, text_param, time_param, words_param

STATES = frozenset(state.value for state in State)
FILTERS = (
    words_param("state", "Runs in this state.", [state.value for state in State]),
    text_param("scope", "Runs of this scope.", chars_max=100),
    text_param("name", "Runs of this name.", chars_max=100),
    text_param("label", "Runs with this label, as key=value."),
    time_param("since", "Runs created at or after this moment."),
    time_param("until", "Runs created before this moment."),
)


def run_query(query: Query) -> RunQuery:
    """The filter that was asked for."""
    scope, name = query.text("scope"), query.text("name")
    return RunQuery(
        states=frozenset(State(word) for word in query.words("state", STATES)),
        scope=None if scope is None else check_path(scope, "scope"),
        name=None if name is None else check_name(name, "name"),
        label=_label(query.text("label")),
        since_ms=query.time_ms("since"),
        until_ms=query.time_ms("until"),
    )


def has_filter(query: Query) -> bool:
    return any(param.name in query for param in FILTERS)


def _label(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    key, sign, value = text.partition("=")
    if not sign or not key or len(key) > LABEL_CHARS_MAX or len(value) > LABEL_CHARS_MAX:
        raise Refused("label must read key=value", "label")
    return key, value
