"""docgen/blocking_api.py: the blocking client has the calls of `Api`."""

from __future__ import annotations

import inspect

from remit.client.api import Api
from remit.client.blocking import BlockingApi
from remit.docgen.blocking_api import module_text
from remit.docgen.generate import BLOCKING_API

SESSIONS = {"exec"}


def calls(of: type) -> dict[str, object]:
    return {name: member for name, member in vars(of).items() if not name.startswith("_") and callable(member)}


def test_module__is_what_would_be_generated_now() -> None:
    assert BLOCKING_API.read_text() == module_text()


def test_every_call__blocks_under_the_same_name_parameters_and_docstring() -> None:
    blocking = calls(BlockingApi)
    for name, call in calls(Api).items():
        if name in SESSIONS or name == "close":
            continue
        made = blocking.pop(name)
        assert callable(call) and callable(made)
        assert list(inspect.signature(made).parameters.values()) == list(inspect.signature(call).parameters.values()), name
        assert inspect.getdoc(made) == inspect.getdoc(call), name
        assert inspect.getdoc(made), f"Api.{name} has no docstring"
    assert not blocking
